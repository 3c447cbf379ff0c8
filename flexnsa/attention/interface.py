"""The interface between callers of attention and its kernels: a table of typed functions.

An :class:`Implementation` depends on no layers, caches or checks; its callers depend on no kernels. Everything that the
branches of one call share is in its :class:`Call`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from torch import Tensor

from flexnsa.attention.step import StepFunction
from flexnsa.config import NSAConfig
from flexnsa.masks.positions import Positions
from flexnsa.masks.user_mods import ScoreMod

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """What the branches of one call share.

    Args:
        config: sizes of the branches.
        scale: factor on the scores.
        score_mod: of the user, in token positions, masks included (:func:`flexnsa.masks.user_mods.merge_mods`).
        positions: of the ``T`` queries among the keys of the selected and the compressed branch; None for one whole
            sequence from token 0.
        window_positions: of the queries among the keys of the window, which may be the last few tokens only.
    """

    config: NSAConfig
    scale: float
    score_mod: ScoreMod | None = None
    positions: Positions | None = None
    window_positions: Positions | None = None


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys and values of the branches, ``(B, Hkv, S or N, Dk or Dv)``; None for what no branch reads."""

    k_cmp: Tensor | None = None
    v_cmp: Tensor | None = None
    k_slc: Tensor | None = None
    v_slc: Tensor | None = None
    k_win: Tensor | None = None
    v_win: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Scorer:
    """Queries ``(B, Hkv * H, T, D)`` and keys ``(B, Hkv, N, D)`` that score blocks.

    They are those of the compressed branch, or of an indexer with ``H`` queries for each key head. The call has the
    sizes of these keys in place of ``l`` and ``d``, their scale, and the positions of the queries among them.
    """

    q: Tensor
    k: Tensor
    call: Call


def given(x: T | None) -> T:
    """Return an argument that a check has found not to be None."""
    assert x is not None
    return x


class BranchOutput(NamedTuple):
    """Output of a branch.

    ``out (B, Hq, T, Dv)`` in the dtype of q; ``lse (B, Hq, T)``, natural log, fp32 or wider, None where an
    implementation cannot give it. A query without a key has output 0 and lse ``-inf``.
    """

    out: Tensor
    lse: Tensor | None


class Compressed(NamedTuple):
    """Output of the compressed branch, with its lse or the importance of blocks for the selection, or neither.

    ``out`` and ``lse`` as in :class:`BranchOutput`; ``importance`` fp32 ``(B, Hkv, T, M)``, the scores of the blocks.
    """

    out: Tensor
    lse: Tensor | None
    importance: Tensor | None = None


CompressedBranch = Callable[[Tensor, Tensor, Tensor, Call], Compressed]
"""``(q, k_cmp, v_cmp, call)``: attend to the compressed tokens that are complete (NSA paper, section 3.3.1).

Every branch takes queries ``(B, Hq, T, Dk)``, keys ``(B, Hkv, S or N, Dk)`` and values ``(B, Hkv, S or N, Dv)`` of one
dtype; ``Hkv`` divides ``Hq``.
"""

Selector = Callable[[Tensor, Tensor, Call, Tensor | None, Tensor | None], Tensor]
"""``(q, k_cmp, call, lse, importance)``: choose ``n`` blocks for each query, int32 ``(B, Hkv, T, n)`` (NSA paper, Eq. 8
to 12), without a gradient. The last two come from the same implementation's compressed branch, or are None.
"""

SelectedBranch = Callable[[Tensor, Tensor, Tensor, Tensor, Call], BranchOutput]
"""``(q, k, v, block_indices, call)``: attend to the past tokens of the selected blocks, int32 ``(B, Hkv, T, n)``,
ascending, padded right with -1 (NSA paper, section 3.3.2).
"""

WindowBranch = Callable[[Tensor, Tensor, Tensor, Call], BranchOutput]
"""``(q, k, v, call)``: attend to the last ``w`` tokens, the query's own included, at ``call.window_positions`` (NSA
paper, section 3.3.3).
"""

GatedSum = Callable[
    [Tensor, Keys, Mapping[str, Tensor], Tensor, Compressed, Call, bool, Sequence[str]], tuple[Tensor, Tensor, Tensor]
]
"""``(q, keys, gates, block_indices, compressed, call, by_token, recompute)``: attend to selected blocks and, with keys,
to the window, and add up the branches by their ``gates (B, Hq, T)``, none of which is negative; where the selected
branch has none it has weight 1, and its output is not stored. The result is ``(out, out_slc, out_win)``; ``out`` has
the heads of a token side by side in memory if ``by_token``, or else the memory order of q. The gradients of all
branches are those of ``out``: the compressed branch was computed without any. Backward computes the outputs of
``recompute``, ``cmp`` or ``win``, again.
"""

SelectionLossSum = Callable[[Tensor, Tensor, Scorer, Call, str], tuple[Tensor, Tensor]]
"""``(q, k, scorer, call, query_weights)``: how far the scores of blocks are from their true shares, summed over the
queries ``q (B, Hq, m, Dk)`` and ``scorer.q`` of a few tokens, which both calls locate, weighted by the true mass of
their blocks (``"mass"``) or all alike (``"mean"``); and the sum of the weights. A query that precedes its sequence sees
no key and counts 0. The sum has a gradient in the scorer's q and k alone.
"""

InputCheck = Callable[[str, Tensor], None]
"""``(name, x)``: raise a :class:`ValueError` that names a tensor which an implementation cannot take."""


def accept(name: str, x: Tensor) -> None:
    """Accept every tensor; the public functions have checked its dtype and shape."""


def no_gated_sum(q: Tensor, keys: Keys, call: Call) -> None:
    """Choose none: the branches are added up one by one."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute Native Sparse Attention; another kernel for a branch replaces one field.

    The type of each function, above, says what it takes and returns.

    Args:
        cpu_backward: whether there is a backward pass on a CPU.
        gated_sum: ``(q, keys, call)``: choose a ``GatedSum``, or None to add up the branches one by one.
        step: adds a few new tokens to a cache and computes all branches in one call, see ``StepFunction``; None
            where steps are computed branch by branch.
    """

    compressed: CompressedBranch
    select: Selector
    selected: SelectedBranch
    window: WindowBranch
    selection_loss: SelectionLossSum
    check_input: InputCheck = accept
    cpu_backward: bool = True
    gated_sum: Callable[[Tensor, Keys, Call], GatedSum | None] = no_gated_sum
    step: StepFunction | None = None

    def check(self, **inputs: Tensor | None) -> None:
        """Check named inputs before any work is done; raise for those that no branch could take."""
        for name, x in inputs.items():
            if x is not None:
                self.check_input(name, x)


class NSAAux(NamedTuple):
    """Intermediate results of the branches; ``None`` for those not computed.

    ``block_indices`` int32 ``(B, Hkv, S, n)``; ``out_*`` ``(B, Hq, S, Dv)``; ``lse_cmp`` fp32 ``(B, Hq, S)``.
    """

    block_indices: Tensor | None
    out_cmp: Tensor | None
    out_slc: Tensor | None
    out_win: Tensor | None
    lse_cmp: Tensor | None
