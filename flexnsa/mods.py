"""Score mods and mask mods ready to use: functions of token positions, with FlexAttention's signatures.

A mod of your own is as short as these. Combine masks with ``and_masks`` and ``or_masks`` of
``torch.nn.attention.flex_attention``, and score mods with :func:`chain`. Attention stays causal whatever a mask allows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexnsa import primitives
from flexnsa.masks.user_mods import MaskMod, ScoreMod, SoftCap


def soft_cap(cap: float | Tensor) -> ScoreMod:
    """Limit scores to ``(-cap, cap)``: ``cap * tanh(score / cap)`` (Gemma 2, arXiv 2408.00118, section 2).

    Args:
        cap: a number, a constant to ``torch.compile``, which every implementation takes; or a tensor ``()``, whose
            value may change between calls.
    """
    if not isinstance(cap, Tensor):
        primitives.check_positive_number("cap", cap)
        return SoftCap(float(cap))
    primitives.check_tensor("cap", cap, ())

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return cap * torch.tanh(score / cap)

    return score_mod


def alibi(slopes: Tensor) -> ScoreMod:
    """Subtract ``slope * distance`` from each score, distance in tokens (ALiBi, arXiv 2108.12409, section 3).

    Args:
        slopes: ``(Hq,)``, from :func:`alibi_slopes` or learned.
    """
    primitives.check_tensor("slopes", slopes, ("Hq",))

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return score - slopes[h] * (q_idx - kv_idx)

    return score_mod


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> Tensor:
    """Return ALiBi's slopes, fp32 ``(num_heads,)``: ``2 ** (-8 i / num_heads)`` for head ``i = 1 .. num_heads``.

    Where ``num_heads`` is no power of two the paper interleaves two such series; this is always one.
    """
    primitives.check_positive_int("num_heads", num_heads)
    primitives.check_device("device", device)
    return torch.exp2(-8 / num_heads * torch.arange(1, num_heads + 1, dtype=torch.float32, device=device))


def distance_bias(bias: Tensor) -> ScoreMod:
    """Add a bias for each head and distance, usually learned (T5, arXiv 1910.10683, section 2.1, one bucket per token).

    Args:
        bias: ``(Hq, R)``; distances of ``R - 1`` and more share the last entry.
    """
    primitives.check_tensor("bias", bias, ("Hq", "R"))
    last = bias.shape[1] - 1

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return score + bias[h, (q_idx - kv_idx).clamp_max(last)]

    return score_mod


def chain(*score_mods: ScoreMod) -> ScoreMod:
    """Compose score mods, applied in the order given."""
    for score_mod in score_mods:
        if not callable(score_mod):
            raise TypeError(f"score_mods: expected functions, got {primitives.describe(score_mod)}")

    def chained(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        for score_mod in score_mods:
            score = score_mod(score, b, h, q_idx, kv_idx)
        return score

    return chained


def prefix_lm(prefix_length: int, window: int) -> MaskMod:
    """Allow the first ``prefix_length`` tokens, and of the others the last ``window`` before a query.

    A prompt that every token sees, and local attention after it (arXiv 1910.10683, section 3.2.1; 2309.17453).
    """
    primitives.check_positive_int("prefix_length", prefix_length)
    primitives.check_positive_int("window", window)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return (kv_idx < prefix_length) | (q_idx - kv_idx < window)

    return mask_mod


def banned_span(first: int, stop: int) -> MaskMod:
    """Ban the keys ``first .. stop - 1`` for every query.

    A compressed token is banned if its last token is. One that ends after the span may therefore contain up to
    ``l - 1`` banned tokens; pass ``stop + l - 1`` to ban those compressed tokens too.
    """
    primitives.check_int("first", first, 0)
    primitives.check_int("stop", stop, first + 1)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return (kv_idx < first) | (kv_idx >= stop)

    return mask_mod
