"""A model that predicts different tokens, and prompts of different lengths: what tests of sessions draw from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexnsa import NSAConfig
from flexnsa.lm import DecoderConfig, DecoderLM, Sampling

SIZES = NSAConfig(compress_block_size=8, compress_stride=4, select_block_size=8, num_selected_blocks=4, window_size=12)
GREEDY = Sampling(temperature=0)
LENGTHS = torch.tensor([17, 1, 9])


def make_model(attention: Any = "nsa", nsa: NSAConfig = SIZES, num_layers: int = 2) -> DecoderLM:
    """A model whose predictions are not all alike: large embeddings and logits."""
    torch.manual_seed(1)
    heads: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "v_head_dim": 6}
    config = DecoderConfig(dim=32, num_layers=num_layers, **heads, nsa=nsa, attention=attention)
    model = DecoderLM(config).eval().requires_grad_(False)
    model.head.weight.mul_(20)
    for layer in model.layers:
        layer.get_submodule("attention.w_o").weight.mul_(8)  # pyright: ignore[reportCallIssue, reportOperatorIssue]
    return model


def prompts(batch: int = 3, length: int = 17, seed: int = 3) -> Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(seed))
