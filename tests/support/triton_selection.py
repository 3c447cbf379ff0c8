"""Cases of block selection, the dense formula in float64, and the results of the Triton kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flexnsa.attention.interface import Call
from flexnsa.attention.plan import STEP_TOKENS
from flexnsa.attention.selection import select_in_chunks
from flexnsa.attention.triton.arguments import factors_of
from flexnsa.config import NSAConfig, num_blocks, num_compressed
from flexnsa.masks.positions import Positions
from flexnsa.mods import ScoreMod, soft_cap
from tests.support.inputs import sizes, spread


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call: packed documents, of which the last ``num_queries`` tokens are queries."""

    config: NSAConfig
    documents: tuple[int, ...]
    group: int
    batch: int = 1
    kv_heads: int = 1
    head_dim: int = 32
    dtype: torch.dtype = torch.float32
    num_queries: int | None = None
    zero: bool = False
    scratch_bytes: int = 2**20
    spread: bool = False
    longest: int | None = None
    scale: float | None = None
    mod: ScoreMod | None = None

    @property
    def factor(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def is_whole_sequence(self) -> bool:
        return len(self.documents) == 1 and self.num_queries is None

    def positions(self) -> Positions:
        """Positions of all the queries."""
        token, start, cmp_start = [], [], []
        first_token = first_cmp = 0
        for length in self.documents:
            token += range(first_token, first_token + length)
            start += [first_token] * length
            cmp_start += [first_cmp] * length
            first_token += length
            first_cmp += num_compressed(length, self.config)
        rows = torch.tensor([token, start, cmp_start], dtype=torch.int32)[:, None, -(self.num_queries or 0) :]
        return Positions(*rows, longest=self.longest)

    def inputs(self) -> tuple[Tensor, Tensor]:
        """Random queries and compressed keys; the queries lie in memory as ``(B, T, Hq, D)``."""
        generator = torch.Generator().manual_seed(0)
        num_queries = self.positions().token.shape[1]
        num_keys = sum(num_compressed(length, self.config) for length in self.documents)
        q = torch.randn(self.batch, num_queries, self.kv_heads * self.group, self.head_dim, generator=generator)
        k = torch.randn(self.batch, self.kv_heads, num_keys, self.head_dim, generator=generator)
        q, k = (q * (not self.zero)).to(self.dtype).transpose(1, 2), k.to(self.dtype)
        return (spread(q), spread(k)) if self.spread else (q, k)


PAPER = sizes(32, 16, 64, 4, 1, 2)
CASES = {
    "paper-g4": Case(config=sizes(32, 16, 64, 3, 1, 1), documents=(197,), group=4),
    "bf16-g16": Case(config=sizes(16, 8, 16, 3, 1, 1), documents=(81,), group=16, dtype=torch.bfloat16, head_dim=64),
    "paper-fp16": Case(config=sizes(32, 16, 64, 2, 1, 1), documents=(133,), group=1, dtype=torch.float16),
    "half-sizes-g6-batch-heads": Case(config=sizes(16, 8, 32, 2, 1, 1), documents=(51,), group=6, batch=2, kv_heads=2),
    "no-overlap-dim24": Case(config=sizes(8, 8, 8, 5, 1, 2), documents=(75,), group=2, head_dim=24),
    "wide-blocks-two-block-tiles": Case(config=sizes(4, 2, 16, 3, 0, 1), documents=(261,), group=1, head_dim=16),
    "key-over-three-blocks": Case(config=sizes(16, 4, 8, 5, 1, 1), documents=(77,), group=3),
    "chunks": Case(config=sizes(8, 4, 8, 4, 1, 1), documents=(140,), group=2, scratch_bytes=1),
    "all-blocks-fit": Case(config=sizes(8, 4, 16, 16, 1, 1), documents=(70,), group=2),
    "negative-scale": Case(config=sizes(8, 4, 16, 3, 1, 1), documents=(90,), group=2, scale=-0.3),
    "scale-of-zero": Case(config=sizes(8, 4, 16, 3, 1, 1), documents=(90,), group=2, scale=0.0, zero=True),
    "ties": Case(config=sizes(12, 4, 16, 4, 0, 0), documents=(90,), group=4, zero=True),
    "keys-of-a-token-dim256": Case(config=sizes(1, 1, 16, 3, 1, 1), documents=(150,), group=1, head_dim=256),
    "shorter-than-a-key": Case(config=sizes(32, 16, 64, 2, 1, 1), documents=(31,), group=4),
    "documents": Case(config=sizes(8, 4, 16, 3, 1, 1), documents=(40, 3, 7, 50, 1, 40), group=2),
    "documents-few-queries": Case(
        config=sizes(4, 2, 8, 3, 1, 1), documents=(50, 190, 1, 20), group=3, kv_heads=2, num_queries=40, longest=191
    ),
    "documents-keys-over-three-blocks": Case(
        config=sizes(16, 4, 8, 5, 1, 1), documents=(30, 3, 16, 40) * 2, group=3, longest=40
    ),
    "decoding": Case(config=sizes(8, 4, 16, 3, 1, 1), documents=(301,), group=4, num_queries=3, batch=2),
    "decoding-bf16-g16": Case(
        config=PAPER, documents=(777,), group=16, num_queries=1, batch=2, kv_heads=2, dtype=torch.bfloat16
    ),
    "decoding-g6-dim24": Case(config=sizes(8, 8, 8, 5, 1, 1), documents=(75, 20), group=6, num_queries=2, head_dim=24),
    "rows-beyond-32-bits": Case(
        config=sizes(8, 4, 16, 3, 1, 1), documents=(60,), group=2, kv_heads=2, dtype=torch.float16, spread=True
    ),
    "decoding-rows-beyond-32-bits": Case(
        config=sizes(8, 4, 16, 3, 1, 1), documents=(301,), group=4, num_queries=3, dtype=torch.float16, spread=True
    ),
    "decoding-key-over-three-blocks": Case(config=sizes(16, 4, 8, 5, 1, 1), documents=(77,), group=3, num_queries=8),
}
CAPPED = "paper-g4", "bf16-g16", "negative-scale", "scale-of-zero", "documents-few-queries", "decoding"
CASES |= {f"{name}-capped": replace(CASES[name], mod=soft_cap(1.5)) for name in CAPPED}

MSA, QSA = NSAConfig.msa, NSAConfig.qsa
NONE_FORCED = MSA(select_block_size=16, num_selected_blocks=3, num_local_blocks=0).scoring
UNITS = QSA(num_selected_blocks=4).scoring
PRODUCTS = {
    "best keys": Case(config=NONE_FORCED, documents=(67,), group=2),
    "best keys below 0": Case(config=NONE_FORCED, documents=(150,), group=2, scale=-1.0),
    "best keys of documents": Case(
        config=MSA(num_selected_blocks=2).scoring, documents=(140, 3, 7, 301), group=2, batch=2
    ),
    "units": Case(config=UNITS, documents=(150,), group=4, head_dim=24),
    "units of documents": Case(
        config=QSA(select_block_size=8, num_selected_blocks=3).scoring, documents=(40, 3, 7, 50, 1, 40), group=4
    ),
    "steps": Case(
        config=MSA(num_selected_blocks=2).scoring, documents=(600,), group=2, num_queries=3, dtype=torch.bfloat16
    ),
    "steps over units": Case(config=UNITS, documents=(75, 20), group=4, num_queries=5),
}
"""Those of scores by products: ``group`` index queries and one index key."""


def choose_by_products(case: Case, device: str) -> dict[str, Tensor]:
    """Choose by the kernels, and by products in chunks, of whole numbers, whose scores are exact and often equal."""
    from flexnsa.attention.triton import selection as scoring_triton

    q, k = (x.mul(1.5).round().to(device) for x in case.inputs())
    if case.factor < 0:
        q, k = -q.abs(), k.abs() + 1
    positions = None if case.is_whole_sequence else case.positions().map(lambda x: x.to(device))
    call = Call(case.config, 1.0, positions=positions)
    with mock.patch.multiple(scoring_triton, SCRATCH_BYTES=2**14, MANY_PROGRAMS=1):
        got = scoring_triton.launch_selection(q, k, None, call)
    want = select_in_chunks(q, k, None, call)
    return {"got": got.cpu(), "want": want.cpu()}


def dense_lse_and_importance(case: Case) -> tuple[Tensor, Tensor]:
    """Softmax over the visible keys times their overlap with every block, for all queries at once, in float64."""
    config, rows = case.config, case.positions()
    q, k = (x.double() for x in case.inputs())
    age = (rows.token - rows.start)[0]
    index = torch.arange(k.shape[2]) - rows.cmp_start[0][:, None]
    begin, end = index * config.compress_stride, index * config.compress_stride + config.compress_block_size
    visible = (index >= 0) & (end - 1 <= age[:, None])
    score = q @ k.repeat_interleave(case.group, 1).transpose(-1, -2) * case.factor
    score = score if case.mod is None else case.mod(score, *(score,) * 4)
    score = score.masked_fill(~visible, float("-inf"))
    lse = score.logsumexp(-1)
    p = torch.where(visible, (score - lse[..., None]).exp(), 0.0)
    block = torch.arange(num_blocks(max(case.documents), config)) * config.select_block_size
    shared = torch.minimum(end[..., None], block + config.select_block_size) - torch.maximum(begin[..., None], block)
    weight = shared.clamp_min(0).double() / config.compress_stride
    importance = torch.einsum("bhti,tij->bhtj", p, weight)
    return lse, importance.unflatten(1, (case.kv_heads, case.group)).sum(2)


def ranks(case: Case, importance: Tensor) -> Tensor:
    """Importance with forced blocks at ``inf`` and blocks that are no candidates at ``-inf``."""
    rows, config = case.positions(), case.config
    current = ((rows.token - rows.start)[0] // config.select_block_size)[:, None]
    block = torch.arange(importance.shape[-1])
    forced = (block < config.num_init_blocks) | (block > current - config.num_local_blocks)
    return importance.masked_fill(forced, float("inf")).masked_fill(block > current, float("-inf"))


def select(case: Case, importance: Tensor) -> Tensor:
    """The best ``n`` by a stable sort: ascending, padded with -1."""
    order = ranks(case, importance).sort(dim=-1, descending=True, stable=True)
    chosen = torch.where(order.values > float("-inf"), order.indices, importance.shape[-1])
    chosen = chosen[..., : case.config.num_selected_blocks].sort(-1).values
    chosen = torch.nn.functional.pad(chosen, (0, case.config.num_selected_blocks), value=importance.shape[-1])
    chosen = chosen[..., : case.config.num_selected_blocks]
    return torch.where(chosen < importance.shape[-1], chosen, -1).int()


def run_kernels(case: Case, device: str) -> dict[str, Tensor]:
    """Run every kernel on one case; on the CPU only in the process that interprets them."""
    from flexnsa.attention.triton import selection as scoring_triton
    from flexnsa.attention.triton.kernels import top_blocks
    from flexnsa.attention.triton.kernels.importance import Band, Scores, importance
    from flexnsa.attention.triton.kernels.importance_few import importance_few
    from flexnsa.attention.triton.kernels.log_sum_exp import log_sum_exp

    q, k = (x.to(device) for x in case.inputs())
    lse = dense_lse_and_importance(case)[0].float().to(device)
    rows, num_queries = case.positions(), q.shape[2]
    rows = rows.map(lambda x: x.to(device))

    width = num_blocks(max(case.documents), case.config)
    own, passed = torch.zeros(2, case.batch * case.kv_heads, num_queries, scoring_triton.aligned(width), device=device)
    scores = Scores(own, passed, num_queries, own.shape[-1], Band.of(case.config))
    positions = None if case.is_whole_sequence else rows
    call = Call(case.config, case.factor, case.mod, positions)
    arguments: dict[str, Any] = {"config": case.config, "factors": factors_of(call)}
    if num_queries <= STEP_TOKENS:
        importance_few(q, k, lse, positions, scores, **arguments)
    else:
        importance(q, k, lse, positions, scores, 0, **arguments)
    total = (own + torch.nn.functional.pad(passed, (1, -1)))[..., :width]

    short = mock.patch.multiple(scoring_triton, SCRATCH_BYTES=case.scratch_bytes, MANY_PROGRAMS=1)
    with short, mock.patch.object(top_blocks, "LONG", 32):
        selected = scoring_triton.launch_selection(q, k, lse, call)
        assert selected.is_contiguous()  # as of the operator's fake
    results = {
        "importance": total.unflatten(0, (case.batch, case.kv_heads)),
        "lse": log_sum_exp(q, k, positions, **arguments),
        "selected": selected,
    }
    return {key: value.cpu() for key, value in results.items()}


def interpret(name: str, device: str = "cpu") -> dict[str, Any]:
    """Run a case."""
    if name in PRODUCTS:
        return choose_by_products(PRODUCTS[name], device)
    return run_kernels(CASES[name], device) | {"on_gpu": device != "cpu"}
