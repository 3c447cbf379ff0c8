"""Score and mask mods ready to use; each returns a function of token positions, as FlexAttention takes them.

Nothing here is special: a mod of your own is five lines too. Masks combine with ``torch.nn.attention.flex_attention``'s
``and_masks`` and ``or_masks``, score mods with :func:`chain`. Attention is causal whatever a mask says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexnsa.masks.user_mods import MaskMod, ScoreMod
from flexnsa.validation import (
    check_device,
    check_int,
    check_positive_int,
    check_positive_number,
    check_tensor,
    describe,
)


def soft_cap(cap: float | Tensor) -> ScoreMod:
    """Bend scores into ``(-cap, cap)``: ``cap * tanh(score / cap)`` (Gemma 2, arXiv 2408.00118, section 2).

    Args:
        cap: a number, which a compiler takes for a constant; or a tensor ``()``, which may change from call to call.
    """
    if isinstance(cap, Tensor):
        check_tensor("cap", cap, ())
    else:
        check_positive_number("cap", cap)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return cap * torch.tanh(score / cap)

    return score_mod


def alibi(slopes: Tensor) -> ScoreMod:
    """Take ``slope`` off for every token of distance (ALiBi, arXiv 2108.12409, section 3).

    Args:
        slopes: ``(Hq,)``, of :func:`alibi_slopes` or learned.
    """
    check_tensor("slopes", slopes, ("Hq",))

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return score - slopes[h] * (q_idx - kv_idx)

    return score_mod


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> Tensor:
    """Give ALiBi's slopes, fp32 ``(num_heads,)``: ``2 ** (-8 i / num_heads)`` for head ``i = 1 .. num_heads``.

    The paper interleaves two such series where ``num_heads`` is no power of two; this is one series for any number.
    """
    check_positive_int("num_heads", num_heads)
    check_device("device", device)
    return torch.exp2(-8 / num_heads * torch.arange(1, num_heads + 1, dtype=torch.float32, device=device))


def distance_bias(bias: Tensor) -> ScoreMod:
    """Add a bias by head and distance, usually learned (T5, arXiv 1910.10683, section 2.1, with a bucket a token).

    Args:
        bias: ``(Hq, R)``; tokens ``R - 1`` and more apart share the last.
    """
    check_tensor("bias", bias, ("Hq", "R"))
    last = bias.shape[1] - 1

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return score + bias[h, (q_idx - kv_idx).clamp_max(last)]

    return score_mod


def chain(*score_mods: ScoreMod) -> ScoreMod:
    """Apply score mods one after the other, the first one first."""
    for score_mod in score_mods:
        if not callable(score_mod):
            raise TypeError(f"score_mods: expected functions, got {describe(score_mod)}")

    def chained(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        for score_mod in score_mods:
            score = score_mod(score, b, h, q_idx, kv_idx)
        return score

    return chained


def prefix_lm(prefix_length: int, window: int) -> MaskMod:
    """Show the first ``prefix_length`` tokens to all that follow, and of the others the last ``window``.

    A prompt that is never forgotten, and local attention behind it (arXiv 1910.10683, section 3.2.1; 2309.17453).
    """
    check_positive_int("prefix_length", prefix_length)
    check_positive_int("window", window)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return (kv_idx < prefix_length) | (q_idx - kv_idx < window)

    return mask_mod


def banned_span(first: int, stop: int) -> MaskMod:
    """Hide the keys ``first .. stop - 1`` from everyone, as if a passage had been struck out.

    A compressed token is hidden if its last token is, so up to ``l - 1`` tokens of the passage may shine through one
    that ends later; ban to ``stop + l - 1`` where none may.
    """
    check_int("first", first, 0)
    check_int("stop", stop, first + 1)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return (kv_idx < first) | (kv_idx >= stop)

    return mask_mod
