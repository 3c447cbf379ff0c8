"""The sm_90 kernels of queries whose positions are told, in an interpreter: packed documents, mods, and jumps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from flexnsa import mods
from flexnsa.attention.dispatch import FLEX, REFERENCE
from flexnsa.attention.flex import branches
from flexnsa.attention.interface import Call, Implementation
from flexnsa.masks.document import document_positions
from flexnsa.masks.positions import Positions
from flexnsa.masks.user_mods import ScoreMod, merge_mods
from tests.emitted.calls import BRANCHES, TWO_BLOCKS, arguments, assert_agree, attend
from tests.emitted.emit import emit
from tests.emitted.interpreted import interpreted
from tests.emitted.modules import Emitted
from tests.support.dense import dense_attention, visible_keys

PACKS = {
    "unaligned starts": (19, 33, 17),
    "documents of one token": (1, 1, 30, 1, 28, 1, 1, 6),
    "a document longer than the window": (5, 60, 4),
}
GROUPS, SCALE = 4, 0.3
LENGTH, TOKENS = 300, [*range(17, 47), 100, 150, *range(270, 299)]


def packed(
    branch: str, implementation: Implementation = FLEX, mod: ScoreMod | None = None
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The branch as a function of its tensors, in which the mask is made too."""

    def run(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, *blocks: Tensor) -> tuple[Tensor, Tensor]:
        positions = document_positions(ids, TWO_BLOCKS)
        return attend(implementation, branch, Call(TWO_BLOCKS, SCALE, mod, positions, positions), q, k, v, *blocks)

    return run


def modded(branch: str, implementation: Implementation) -> Callable[..., tuple[Tensor, Tensor]]:
    """As :func:`packed`, of a bias by distance too."""

    def run(bias: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        mod = merge_mods(mods.chain(mods.soft_cap(2.0), mods.distance_bias(bias)), mods.banned_span(0, 12))
        return packed(branch, implementation, mod)(*tensors)

    return run


def placed(branch: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """As :func:`packed`, of queries that stand at tokens of one sequence."""

    def run(q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, *blocks: Tensor) -> tuple[Tensor, Tensor]:
        positions = Positions.of_queries(tokens)
        return attend(FLEX, branch, Call(TWO_BLOCKS, SCALE, None, positions, positions), q, k, v, *blocks)

    return run


def told_arguments(branch: str, seq_len: int, told: Tensor, token: Tensor) -> tuple[Tensor, ...]:
    """q, k, v, what is told of the positions and, of the selected branch, block 0 and each query's own."""
    q, k, v, *blocks = arguments(branch, TWO_BLOCKS, GROUPS, seq_len, (32, 16), token=token)
    return q, k, v, told, *blocks


def documents(branch: str, lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
    ids = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])[None]
    return told_arguments(branch, sum(lengths), ids, torch.cat([torch.arange(length) for length in lengths]))


def in_fp64(*inputs: Tensor) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in inputs]


@cache
def compiled(branch: str) -> Emitted:
    """Emit the one graph of all packs: another one would be an error."""
    first, *others = (partial(documents, branch, lengths) for lengths in PACKS.values())
    return emit(packed(branch), first, others=others)


@pytest.mark.parametrize(
    ("branch", "pack"),
    [
        *((branch, pack) for branch in BRANCHES for pack in ("unaligned starts", "documents of one token")),
        ("win", "a document longer than the window"),
    ],
)
def test_packed_kernels_compute_each_document_alone(branch: str, pack: str) -> None:
    """By one graph, of rows of as many tokens."""
    lengths = PACKS[pack]
    inputs = documents(branch, lengths)
    exact = in_fp64(*inputs[:3])
    keep = visible_keys(branch, lengths, TWO_BLOCKS, *inputs[4:])
    got, want = interpreted(compiled(branch))(*inputs), dense_attention(exact[0], exact[1], exact[2], keep, SCALE)
    assert_agree(got, want, inputs[:3], exact, "dq", "dk", "dv")


@pytest.mark.parametrize("branch", BRANCHES)
def test_modded_kernels_agree_with_the_oracle(branch: str) -> None:
    def make() -> tuple[Tensor, ...]:
        return torch.randn(GROUPS, 9, requires_grad=True), *documents(branch, (19, 1, 49))

    module = emit(modded(branch, FLEX), make)
    inputs = make()
    exact = in_fp64(*inputs[:4])
    got, want = interpreted(module)(*inputs), modded(branch, REFERENCE)(*exact, *inputs[4:])
    empty = want[1] == -torch.inf
    assert empty.any()
    assert (got[0][empty] == 0).all()
    assert_agree(got, want, inputs[:4], exact, "dbias", "dq", "dk", "dv")


@pytest.mark.parametrize("branch", BRANCHES)
def test_queries_meet_the_keys_of_their_own_tokens(branch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of queries that jump inside a tile."""
    monkeypatch.setattr(branches, "ENOUGH_PROGRAMS", 0)  # so that compressed keys are not repeated

    def make() -> tuple[Tensor, ...]:
        tokens = torch.tensor(TOKENS)
        return told_arguments(branch, LENGTH, tokens, tokens)

    module = emit(placed(branch), make)
    inputs = make()
    exact = in_fp64(*inputs[:3])
    blocks = [torch.zeros(1, 1, LENGTH, 2).int().index_copy(2, inputs[3], x) for x in inputs[4:]]
    keep = visible_keys(branch, (LENGTH,), TWO_BLOCKS, *blocks)[..., TOKENS, :]
    got, want = interpreted(module)(*inputs), dense_attention(exact[0], exact[1], exact[2], keep, SCALE)
    assert_agree(got, want, inputs[:3], exact, "dq", "dk", "dv")
