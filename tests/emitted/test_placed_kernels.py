"""The sm_90 kernels of queries that stand anywhere, forward and backward, in an interpreter: jumps inside a tile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flexnsa.attention.dispatch import FLEX
from flexnsa.attention.flex import branches
from flexnsa.attention.interface import Call
from flexnsa.config import num_compressed
from flexnsa.positions import Positions
from tests.emitted.calls import BRANCHES, TWO_BLOCKS
from tests.emitted.emit import emit
from tests.emitted.interpreted import interpreted
from tests.support.dense import dense_attention, visible_keys

GROUPS, SCALE, LENGTH = 4, 0.3, 300
TOKENS = [*range(17, 47), 100, 150, *range(270, 299)]


def attention(branch: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The branch as a function of its tensors, in which the mask is made too."""

    def run(q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, *blocks: Tensor) -> tuple[Tensor, Tensor | None]:
        positions = Positions.of_queries(tokens)
        function = {"cmp": FLEX.compressed, "slc": FLEX.selected, "win": FLEX.window}[branch]
        attended = function(q, k, v, *blocks, Call(TWO_BLOCKS, SCALE, None, positions, positions))
        return attended.out, attended.lse

    return run


def arguments(branch: str) -> tuple[Tensor, ...]:
    num_keys = num_compressed(LENGTH, TWO_BLOCKS) if branch == "cmp" else LENGTH
    shapes = (GROUPS, len(TOKENS), 32), (1, num_keys, 32), (1, num_keys, 16)
    q, k, v = (torch.randn(1, *shape, requires_grad=True) for shape in shapes)
    tokens = torch.tensor(TOKENS)
    if branch != "slc":
        return q, k, v, tokens
    own = tokens.int() // TWO_BLOCKS.select_block_size
    return q, k, v, tokens, torch.stack([torch.zeros_like(own), own], -1)[None, None]


@pytest.mark.parametrize("branch", BRANCHES)
def test_queries_meet_the_keys_of_their_own_tokens(branch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "ENOUGH_PROGRAMS", 0)  # so that compressed keys are not repeated
    inputs = arguments(branch)
    module = emit(attention(branch), lambda: arguments(branch))
    exact = [x.detach().double().requires_grad_() for x in inputs[:3]]
    blocks = [torch.zeros(1, 1, LENGTH, 2).int().index_copy(2, inputs[3], x) for x in inputs[4:]]
    keep = visible_keys(branch, (LENGTH,), TWO_BLOCKS, *blocks)[..., TOKENS, :]
    got, want = interpreted(module)(*inputs), dense_attention(exact[0], exact[1], exact[2], keep, SCALE)
    seeds = [torch.randn_like(x) for x in got]
    got += torch.autograd.grad(got, inputs[:3], seeds)
    want += torch.autograd.grad(want, exact, [x.double() for x in seeds])
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max(), name
