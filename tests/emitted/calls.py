"""Branches of FlexAttention as functions of their tensors, and the tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flexnsa.attention.dispatch import FLEX
from flexnsa.attention.interface import Call, Implementation
from flexnsa.config import NSAConfig, num_compressed
from flexnsa.masks.positions import Positions
from flexnsa.masks.user_mods import ScoreMod
from tests.support.inputs import SMALL

TWO_BLOCKS = replace(SMALL, num_selected_blocks=2, num_local_blocks=1)
BRANCHES = ("cmp", "slc", "win")


def attend(implementation: Implementation, branch: str, call: Call, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Output and lse of the branch, of whose tensors the last are the blocks, where it selects."""
    names = {"cmp": "compressed", "slc": "selected", "win": "window"}
    attended = getattr(implementation, names[branch])(*tensors, call)
    return attended.out, attended.lse


def attention(branch: str, config: NSAConfig, scale: float) -> Callable[..., tuple[Tensor, Tensor]]:
    """The branch of a whole sequence."""
    return lambda *tensors: attend(FLEX, branch, Call(config, scale), *tensors)


def arguments(
    branch: str,
    config: NSAConfig,
    groups: int,
    seq_len: int,
    dims: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    heads: int = 1,
    token: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """q, k, v and, of the selected branch, the blocks; queries stand at ``token``, by default at all."""
    num_keys = num_compressed(seq_len, config) if branch == "cmp" else seq_len
    token = torch.arange(seq_len) if token is None else token
    shapes = (heads * groups, len(token), dims[0]), (heads, num_keys, dims[0]), (heads, num_keys, dims[1])
    batch = 2 if groups == 1 else 1
    q, k, v = (torch.randn(batch, *shape, dtype=dtype, requires_grad=True) for shape in shapes)
    if branch != "slc":
        return q, k, v
    # Every query takes block 0 and its own, so more queries choose block 0 than one copy of it serves.
    own = token.int() // config.select_block_size
    blocks = torch.stack([torch.zeros_like(own), torch.where(own > 0, own, -1)], -1)
    blocks = torch.nn.functional.pad(blocks, (0, config.num_selected_blocks - 2), value=-1)
    return q, k, v, blocks.expand(batch, heads, -1, -1).contiguous()


def assert_agree(
    got: tuple[Tensor, Tensor],
    want: tuple[Tensor, Tensor],
    inputs: Sequence[Tensor],
    exact: Sequence[Tensor],
    *names: str,
    tolerance: float = 1e-5,
) -> None:
    """Check output, lse, and the gradients of both for the inputs, relative to the largest number of each."""
    empty = want[1] == -torch.inf
    assert torch.equal(got[1] == -torch.inf, empty)
    found, expected = ([out, lse.masked_fill(empty, 0.0)] for out, lse in (got, want))
    seeds = [torch.randn_like(x) for x in found]
    found += torch.autograd.grad(found, inputs, seeds)
    expected += torch.autograd.grad(expected, exact, [x.double() for x in seeds])
    for name, a, b in zip(("out", "lse", *names), found, expected, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max(), name


def cached_attention(
    implementation: Implementation, branch: str, mod: ScoreMod | None = None, config: NSAConfig = SMALL
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The branch on a cache, whose queries are ``token (B, T)`` and selected the blocks ``chosen``."""

    def run(q: Tensor, k: Tensor, v: Tensor, token: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        zero = torch.zeros_like(token)
        positions = Positions(token, zero, zero)
        call = Call(config, 0.3, mod, positions, positions)
        blocks = (chosen,) if branch == "slc" else ()
        return *attend(implementation, branch, call, q, k, v, *blocks), chosen  # every argument is a graph's input

    return run
