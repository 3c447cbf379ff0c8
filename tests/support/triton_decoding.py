"""Cases of decoding by the kernels that compute a whole step, and their results and those of whole sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flexnsa import NativeSparseAttention, NSACache, NSAConfig
from flexnsa.attention.dispatch import CACHED_IMPLEMENTATIONS
from flexnsa.attention.interface import given
from flexnsa.attention.step import StepInputs
from flexnsa.config import BRANCHES
from flexnsa.functional.indices import record_indices
from flexnsa.mods import ScoreMod, soft_cap
from tests.support.inputs import sizes
from tests.support.pages import attending_in_pages

DIM = 24
SMALLEST = sizes(4, 2, 4, 4, 1, 1, 5)
"""Two blocks are chosen by their scores, of those that are not forced."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sequences that get a prompt at once and then some tokens at a time.

    Args:
        steps: for every step, the new tokens of each sequence; those with fewer than the most are padded.
        prompts: tokens of each sequence before the steps.
        take_back: tokens to crop after each step but the last, which the next step adds again.
        page_size: tokens of a page, to attend to pages too.
    """

    steps: tuple[tuple[int, ...], ...]
    prompts: tuple[int, ...]
    config: NSAConfig = SMALLEST
    heads: tuple[int, int, int, int] = (2, 1, 16, 16)
    compression: str = "mlp"
    gate: str = "sigmoid"
    branches: tuple[str, ...] = BRANCHES
    shared_keys: bool = False
    dtype: torch.dtype = torch.float32
    take_back: int = 0
    index_rank: int | None = None
    page_size: int | None = None
    mod: ScoreMod | None = None

    def starts(self, row: int) -> list[int]:
        """Return the length of a sequence before every step."""
        taken = (counts[row] - self.take_back for counts in self.steps[:-1])
        return list(accumulate(taken, initial=self.prompts[row]))

    def layer(self) -> NativeSparseAttention:
        """Make the layer, with gates that differ between tokens."""
        torch.manual_seed(0)
        query_heads, kv_heads, dk, dv = self.heads
        fields = ("config", "compression", "gate", "branches", "shared_keys", "index_rank")
        options: dict[str, Any] = {name: getattr(self, name) for name in fields}
        layer = NativeSparseAttention(DIM, query_heads, kv_heads, dk, v_head_dim=dv, **options).requires_grad_(False)
        layer.eval().gate.linear.weight.normal_()
        for change in () if layer.indexer is None else (layer.indexer.change_q, layer.indexer.change_k):
            change.up.weight.normal_(std=0.2)
        return layer.to(self.dtype)

    def tokens(self) -> Tensor:
        """Draw the inputs of all tokens of the sequences."""
        length = max(self.prompts) + sum(map(max, self.steps))
        generator = torch.Generator().manual_seed(1)
        return torch.randn(len(self.prompts), length, DIM, generator=generator).to(self.dtype)


INDEXED = replace(SMALLEST, index_heads=1, index_block_size=2, index_stride=2)
OVER, ODD = replace(SMALLEST, index_heads=2, index_block_size=4, index_stride=2), (3, 1, 24, 16)
ALONE = ((1,),)
FIVE, EVERY = (replace(SMALLEST, num_selected_blocks=count) for count in (5, 16))
"""With the latter all blocks are selected, so that the rounding of scores changes nothing."""
CASES = {
    "every residue": Case(steps=ALONE * 13, prompts=(21,)),
    "from nothing, ragged": Case(
        steps=((1, 0, 1), (1, 1, 1), (0, 1, 1)) * 2, prompts=(0, 17, 3), heads=(4, 2, 16, 16), page_size=2
    ),
    "eight at once": Case(steps=((8, 3), (1, 8), (5, 0)), prompts=(9, 30), heads=(6, 2, 16, 24)),
    "taken back": Case(steps=((5, 5),) * 4, prompts=(11, 20), take_back=3),
    "as far back as may be, padded": Case(steps=((6, 3), (6, 6), (2, 3)), prompts=(11, 20), take_back=6),
    "linear, softmax, three heads": Case(
        steps=((2,),) * 6, prompts=(13,), heads=ODD, compression="linear", gate="softmax", page_size=16
    ),
    "mean, no overlap": Case(
        steps=ALONE * 9, prompts=(12,), compression="mean", config=sizes(4, 4, 4, 4, 1, 1, 5), page_size=64
    ),
    "compressed longer than selected": Case(
        steps=ALONE * 7, prompts=(29,), config=sizes(12, 2, 4, 5, 1, 2, 7), page_size=6
    ),
    "compressed alone": Case(steps=ALONE * 3, prompts=(20,), branches=("cmp",), page_size=8),
    "selected alone": Case(steps=ALONE * 5, prompts=(30,), branches=("slc",)),
    "window alone": Case(steps=ALONE * 3, prompts=(20,), branches=("win",)),
    "residual gates": Case(steps=((2,), (1,)) * 3, prompts=(19,), gate="residual"),
    "residual gates, two branches": Case(
        steps=ALONE * 4, prompts=(23,), heads=ODD, gate="residual", branches=("slc", "win"), page_size=8
    ),
    "shared keys, one block more than programs divide": Case(
        steps=((3, 1),) * 3, prompts=(14, 20), heads=(4, 2, 16, 24), config=FIVE, shared_keys=True, page_size=4
    ),
    "window and compressed": Case(steps=ALONE * 3, prompts=(20,), branches=("cmp", "win")),
    "compressed and selected": Case(steps=ALONE * 3, prompts=(20,), branches=("cmp", "slc")),
    "bf16, 16 heads of 64": Case(
        steps=((1, 1),) * 2, prompts=(14, 37), heads=(16, 1, 64, 64), config=EVERY, dtype=torch.bfloat16
    ),
    "fp16, 6 heads of 32": Case(
        steps=ALONE * 4, prompts=(19,), heads=(6, 1, 32, 32), config=EVERY, dtype=torch.float16
    ),
    "an indexer": Case(steps=ALONE * 13, prompts=(21,), config=INDEXED),
    "an indexer, keys that overlap, ragged": Case(
        steps=((1, 0, 1), (3, 1, 1), (0, 2, 1)) * 2, prompts=(0, 17, 3), heads=(8, 2, 16, 24), config=OVER, index_rank=4
    ),
    "an indexer, taken back": Case(steps=((5, 5),) * 4, prompts=(11, 20), take_back=3, config=INDEXED),
    "an indexer, selected alone": Case(
        steps=ALONE * 5, prompts=(30,), heads=ODD, config=INDEXED, branches=("slc",), compression="linear", page_size=32
    ),
    "more heads than a tile": Case(steps=((8,),), prompts=(19,), heads=(20, 1, 16, 16)),
    "capped": Case(steps=((3, 1),) * 3, prompts=(14, 20), mod=soft_cap(0.3)),
    "an indexer, capped": Case(steps=ALONE * 5, prompts=(21,), config=INDEXED, mod=soft_cap(0.3)),
}


def run(case: Case, device: str = "cpu") -> dict[str, Any]:
    """Decode, and compute the same on whole sequences by the oracle, in the case's precision and in float64."""
    layer, x = case.layer().to(device), case.tokens().to(device)
    layer.impl = "reference"
    wholes = {"plain": layer(x, score_mod=case.mod)}
    follow: Any = record_indices if "slc" in case.branches else nullcontext
    with follow(layer) as exact:
        wholes["exact"] = layer.double()(x.double(), score_mod=case.mod)
    layer.to(case.dtype)
    paged: Any = attending_in_pages(case.page_size) if case.page_size else nullcontext([])
    with follow(layer) as kept, paged as pages:
        out, cache = decode(case, layer, x)
    starts = [case.starts(b) for b in range(len(x))]
    rows = [(b, t) for b, at in enumerate(starts) for t in range(min(at), at[-1] + case.steps[-1][b])]
    b, t = torch.tensor(rows, device=device).T
    results: dict[str, Any] = {name: whole[b, t].cpu() for name, whole in wholes.items()}
    results |= {"out": out[b, t].cpu(), "lengths": cache.lengths.tolist(), "reached": cache.reached.tolist()}
    results["pages"] = pages
    if "slc" in case.branches:
        blocks = {"blocks": kept.indices()[0], "exact_blocks": exact.indices()[0]}
        results |= {name: each[b, :, t].cpu() for name, each in blocks.items()}
    layer.impl = "reference"
    again = layer.new_cache(len(x), x.shape[1], max_rewind=cache.max_rewind)
    layer(x, cache=again, lengths=cache.lengths)
    results["buffers"] = [
        (ours.cpu(), _held(again, name).cpu()) for name in again.buffers if (ours := _held(cache, name)) is not None
    ]
    return results


