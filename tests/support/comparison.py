"""The comparison that all parity tests share: as far as plain PyTorch of the same precision errs, others may err."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flexnsa.masks.user_mods import SoftCap


def rms(x: Tensor) -> float:
    """Root mean square, 0 of nothing."""
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def largest(x: Tensor) -> float:
    """Largest magnitude, 0 of nothing."""
    return x.double().abs().max().item() if x.numel() else 0.0


SIZES = (("rms", rms), ("max", largest))


def assert_as_exact_as_plain(
    got: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor], *, factor: float
) -> None:
    """Demand that ``got`` errs at most ``factor`` times as much as plain PyTorch of the same precision does.

    Errors are taken against ``exact`` (fp64), as root mean square and as maximum. Where the plain formula happens to
    be exact (one key: a softmax of exactly 1, gradients of exactly 0), what remains to any other order of operations is
    the rounding of the result and a few roundings of fp32 sums, relative to the largest tensor of the comparison.
    """
    common = {measure: max((size(x[x.isfinite()]) for x in exact.values()), default=0.0) for measure, size in SIZES}
    for name, value in got.items():
        target = exact[name]
        assert value.shape == target.shape, name
        finite = target.isfinite()
        assert torch.equal(value.isfinite(), finite), f"{name}: finite in other places than the oracle"
        assert torch.equal(value[~finite].double(), target[~finite].double()), name
        error, plain_error = ((x[name][finite].double() - target[finite]) for x in (got, plain))
        for measure, size in SIZES:
            rounding = torch.finfo(value.dtype).eps / 2 * size(target[finite])
            summation = 3 * torch.finfo(torch.float32).eps * common[measure]
            limit = factor * size(plain_error) + rounding + summation
            assert size(error) <= limit, (
                f"{name}: {measure} error {size(error):.2e}, "
                f"plain PyTorch errs by {size(plain_error):.2e}, limit {limit:.2e}"
            )


class RoundedCap(SoftCap):
    """A soft cap by a tanh that is rounded to fp16, with the relative error that ``tanh.approx`` may have: 2^-11."""

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG002
        """Return the limited score."""
        return float(self.number) * torch.tanh(score / float(self.number)).half().to(score)


def at_precision_of_gpu(case: Any) -> Any:
    """Give a case of a soft cap in 16 bits the precision with which a GPU computes it; other cases as they are."""
    if not isinstance(case.mod, SoftCap) or case.dtype == torch.float32:
        return case
    return replace(case, mod=RoundedCap(float(case.mod.number)))
