"""A score_mod and a mask_mod of your own, with a learned parameter, in every branch of the attention.

They are written as for FlexAttention: positions come in as tensors and the function runs inside of the attention, so no
bias or mask of S x S is ever made.
"""

import torch
from torch import Tensor, nn

from flexnsa import NativeSparseAttention, mods


def main(seq_len: int = 1024, heading: int = 64, passage: int = 256) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = NativeSparseAttention(dim=256, num_heads=4, num_kv_heads=2, head_dim=64).to(device).eval()
    rate = nn.Parameter(torch.full((4,), 0.5, device=device))  # one a head; give it to the optimizer as well

    def recency(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        # Positions count from the start of a document. A compressed token stands at the last token that it covers.
        return score - rate[h] * torch.log1p(q_idx - kv_idx)

    def own_passage_or_heading(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        # True where a query may look; that it never looks ahead goes without saying.
        return (q_idx // passage == kv_idx // passage) | (kv_idx < heading)

    score_mod = mods.chain(mods.soft_cap(30.0), recency)  # masks combine by and_masks, or_masks of PyTorch
    x = torch.randn(1, seq_len, 256, device=device)
    y = layer(x, score_mod=score_mod, mask_mod=own_passage_or_heading)
    y.square().mean().backward()
    print(f"gradient of the rates: {[f'{gradient:.1e}' for gradient in rate.grad.tolist()]}")

    # A token behind the heading changes its own passage alone. (Were it among the last of the passage, it would show in
    # the next one too: a compressed token across the border stands at its last token, which is in the next.)
    token = heading + 10
    x[:, token] += 1
    changed = (layer(x, score_mod=score_mod, mask_mod=own_passage_or_heading) != y).any(-1)[0].nonzero()
    print(f"changing token {token} changed the outputs of tokens {changed.min()} to {changed.max()}")
    assert changed.min() >= token
    assert changed.max() < passage


if __name__ == "__main__":
    main()
