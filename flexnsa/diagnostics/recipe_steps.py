"""Steps of a recipe: what bisection, matrix and the comparison of allocators try."""

from __future__ import annotations

import time
from typing import Any

import torch

from flexnsa.diagnostics.recipe import Recipe
from flexnsa.measure.memory import MIB, peak_resident_bytes


def take_steps(recipe: Recipe, steps: int) -> dict[str, Any]:
    """Train for some steps; a case, which fails where a loss or a gradient is not finite.

    Returns:
        ``losses`` in nats, the last ``loss``, ``tokens_per_second`` of all steps but the first, and the peak in MiB:
        of what was allocated and reserved on a GPU, ``allocated_mib`` and ``reserved_mib``, of the resident set,
        ``resident_mib``, and whichever of them is asked for first, ``peak_mib``.
    """
    config = recipe.training
    tokens = config.batch_size * config.grad_accumulation * config.seq_len
    with recipe.trainer() as trainer:
        losses, seconds = [], []
        for _ in range(steps):
            start = time.perf_counter()
            losses.append(trainer.train_step().loss)  # which waits for the device
            seconds.append(time.perf_counter() - start)
        speed = tokens / (sum(seconds[1:]) / (steps - 1) if steps > 1 else seconds[0])
        peaks = _peaks(trainer.device)
    return {
        "losses": losses,
        "loss": losses[-1],
        "tokens_per_second": speed,
        **peaks,
        "peak_mib": next(iter(peaks.values())),
    }


def _peaks(device: torch.device) -> dict[str, float]:
    resident = {"resident_mib": peak_resident_bytes() / MIB}
    if device.type != "cuda":
        return resident
    held = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return {"allocated_mib": held[0] / MIB, "reserved_mib": held[1] / MIB, **resident}
