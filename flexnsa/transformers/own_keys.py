"""Attention of all branches to the model's own keys and values, compressed as means."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flexnsa.attention.dispatch import attend
from flexnsa.attention.interface import Call, Keys
from flexnsa.geometry import BRANCHES
from flexnsa.positions import Positions
from flexnsa.transformers.options import DropInOptions
from flexnsa.transformers.softmax import Softmax


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
    """Attend from ``q (B, Hq, T, Dk)`` to one set of keys and values, ``(B, Hq, T, Dv)``.

    Args:
        q: rotated queries.
        k: ``(B, Hkv, S, Dk)``, rotated.
        v: ``(B, Hkv, S, Dv)``.
        compress: keys or values to the means of blocks.
        positions: of the queries among the keys; None for whole sequences.
        softmax: of the model's layer.
        options: of the model.
        cached: whether the keys are a cache, and each sequence starts at its first slot.
    """
    k_cmp = compress(k) if {"cmp", "slc"} & {*options.branches} else None
    v_cmp = compress(v) if "cmp" in options.branches else None
    implementation = softmax.implementation(options.impl, q, cached=cached, v_dim=v.shape[-1])
    weights = zip(BRANCHES, options.gates, strict=True)
    gates = {tag: q.new_full((), gate).expand(q.shape[:3]) for tag, gate in weights if gate != 1}
    factor = q.shape[3] ** -0.5 if softmax.scale is None else softmax.scale
    call = Call(options.sizes, factor, softmax.score_mod, positions, positions)
    return attend(implementation, q, Keys(k_cmp, v_cmp, k, v, k, v), gates, call, branches=options.branches)[0]
