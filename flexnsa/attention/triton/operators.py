"""What the operators around Triton kernels share."""

from __future__ import annotations

import torch
from torch import Tensor


def require_device(q: Tensor) -> None:
    """Demand a device that runs the kernels; Triton's interpreter takes any."""
    from triton import knobs

    if q.device.type != "cuda" and not knobs.runtime.interpret:
        raise ValueError(f"q: impl='triton' expects a CUDA device, got {q.device}")


def precision() -> str:
    """Say how products of float32 are computed: exactly unless the user allows TensorFloat-32."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
