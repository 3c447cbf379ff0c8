"""The last step of the gradients of keys and values, from float32 sums to their dtype: one launch for both."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flexnsa.attention.tiles.device import cdiv, padded
from flexnsa.attention.triton.kernels import gradient_parts as kernels

KEYS = 8
"""Keys of a program: few, as short sequences of many parts need many programs."""


def sum_parts(parts: Sequence[Tensor], dk: Tensor, dv: Tensor, *, scale: float = 1.0) -> None:
    """Sum the parts of each key head in a fixed order into ``dk``, times ``scale``, and ``dv``.

    Args:
        parts: of keys and of values, float32 ``(B, Hkv * parts, S, D)``, contiguous.
        dk: ``(B, Hkv, S, Dk)``, with contiguous rows.
        dv: ``(B, Hkv, S, Dv)``, likewise.
        scale: factor of the gradients of keys.
    """
    (batch, heads, num_keys, d_k), d_v = dk.shape, dv.shape[-1]
    kernels.sum_parts[(cdiv(num_keys, KEYS), batch * heads)](
        *parts, dk, dv, *dk.stride()[:3], *dv.stride()[:3], heads, num_keys, scale,
        PARTS=parts[0].shape[1] // heads, DK=d_k, DV=d_v, BDK=padded(d_k), BDV=padded(d_v), BN=KEYS, num_warps=4,
    )  # fmt: skip
