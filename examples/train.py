"""Train a small language model on bytes of Python's own source, compiled; two to three minutes on two CPU cores.

The model is yours to write: the layer takes (B, S, dim) and gives (B, S, dim), as any attention does. What ``python -m
flexnsa train`` adds to this loop is a schedule, checkpoints, exact resuming and evaluation.
"""

import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flexnsa import NativeSparseAttention, NSAConfig, SelectionLoss
from flexnsa.optim import parameter_groups

HEADS, KV_HEADS = 8, 2
CONFIG = NSAConfig.for_text(  # small blocks for short sequences; without a config they are as in the paper
    HEADS,
    KV_HEADS,
    compress_block_size=16,
    compress_stride=8,
    select_block_size=32,
    num_selected_blocks=8,
    window_size=64,
)


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = NativeSparseAttention(dim, HEADS, KV_HEADS, dim // HEADS, config=CONFIG, preset="text")
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, selection: SelectionLoss) -> Tensor:
        x = x + self.attention(self.attention_norm(x), selection=selection)  # it rotates by position itself: RoPE
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """Embedding, blocks and a head; each block adds to the loss that teaches the layers which blocks to select."""

    def __init__(self, dim: int, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_layers))
        self.head = nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, 256))

    def forward(self, tokens: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        x, selection = self.embedding(tokens), SelectionLoss(seed=0, step=step)
        for block in self.blocks:
            x = block(x, selection)
        return self.head(x), torch.as_tensor(selection.total)


def read_bytes() -> Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def main(steps: int = 100, seq_len: int = 512, batch_size: int = 4, dim: int = 128, num_layers: int = 2) -> list[float]:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model(dim, num_layers).to(device)
    compiled = torch.compile(model, fullgraph=True)  # no graph break: the loops that depend on data are operators
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-3))  # compressors learn at a tenth of the rate
    text = read_bytes()

    losses, begin = [], time.perf_counter()
    for step in range(steps):
        starts = torch.randint(len(text) - seq_len, (batch_size,)).tolist()
        tokens = torch.stack([text[start : start + seq_len + 1] for start in starts]).long().to(device)
        logits, selection_loss = compiled(tokens[:, :-1], torch.tensor(step))  # a tensor: compiled once for all steps
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss + selection_loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0 or step == steps - 1:
            seconds = time.perf_counter() - begin
            print(f"step {step:4}  loss {losses[-1]:.3f}  selection {selection_loss.item():.4f} nats  {seconds:5.1f} s")
    return losses


if __name__ == "__main__":
    main()
