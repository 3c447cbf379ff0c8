"""Is it right on this device? Output, every gradient and the selection, against the formula in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.contestants import attention_of, nsa_inputs
from benchmarks.harness.setting import Setting
from flexnsa import NSAConfig, select_blocks

CASES = (
    {"num_heads": 32, "num_kv_heads": 2, "head_dim": 128, "seq_len": 1061, "dtype": torch.bfloat16},
    {"num_heads": 12, "num_kv_heads": 2, "head_dim": 64, "seq_len": 707, "dtype": torch.float32},
)
CONFIG = NSAConfig(num_selected_blocks=6)
NAMES = ("q", "gates", "k", "v", "k_win", "v_win", "k_cmp", "v_cmp")


def check(setting: Setting) -> list[dict[str, Any]]:
    """Give, for each case, every tensor's error and that of the plain formula in the same precision.

    An error may be twice the plain formula's, a gradient's three times. Near-ties are decided by rounding, so all
    attend to the blocks of the formula in float64; how many rows the implementation itself selects alike stands beside.
    """
    reports = []
    for case in CASES:
        length, dtype = case["seq_len"], case["dtype"]
        small = dataclasses.replace(setting, config=CONFIG, **{name: case[name] for name in case if name != "seq_len"})
        torch.manual_seed(0)
        inputs = nsa_inputs(small, length)
        exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
        with torch.no_grad():
            blocks = select_blocks(exact_inputs[0], exact_inputs[6], config=small.config, impl="reference")
            own = select_blocks(inputs[0], inputs[6], config=small.config, impl=small.impl)
        upstream = torch.randn_like(inputs[0])
        formula = attention_of(dataclasses.replace(small, impl="reference"), block_indices=blocks)
        exact = _run(exact_inputs, formula, upstream)
        plain = _run(inputs, formula, upstream)
        result = _run(inputs, small.compile(attention_of(small, block_indices=blocks)), upstream)
        errors = {}
        for name, truth in exact.items():
            allowed = (2 if name == "out" else 3) * _error(plain[name], truth) + 1e-6
            error = _error(result[name], truth)
            errors[name] = {"error": error, "allowed": allowed, "ok": error <= allowed}
        alike = (own == blocks).all(-1).float().mean().item()
        report = {"case": {**case, "dtype": str(dtype)}, "errors": errors, "rows_selected_as_in_fp64": alike}
        report["ok"] = all(entry["ok"] for entry in errors.values())
        reports.append(report)
        print(f"{'right' if report['ok'] else 'WRONG'}: {small.impl}, {report['case']}", flush=True)
        for name, entry in errors.items():
            print(f"  {name:6} error {entry['error']:.1e}, allowed {entry['allowed']:.1e}")
        print(f"  rows selected as in float64: {alike:.4%}", flush=True)
    return reports


def _run(inputs: Sequence[Tensor], attend: Callable[..., Tensor], upstream: Tensor) -> dict[str, Tensor]:
    out = attend(*inputs)
    gradients = torch.autograd.grad(out, inputs, upstream.to(out.dtype))
    return {"out": out.detach()} | {f"d{name}": x for name, x in zip(NAMES, gradients, strict=True)}


def _error(result: Tensor, truth: Tensor) -> float:
    return ((result.double() - truth).abs().max() / truth.abs().max()).item()
