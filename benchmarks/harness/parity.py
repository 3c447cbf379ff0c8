"""The errors of an implementation, and those of plain PyTorch at the same precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexnsa import NSAConfig, native_sparse_attention, select_blocks
from flexnsa.config import num_compressed
from flexnsa.lm.measure.table import format_table

CONFIG = NSAConfig(
    compress_block_size=16, compress_stride=8, select_block_size=32, num_selected_blocks=4, window_size=64
)
SHAPE = {"batch": 2, "num_heads": 6, "num_kv_heads": 2, "seq_len": 331, "head_dim": 32, "v_head_dim": 48}
Attend = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class ParityRow:
    """Largest error of one tensor, as a fraction of the oracle's largest value, and plain PyTorch's error."""

    impl: str
    dtype: str
    tensor: str
    error: float
    plain_error: float


def measure_parity(impls: tuple[str, ...], dtypes: tuple[torch.dtype, ...], device: str = "cpu") -> list[ParityRow]:
    """Compare implementations with the fp64 oracle, forward and every gradient."""
    rows = []
    for dtype in dtypes:
        inputs = {name: tensor.to(dtype) for name, tensor in random_inputs(device).items()}
        for impl in impls:
            for name, pair in errors(inputs, impl, config=CONFIG).items():
                rows.append(ParityRow(impl, str(dtype).removeprefix("torch."), name, *pair))
    return rows


def errors(
    inputs: dict[str, Tensor], impl: str, *, config: NSAConfig, wrap: Callable[[Attend], Attend] = lambda attend: attend
) -> dict[str, tuple[float, float]]:
    """Return the largest errors of the output and of every gradient, and those of plain PyTorch, as fractions.

    Errors are relative to the largest value of each tensor. Oracle and plain PyTorch are one formula,
    ``impl="reference"``, in fp64 and in the precision under test. All get the same rounded inputs and the blocks of the
    oracle: a near-tie that is decided differently makes another function, not an error.

    Args:
        inputs: the tensors of :func:`flexnsa.native_sparse_attention` by name.
        impl: implementation under test.
        config: config of all.
        wrap: applied to the function under test, such as ``torch.compile``.
    """
    exact_inputs = {name: tensor.detach().double() for name, tensor in inputs.items()}
    blocks = select_blocks(exact_inputs["q"], exact_inputs["k_cmp"], config=config, impl="reference")

    def attention(impl: str) -> Attend:
        def attend(**tensors: Any) -> Any:
            return native_sparse_attention(**tensors, config=config, block_indices=blocks, impl=impl)

        return attend

    exact = output_and_gradients(attention("reference"), exact_inputs)
    plain = output_and_gradients(attention("reference"), inputs)
    result = output_and_gradients(wrap(attention(impl)), inputs)
    return {name: (_error(result[name], truth), _error(plain[name], truth)) for name, truth in exact.items()}


def random_inputs(device: str) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws, dtype=torch.float64).to(device)

    batch, kv_heads, seq_len = SHAPE["batch"], SHAPE["num_kv_heads"], SHAPE["seq_len"]
    lengths = {"": seq_len, "_cmp": num_compressed(seq_len, CONFIG), "_win": seq_len}
    inputs = {"q": normal(batch, SHAPE["num_heads"], seq_len, SHAPE["head_dim"])}
    for suffix, length in lengths.items():
        inputs[f"k{suffix}"] = normal(batch, kv_heads, length, SHAPE["head_dim"])
        inputs[f"v{suffix}"] = normal(batch, kv_heads, length, SHAPE["v_head_dim"])
    return inputs | {"gates": normal(batch, SHAPE["num_heads"], seq_len, 3).sigmoid()}


def output_and_gradients(attend: Attend, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run forward and backward; return ``out``, ``dq``, ``dk`` and so on."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    out = attend(**leaves)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out)
    gradients = torch.autograd.grad(out, list(leaves.values()), upstream)
    return {"out": out.detach(), **{f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}}


def parity_table(rows: list[ParityRow]) -> str:
    """Return a table with a line per tensor; a ratio of 1 means as exact as plain PyTorch."""
    columns = list(dict.fromkeys((row.impl, row.dtype) for row in rows))
    cells = {(row.impl, row.dtype, row.tensor): row for row in rows}
    header = ["tensor", *(title for impl, dtype in columns for title in (f"{impl} {dtype}", "plain", "ratio"))]
    lines = []
    for tensor in dict.fromkeys(row.tensor for row in rows):
        line = [tensor]
        for column in columns:
            row = cells[*column, tensor]
            line += [f"{row.error:.1e}", f"{row.plain_error:.1e}", f"{row.error / row.plain_error:.2f}"]
        lines.append(line)
    return format_table(header, lines)


def _error(result: Tensor, truth: Tensor) -> float:
    return ((result.double() - truth).abs().max() / truth.abs().max()).item()
