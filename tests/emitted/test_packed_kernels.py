"""The sm_90 kernels of packed documents, forward and backward, in an interpreter: no document sees another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flexnsa.attention.dispatch import FLEX
from flexnsa.attention.interface import Call
from flexnsa.config import num_compressed
from flexnsa.masks.document import document_positions
from tests.emitted.calls import BRANCHES, TWO_BLOCKS
from tests.emitted.emit import emit
from tests.emitted.interpreted import interpreted
from tests.support.dense import dense_attention, visible_keys

PACKS = {
    "unaligned starts": (19, 33, 17),
    "documents of one token": (1, 1, 30, 1, 28, 1, 1),
    "a document longer than the window": (5, 60, 4),
}
GROUPS, SCALE = 4, 0.3


def attention(branch: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The branch as a function of its tensors, in which the mask is made too."""

    def run(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, *blocks: Tensor) -> tuple[Tensor, Tensor | None]:
        positions = document_positions(ids, TWO_BLOCKS)
        function = {"cmp": FLEX.compressed, "slc": FLEX.selected, "win": FLEX.window}[branch]
        attended = function(q, k, v, *blocks, Call(TWO_BLOCKS, SCALE, None, positions, positions))
        return attended.out, attended.lse

    return run


def arguments(branch: str, lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
    seq_len = sum(lengths)
    num_keys = num_compressed(seq_len, TWO_BLOCKS) if branch == "cmp" else seq_len
    shapes = (GROUPS, seq_len, 32), (1, num_keys, 32), (1, num_keys, 16)
    q, k, v = (torch.randn(1, *shape, requires_grad=True) for shape in shapes)
    ids = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])[None]
    if branch != "slc":
        return q, k, v, ids
    own = torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths]) // TWO_BLOCKS.select_block_size
    blocks = torch.stack([torch.zeros_like(own), torch.where(own > 0, own, -1)], -1)
    return q, k, v, ids, blocks[None, None]


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("pack", PACKS)
def test_packed_kernels_compute_each_document_alone(pack: str, branch: str) -> None:
    lengths = PACKS[pack]
    module = emit(attention(branch), lambda: arguments(branch, lengths))
    inputs = arguments(branch, lengths)
    exact = [x.detach().double().requires_grad_() for x in inputs[:3]]
    keep = visible_keys(branch, lengths, TWO_BLOCKS, *inputs[4:])

    out, lse = interpreted(module)(*inputs)
    true_out, true_lse = dense_attention(exact[0], exact[1], exact[2], keep, SCALE)
    empty = true_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    got, want = (out, lse.masked_fill(empty, 0.0)), (true_out, true_lse.masked_fill(empty, 0.0))
    seeds = [torch.randn_like(x) for x in got]
    got += torch.autograd.grad(got, inputs[:3], seeds)
    want += torch.autograd.grad(want, exact, [x.double() for x in seeds])
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max(), name


@pytest.mark.parametrize("branch", BRANCHES)
def test_one_graph_serves_every_pack(branch: str) -> None:
    first, *others = PACKS.values()
    total = max(map(sum, PACKS.values()))
    filled = [(*lengths, total - sum(lengths)) if sum(lengths) < total else lengths for lengths in others]
    whole = (*first, total - sum(first)) if sum(first) < total else first
    more = [lambda lengths=lengths: arguments(branch, lengths) for lengths in filled]
    module = emit(attention(branch), lambda: arguments(branch, whole), others=more)
    assert module.source("backward")
