"""Inputs for the tests, and the comparison that all parity tests share."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from flexnsa import NSAAux, NSAConfig, native_sparse_attention
from flexnsa.geometry import num_compressed

SMALL = NSAConfig(compress_block_size=8, compress_stride=4, select_block_size=16, num_selected_blocks=4, window_size=24)
"""The proportions of the paper's configuration, a quarter of its size."""


@dataclass(frozen=True)
class Inputs:
    """All tensors that ``native_sparse_attention`` takes."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_win: Tensor
    v_win: Tensor
    gates: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        """Fresh leaves of another dtype that require gradients."""
        return Inputs(**{name: x.detach().to(dtype).requires_grad_() for name, x in self.named().items()})

    def named(self) -> dict[str, Any]:
        """The tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def replace(self, **changes: Tensor) -> Inputs:
        """A copy with some tensors exchanged."""
        return replace(self, **changes)


def make_inputs(
    seq_len: int,
    config: NSAConfig = SMALL,
    *,
    batch: int = 1,
    kv_heads: int = 2,
    group: int = 2,
    key_dim: int = 16,
    value_dim: int = 16,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Inputs:
    """Random tensors; rounded to ``dtype`` first, so that every precision computes the same problem."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    heads, num_keys = kv_heads * group, num_compressed(seq_len, config)
    return Inputs(
        q=randn(batch, heads, seq_len, key_dim) * 2,
        k=randn(batch, kv_heads, seq_len, key_dim),
        v=randn(batch, kv_heads, seq_len, value_dim),
        k_cmp=randn(batch, kv_heads, num_keys, key_dim),
        v_cmp=randn(batch, kv_heads, num_keys, value_dim),
        k_win=randn(batch, kv_heads, seq_len, key_dim),
        v_win=randn(batch, kv_heads, seq_len, value_dim),
        gates=randn(batch, heads, seq_len, 3).sigmoid(),
    )


def attend(x: Inputs, **options: Any) -> Tensor:
    """All three branches, by default in the small configuration."""
    out = native_sparse_attention(**x.named(), **{"config": SMALL, **options})
    assert isinstance(out, Tensor)
    return out


def attend_with_aux(x: Inputs, **options: Any) -> tuple[Tensor, NSAAux]:
    """As :func:`attend`, with what the branches gave."""
    out = native_sparse_attention(**x.named(), **{"config": SMALL, **options}, return_aux=True)
    assert isinstance(out, tuple)
    return out


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
