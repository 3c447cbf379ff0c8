"""Documents of many lengths in one row, without padding: each is attended to as if it were alone."""

import torch
from torch.nn import functional as F

from flexnsa import document_ids_from_cu_seqlens, next_token_targets
from flexnsa.lm import DecoderLM, preset


def main(lengths: tuple[int, ...] = (700, 33, 1, 257, 1024, 5)) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = DecoderLM(preset("small")).to(device)
    documents = [torch.randint(256, (1, length), device=device) for length in lengths]

    # One row of them all. A document may begin at any token: nothing needs to be aligned to blocks.
    tokens = torch.cat(documents, dim=1)
    cu_seqlens = F.pad(torch.tensor(lengths, device=device).cumsum(0), (1, 0))
    document_ids = document_ids_from_cu_seqlens(cu_seqlens, seq_len=tokens.shape[1])  # (1, S): 0 0 0 ... 1 1 ... 2

    # Trained as any other row, except that no document predicts the first token of the next: its target is -100.
    logits = model(tokens, document_ids=document_ids)
    loss = F.cross_entropy(logits.flatten(0, 1), next_token_targets(tokens, document_ids).flatten())
    loss.backward()
    print(f"{len(lengths)} documents, {tokens.shape[1]} tokens in one row, loss {loss.item():.3f}")

    # That attention, its block grids and rotary positions restart at each document is a claim that can be checked.
    with torch.no_grad():
        alone = torch.cat([model(document) for document in documents], dim=1)
    torch.testing.assert_close(logits, alone)
    print(f"largest difference from each document by itself: {(logits - alone).abs().max():.1e}")


if __name__ == "__main__":
    main()