def decode(case: Case, layer: NativeSparseAttention, x: Tensor) -> tuple[Tensor, NSACache]:
    """Return the outputs of all decoded tokens at their positions, and the cache."""
    device, most = x.device, max(map(max, case.steps))
    cache = layer.new_cache(len(x), x.shape[1], max_rewind=max(most, case.take_back))
    prompts = torch.tensor(case.prompts, device=device)
    layer.impl = "reference"
    if max(case.prompts):
        layer(x[:, : max(case.prompts)], cache=cache, lengths=prompts, score_mod=case.mod)
    layer.impl = "triton"
    out = torch.full_like(x, torch.nan)
    done = prompts
    with recording_steps():
        for number, counts in enumerate(case.steps):
            lengths = torch.tensor(counts, device=device)
            index = (done[:, None] + torch.arange(max(counts), device=device)).clamp_max(x.shape[1] - 1)
            row = torch.arange(len(x), device=device)[:, None]
            found = layer(x[row, index], cache=cache, lengths=lengths, score_mod=case.mod)
            for b, count in enumerate(counts):
                first = int(done[b])
                out[b, first : first + count] = found[b, :count]
            done = done + lengths
            if case.take_back and number + 1 < len(case.steps):
                done = done - case.take_back
                cache.crop(done)
    return out, cache


def _held(cache: NSACache, name: str) -> Tensor | None:
    """Return the first sequence's part of a full buffer; of a ring buffer, only its last token."""
    length, kind = int(cache.lengths[0]), name.partition("_")[2]
    buffer = cache.buffers[name][0]
    if kind == "slc":
        return buffer[:, :length]
    if kind in ("cmp", "index"):
        config = cache.config if kind == "cmp" else cache.config.scoring
        return buffer[:, : max(0, (length - config.compress_block_size) // config.compress_stride + 1)]
    return buffer[:, (length - 1) % (buffer.shape[1] - 1)]


@contextmanager
def recording_steps() -> Iterator[list[Tensor]]:
    """Record the blocks that every step of the kernels selects; a step computed branch by branch fails."""
    implementation, chosen = CACHED_IMPLEMENTATIONS["triton"], list[Tensor]()

    def step(inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        out, blocks = given(implementation.step)(inputs)
        if blocks is not None:
            chosen.append(blocks)
        return out, blocks

    none: Any = None
    only = replace(implementation, compressed=none, select=none, selected=none, window=none, step=step)
    with mock.patch.dict(CACHED_IMPLEMENTATIONS, triton=only):
        yield chosen
