"""Arguments of Triton kernels: checks before a launch, positions, strides and the precision of products."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from flexnsa.attention.interface import Call
from flexnsa.attention.plan import MOST_HEADS
from flexnsa.attention.step import StepInputs
from flexnsa.masks.user_mods import cap_of

Factors = Sequence[float]


def check_call(call: Call, name: str, x: Tensor) -> None:
    """Check that a mod is a soft cap, and that the heads of ``x (B, H, ...)`` fit the second dimension of a grid.

    Raises:
        ValueError: there is another score_mod, or there are too many heads in all.
    """
    if cap_of(call.score_mod) is None:
        raise ValueError("score_mod: expected None or a soft cap with impl='triton', got a function; use impl='flex'")
    if x.shape[0] * x.shape[1] > MOST_HEADS:
        raise ValueError(
            f"{name}: expected at most {MOST_HEADS} heads in all with impl='triton', got {tuple(x.shape[:2])}"
        )


def factors_of(call: Call | StepInputs) -> Factors:
    """Return what kernels take: scores are ``scale * tanh(inner * product)``, or ``scale * product`` if inner is 0."""
    cap = cap_of(call.score_mod)
    return (cap, call.scale / cap) if cap and call.scale else (call.scale, 0.0)


def with_positive_scale(q: Tensor, factors: Factors) -> tuple[Tensor, Factors]:
    """Move the sign of a scale to the queries: kernels mask and take the maximum of products before they scale them."""
    scale, _ = factors
    if scale > 0:
        return q, factors
    return (-q, (-scale, 0.0)) if scale < 0 else (q * 0, (1.0, 0.0))


def require_device(x: Tensor, name: str = "q") -> None:
    """Check that a device runs the kernels."""
    if not runs_kernels(x):
        raise ValueError(f"{name}: expected a CUDA device with impl='triton', got {x.device}")


def runs_kernels(x: Tensor) -> bool:
    """Return whether the device of a tensor runs the kernels; Triton's interpreter runs on any."""
    return x.device.type == "cuda" or _is_interpreted()


def _is_interpreted() -> bool:
    if find_spec("triton") is None:
        return False
    from triton import knobs  # pyright: ignore[reportMissingTypeStubs]

    return knobs.runtime.interpret


# Dynamo cannot trace into Triton. torch.compiler.assume_constant_result does the same, but imports the compiler.
_is_interpreted._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def rows_of(*positions: Tensor) -> list[Tensor]:
    """Return positions ``(B or 1, T)`` as the kernels read them: int32, contiguous, of equal batch size."""
    rows = max(map(len, positions))
    return [x.to(torch.int32).expand(rows, -1).contiguous() for x in positions]


def strides_of_groups(x: Tensor, kv_heads: int) -> tuple[int, int, int, int]:
    """Return the strides of ``(B, Hq, T, D)``: of the batch, the kv head, the head in its group, and the token."""
    return x.stride(0), x.stride(1) * (x.shape[1] // kv_heads), x.stride(1), x.stride(2)


def position_arguments(unread: Tensor, *positions: Tensor | None) -> tuple[Tensor | int, ...]:
    """Return positions and their batch stride as arguments of a kernel; ``unread`` and 0 where there are none."""
    tensors = [x for x in positions if x is not None]
    if len(tensors) < len(positions):
        return *(unread for _ in positions), 0
    rows = rows_of(*tensors)
    return *rows, rows[0].shape[1] if len(rows[0]) > 1 else 0


def precision() -> str:
    """Return the precision of float32 products: exact unless the user allows TensorFloat-32."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
