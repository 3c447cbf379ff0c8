"""A tensor in four numbers: enough to tell that it is another one, few enough to be kept."""

from __future__ import annotations

import torch
from torch import Tensor


def fingerprint(x: Tensor) -> list[float]:
    """Give how many entries are not finite, the norm of the others, and their products with two waves."""
    finite = x.isfinite()
    values = torch.where(finite, x, 0).double().flatten()
    index = torch.arange(len(values), dtype=torch.float64)
    numbers = (values.norm(), values @ (1.1 * index).cos(), values @ (0.7 * index).sin())
    return [int((~finite).sum()), *(number.item() for number in numbers)]


def assert_same(found: Tensor, recorded: list[float], *, tolerance: float) -> None:
    """Demand the recorded fingerprint, to a fraction of the tensor's norm, or of 1 where that is larger."""
    count, *numbers = fingerprint(found)
    assert count == recorded[0], f"{count} entries are not finite, {recorded[0]:.0f} were"
    limit = tolerance * max(1.0, recorded[1])
    for number, was in zip(numbers, recorded[1:], strict=True):
        assert abs(number - was) <= limit, f"{number} was {was}, limit {limit:.1e}"
