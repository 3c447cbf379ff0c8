"""Attention of all branches to a model's keys and values, with the model's own softmax.

Some models cap the scores, or have sinks, one more term of the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from flexnsa.attention.all_tokens import with_all_tokens
from flexnsa.attention.dispatch import attend, choose_implementation
from flexnsa.attention.interface import Call, Keys
from flexnsa.attention.sinks import returns_lse, with_sinks
from flexnsa.config import BRANCHES
from flexnsa.masks.positions import Positions
from flexnsa.masks.user_mods import SoftCap
from flexnsa.transformers.options import DropInOptions


@dataclass(frozen=True, slots=True)
class Softmax:
    """How a model's layer turns scores into probabilities.

    Args:
        scale: factor on the scores; None for ``Dk ** -0.5``.
        limit: scores are kept within it of 0, as ``limit * tanh(score / limit)``; None for any score.
        sinks: ``(Hq,)``, for each head a score that takes its share of the probability and has no value. Blocks are
            scored without it.
        choose: chooses blocks in place of the selection, its first argument; see :mod:`flexnsa.functional.indices`.
        dense: attend to all past keys instead of selecting.
    """

    scale: float | None = None
    limit: float | None = None
    sinks: Tensor | None = None
    choose: Callable[..., Tensor] | None = None
    dense: bool = False


def attend_to_own_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    compress: Callable[[Tensor], Tensor],
    positions: Positions | None,
    softmax: Softmax,
    options: DropInOptions,
    *,
    cached: bool,
) -> Tensor:
    """Attend from ``q (B, Hq, T, Dk)`` to keys ``(B, Hkv, S, Dk)``, both rotated, and values; ``(B, Hq, T, Dv)``.

    ``compress`` maps keys or values to the means of blocks. Positions are those of the queries among the keys, None of
    whole sequences. With ``cached`` the keys are a cache, and each sequence starts at its first slot.
    """
    k_cmp = compress(k) if {"cmp", "slc"} & {*options.branches} else None
    v_cmp = compress(v) if "cmp" in options.branches else None
    cached = cached and returns_lse(softmax.sinks, q)
    chosen = choose_implementation(options.impl, q, modded=False, cached=cached, v_dim=v.shape[-1])
    if softmax.dense:
        chosen = with_all_tokens(chosen, needs_lse=softmax.sinks is not None)
    implementation = with_sinks(chosen, softmax.sinks)
    if softmax.choose is not None:
        implementation = replace(implementation, select=partial(softmax.choose, implementation.select))
    weights = zip(BRANCHES, options.gates, strict=True)
    gates = {tag: q.new_full((), gate).expand(q.shape[:3]) for tag, gate in weights if gate != 1}
    factor = q.shape[3] ** -0.5 if softmax.scale is None else softmax.scale
    mod = None if softmax.limit is None else SoftCap(softmax.limit)
    call = Call(options.sizes, factor, mod, positions, positions)
    return attend(implementation, q, Keys(k_cmp, v_cmp, k, v, k, v), gates, call, branches=options.branches)[0]
