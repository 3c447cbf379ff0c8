"""Teach a model that exists to select: only indexers learn, and they learn where its attention is.

python examples/transformers/teach_selector.py [folder or name of a Llama, Qwen or other dense model]
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from flexnsa import NSAConfig, SelectionLoss
from flexnsa.optim import index_parameters
from flexnsa.transformers import convert, recall


def main(name: str | None = None, pretrain: int = 250, steps: int = 80, passage: int = 96) -> list[float]:
    rows = twice(name, passage)
    dense: Any = small_llama(rows[16:], pretrain) if name is None else AutoModelForCausalLM.from_pretrained(name)

    # Of up to 24 blocks of 8 tokens a query reads 4: the first, the last two, and the one that scores best.
    heads = dense.config.num_attention_heads // dense.config.num_key_value_heads
    sizes = {"compress_block_size": 8, "compress_stride": 8, "select_block_size": 8, "num_selected_blocks": 4}
    nsa = NSAConfig(**sizes, index_heads=heads, index_block_size=4, index_stride=4)
    model = convert(dense, nsa, branches=["slc"], index_rank=8)

    model.requires_grad_(False)
    own = [parameter.requires_grad_() for parameter in index_parameters(model)]
    optimizer, found = torch.optim.AdamW(own, lr=1e-2), [recall(model, rows[:16]).nanmean().item()]
    print(f"dense attention: loss {loss_of(dense, rows[:16]):.3f}")
    print(f"means of keys:   loss {loss_of(model, rows[:16]):.3f}, recall {found[0]:.3f}")
    for step in range(steps):
        selection = SelectionLoss(step=step, num_queries=64)
        model.model(draw(rows[16:], step), selection=selection, use_cache=False)  # the head has nothing to learn
        selection.total.backward()
        optimizer.step()
        optimizer.zero_grad()
    found.append(recall(model, rows[:16]).nanmean().item())
    print(f"taught indexers: loss {loss_of(model, rows[:16]):.3f}, recall {found[1]:.3f}")
    share = sum(x.numel() for x in own) / sum(x.numel() for x in dense.parameters())
    print(f"{share:.1%} of the parameters have learned")
    assert share < 0.1
    return found


def twice(name: str | None, passage: int) -> Tensor:
    """Read Python's library in rows that repeat a passage, so that it is worth looking back."""
    text = "".join(file.read_text() for file in sorted(Path(os.__file__).parent.glob("[a-d]*.py")))
    ids = list(text.encode()) if name is None else AutoTokenizer.from_pretrained(name)(text)["input_ids"]
    return torch.tensor(ids)[: len(ids) // passage * passage].view(-1, passage).repeat(1, 2)


def draw(rows: Tensor, step: int) -> Tensor:
    return rows[torch.randint(len(rows), (8,), generator=torch.Generator().manual_seed(step))]


@torch.no_grad()
def loss_of(model: Any, rows: Tensor) -> float:
    return model(rows, labels=rows).loss.item()


def small_llama(rows: Tensor, steps: int) -> LlamaForCausalLM:
    """Train a dense model that copies the passage."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=256, eos_token_id=None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        x = draw(rows, step)
        model(x, labels=x, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


if __name__ == "__main__":
    main(*sys.argv[1:2])
