"""What the operators around Triton kernels share."""

from __future__ import annotations

import torch
from torch import Tensor

from flexnsa.attention.seam import Call

MOST_HEADS = 65535
"""Programs of CUDA's second dimension."""


def check_call(call: Call, name: str, x: Tensor) -> None:
    """Demand no mod, and of ``x (B, H, ...)``, whose heads have programs of their own, no more heads than programs.

    Raises:
        ValueError: there is a score_mod, or there are too many heads in all.
    """
    if call.score_mod is not None:
        raise ValueError("score_mod: expected None with impl='triton', got a function; use impl='flex'")
    if x.shape[0] * x.shape[1] > MOST_HEADS:
        raise ValueError(
            f"{name}: expected at most {MOST_HEADS} heads in all with impl='triton', got {tuple(x.shape[:2])}"
        )


def require_device(q: Tensor) -> None:
    """Demand a device that runs the kernels; Triton's interpreter takes any."""
    from flexnsa.attention.triton.typed import is_interpreted

    if q.device.type != "cuda" and not is_interpreted():
        raise ValueError(f"q: impl='triton' expects a CUDA device, got {q.device}")


def rows_of(token: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Lay positions ``(B or 1, T)`` out as the kernels read them."""
    rows = max(len(token), len(start))
    tokens, starts = (x.to(torch.int32).expand(rows, -1).contiguous() for x in (token, start))
    return tokens, starts


def position_arguments(token: Tensor | None, start: Tensor | None, unread: Tensor) -> tuple[Tensor, Tensor, int]:
    """Give positions and their stride of the batch as kernels take them; where there are none, what nobody reads."""
    if token is None or start is None:
        return unread, unread, 0
    tokens, starts = rows_of(token, start)
    return tokens, starts, tokens.shape[1] if len(tokens) > 1 else 0


def precision() -> str:
    """Say how products of float32 are computed: exactly unless the user allows TensorFloat-32."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
