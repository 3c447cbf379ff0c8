"""Cases of the selection loss, and what the Triton kernels compute of them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flexnsa import NSAConfig, selection_loss
from flexnsa.attention import dispatch
from flexnsa.attention.selection_loss import selection_loss_by
from flexnsa.attention.triton import selection_loss as triton_selection_loss
from flexnsa.mods import ScoreMod, soft_cap
from tests.support.inputs import SMALL
from tests.support.scorers import BEST_KEYS, INDEX, LONG_KEYS, NOT_FORCED, TWO_HEADS, UNITS, learners, make

functional = importlib.import_module("flexnsa.functional.selection_loss")  # whose function has the same name

BLOCKS_OF_128 = replace(NOT_FORCED, select_block_size=128, index_heads=1, index_block_size=8, index_stride=8)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call; its tensors come from :func:`tests.support.scorers.make`."""

    config: NSAConfig
    documents: tuple[int, ...] = (150,)
    batch: int = 1
    kv_heads: int = 1
    group: int = 2
    dim: int = 8
    dtype: torch.dtype = torch.float32
    num_queries: int = 24
    query_weights: str = "mass"
    scratch_sums: int = 2**26
    blocks_at_once: int = 16
    mod: ScoreMod | None = None
    lengths: tuple[int, ...] | None = None
    """Tokens of each sequence before its padding."""

    def inputs(self, device: str = "cpu", dtype: torch.dtype | None = None) -> dict[str, Any]:
        """The arguments of the loss; in another dtype, after rounding to the case's own."""
        sizes = {"batch": self.batch, "kv_heads": self.kv_heads, "group": self.group, "dim": self.dim}
        documents = self.documents if len(self.documents) > 1 else ()
        made = make(sum(self.documents), self.config, **sizes, documents=documents, dtype=self.dtype)
        moved = {name: x.detach().to(device) if isinstance(x, Tensor) else x for name, x in made.items()}
        for name in {"q", "k", *learners(moved)}:
            moved[name] = moved[name].to(dtype or self.dtype).requires_grad_(name in learners(moved))
        return moved


CASES = {
    "compressed keys": Case(config=SMALL, kv_heads=2, query_weights="mean"),
    "index heads of a group of 6": Case(config=replace(INDEX, index_heads=3), group=6, dim=24),
    "keys that overlap, in a batch": Case(config=TWO_HEADS, batch=2, query_weights="mean"),
    "keys longer than blocks": Case(config=LONG_KEYS, group=3),
    "nothing forced": Case(config=NOT_FORCED, num_queries=70, documents=(90,)),
    "blocks of several tiles": Case(config=BLOCKS_OF_128, documents=(450,), num_queries=12),
    "chunks of queries": Case(config=INDEX, scratch_sums=200),
    "documents": Case(config=TWO_HEADS, documents=(70, 3, 43, 14, 20), num_queries=75),
    "documents, keys longer than blocks": Case(config=LONG_KEYS, documents=(70, 3, 77), query_weights="mean"),
    "padding": Case(config=replace(TWO_HEADS, num_init_blocks=0, num_local_blocks=0), batch=2, lengths=(90, 11)),
    "shorter than a key": Case(config=SMALL, documents=(7,)),
    "best keys": Case(config=BEST_KEYS, kv_heads=2, batch=2, lengths=(90, 11)),
    "products of all heads": Case(config=UNITS, kv_heads=2, documents=(70, 3, 77), query_weights="mean"),
    "bf16": Case(config=INDEX, group=16, dim=64, dtype=torch.bfloat16, num_queries=20),
    "capped": Case(config=LONG_KEYS, documents=(70, 3, 77), group=3, mod=soft_cap(1.5)),
}


def by_kernels(case: Case, device: str) -> dict[str, Tensor]:
    """The sum, its weight, and the gradients of the sum; on the CPU only in the process that interprets kernels."""
    from flexnsa.attention.triton.kernels import selection_loss as launches

    operators = triton_selection_loss.selection_loss_triton, triton_selection_loss.product_loss_triton
    operator = operators[case.config.index_score is not None]
    kernels = replace(dispatch.TRITON, selection_loss=partial(selection_loss_by, operator))
    small = mock.patch.object(triton_selection_loss, "SCRATCH_SUMS", case.scratch_sums)
    few = mock.patch.object(launches, "BLOCKS_AT_ONCE", case.blocks_at_once)
    with small, few, mock.patch.dict(dispatch.IMPLEMENTATIONS, triton=kernels):
        return by_implementation("triton", case, case.inputs(device))


def by_implementation(impl: str, case: Case, x: dict[str, Any]) -> dict[str, Tensor]:
    """The sum, its weight, and the gradients of the sum."""
    options: dict[str, Any] = {"num_queries": case.num_queries, "query_weights": case.query_weights}
    lengths = None if case.lengths is None else torch.tensor(case.lengths, device=x["q"].device)
    choose = partial(functional.sampled_tokens, lengths=lengths)
    with mock.patch.object(functional, "sampled_tokens", choose):
        total, weight = selection_loss(**x, **options, score_mod=case.mod, reduction="sum", impl=impl)
    grads = torch.autograd.grad(total, list(learners(x).values()))
    found = {"total": total.detach(), "weight": weight, **dict(zip(learners(x), grads, strict=True))}
    return {name: value.cpu() for name, value in found.items()}


def interpret(name: str, device: str = "cpu") -> dict[str, Tensor]:
    """Run a case."""
    return by_kernels(CASES[name], device)
