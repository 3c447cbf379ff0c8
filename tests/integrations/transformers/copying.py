"""Teach indexers of small models that copy: ``python -m tests.integrations.transformers.copying qwen4_exp``.

A model learns densely to repeat lists of random length; then its indexers alone learn for 300 steps. On unseen rows,
before and after: each layer's recall, and the share of copied tokens, by dense attention and by the model's choice.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from flexnsa.transformers import teach_indexers
from tests.integrations.transformers.released_models import released

LENGTH, STEPS, TOKENS = 128, 300, 64
HEADS = {"hidden_size": 64, "head_dim": 32}
LATENT = {"hidden_size": 64, "index_head_dim": 64, "index_topk": 24, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
LATENT |= {"v_head_dim": 32, "q_lora_rank": 64, "kv_lora_rank": 64, "intermediate_size": 128, "initializer_range": 0.02}
SHARED = {"indexer_types": ["full", "full", "shared"]}
TYPES: dict[str, dict[str, Any]] = {
    "minimax_m3_vl": HEADS | {"index_head_dim": 64, "dense_intermediate_size": 128, "rotary_dim": 16},
    "qwen4_exp": HEADS
    | {"indexer_head_dim": 64, "indexer_budget": 24, "moe_intermediate_size": 64, "num_hidden_layers": 4}
    | {"shared_expert_intermediate_size": 64, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    | {"layer_types": ["linear_attention", "indexed_attention"] * 2},
    "deepseek_v32": LATENT,
    "glm_moe_dsa": LATENT | SHARED,
    "hy_v4": LATENT | SHARED,
    "mistral_large4": LATENT | SHARED,
}
"""Settings of each type, beside those of the tests."""


def logits_of(model: Any, x: Tensor) -> Tensor:
    out = model(x, use_cache=False)
    return out.logits if hasattr(out, "logits") else model.lm_head(out[0])


def rows_to_copy(seed: int, rows: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw distinct tokens, repeated to the end, and what follows each; -100 in the first round, which is random."""
    made = torch.Generator().manual_seed(seed)
    while True:
        lengths = torch.randint(16, 60, (rows,), generator=made)
        lists = [torch.randperm(TOKENS, generator=made)[:n] + 3 for n in lengths.tolist()]
        drawn = torch.stack([x.repeat(LENGTH // len(x) + 2)[: LENGTH + 1] for x in lists])
        first = torch.arange(LENGTH) < lengths[:, None] - 1
        yield drawn[:, :-1], drawn[:, 1:].masked_fill(first, -100)


def train(model: Any, steps: int, lr: float, *, indexers: bool) -> None:
    """Learn densely to copy, or teach the indexers."""
    data = rows_to_copy(seed=int(indexers))
    with teach_indexers(model, num_queries=LENGTH if indexers else 1) as teaching:
        learning = [x.requires_grad_() for x in model.parameters() if x.requires_grad == indexers]
        optimizer = torch.optim.AdamW(learning, lr, betas=(0.9, 0.99), weight_decay=0.0)
        rate = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) * 8 / steps, (steps - step) * 4 / steps))
        for x, targets in itertools.islice(data, steps):
            logits = logits_of(model, x)
            taught = teaching.loss()
            loss = taught if indexers else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(learning, 1.0)
            optimizer.step()
            rate.step()


@torch.no_grad()
def measure(model: Any) -> str:
    """Return the recall of each layer, and the share of copied tokens, dense and by the model's choice."""
    x, targets = next(rows_to_copy(999, 32))

    def copied() -> float:
        return (logits_of(model, x).argmax(-1) == targets)[targets >= 0].float().mean().item()

    with teach_indexers(model, num_queries=LENGTH) as teaching:
        dense, recall = copied(), " ".join(f"{layer:.3f}" for layer in teaching.recall().tolist())
    return f"recall {recall}, copied densely {dense:.3f}, by choice {copied():.3f}"


if __name__ == "__main__":
    torch.manual_seed(0)
    kind, dense_steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1600
    model: Any = released(kind, vocab_size=TOKENS + 3, **TYPES[kind])
    model.init_weights()
    if not hasattr(model, "lm_head"):  # transformers has no such class
        model.lm_head = nn.Linear(64, TOKENS + 3, bias=False)
    train(model, dense_steps, 3e-3, indexers=False)
    print(kind, "before:", measure(model), flush=True)
    train(model, STEPS, 1e-2, indexers=True)
    print(kind, "after:", measure(model))
