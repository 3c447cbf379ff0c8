"""One attention layer, forward and backward: what it takes, what it gives, and what a query looked at."""

import torch

from flexnsa import NativeSparseAttention, NSAConfig, native_sparse_attention


def main(seq_len: int = 4096) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = NSAConfig(  # the paper's sizes, which are the defaults too
        compress_block_size=32,
        compress_stride=16,
        select_block_size=64,
        num_selected_blocks=16,
        window_size=512,
    )
    layer = NativeSparseAttention(dim=768, num_heads=12, num_kv_heads=2, head_dim=64, config=config).to(device)

    x = torch.randn(1, seq_len, 768, device=device)
    y = layer(x)
    y.square().mean().backward()  # memory grows with seq_len, not with its square
    print(f"{tuple(x.shape)} -> {tuple(y.shape)}, gradients for {sum(1 for _ in layer.parameters())} parameters")

    # The layer is projections around a function of heads, to which you may give heads of your own. Every branch has
    # keys and values of its own; those of cmp are already compressed, one for every `compress_stride` tokens.
    num_compressed = (seq_len - config.compress_block_size) // config.compress_stride + 1
    q = torch.randn(1, 12, seq_len, 64, device=device)
    k, v, k_win, v_win = torch.randn(4, 1, 2, seq_len, 64, device=device)
    k_cmp, v_cmp = torch.randn(2, 1, 2, num_compressed, 64, device=device)
    gates = torch.rand(1, 12, seq_len, 3, device=device)
    out, aux = native_sparse_attention(
        q, k, v, gates, k_cmp=k_cmp, v_cmp=v_cmp, k_win=k_win, v_win=v_win, config=config, return_aux=True
    )
    blocks = [block for block in aux.block_indices[0, 0, -1].tolist() if block >= 0]  # shorter lists end in -1
    print(f"{tuple(q.shape)} -> {tuple(out.shape)}; the last query of key/value head 0 selected blocks {blocks}")


if __name__ == "__main__":
    main()
