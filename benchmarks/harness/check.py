"""Is it right on this device? Output, every gradient and the selection, against the formula in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from benchmarks.harness.parity import errors
from benchmarks.harness.setting import Setting
from benchmarks.harness.workloads import NSA_INPUTS, nsa_inputs
from flexnsa import NSAConfig, select_blocks

CASES = (
    {"num_heads": 32, "num_kv_heads": 2, "head_dim": 128, "seq_len": 1061, "dtype": torch.bfloat16},
    {"num_heads": 12, "num_kv_heads": 2, "head_dim": 64, "seq_len": 707, "dtype": torch.float32},
)
CONFIG = NSAConfig(num_selected_blocks=6)


def relative_error(x: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the Euclidean norm of the error relative to that of the exact tensor."""
    return float((x.detach().double() - exact.double()).norm() / exact.double().norm())


@torch.no_grad()
def rows_selected_alike(setting: Setting, q: torch.Tensor, k_cmp: torch.Tensor) -> float:
    """Share of rows that the implementation selects as the formula does in float64; near-ties are left to rounding."""
    blocks = select_blocks(q, k_cmp, config=setting.config, impl=setting.impl)
    exact = select_blocks(q.double(), k_cmp.double(), config=setting.config, impl="reference")
    return (blocks == exact).all(-1).float().mean().item()


def check(setting: Setting) -> list[dict[str, Any]]:
    """Return, for each case, every tensor's error and that of the plain formula in the same precision.

    An error may be twice the plain formula's, a gradient's three times. All attend to the blocks of the formula in
    float64; how many rows the implementation itself selects alike is returned, too.
    """
    reports = []
    for case in CASES:
        small = dataclasses.replace(setting, config=CONFIG, **{name: case[name] for name in case if name != "seq_len"})
        torch.manual_seed(0)
        inputs = dict(zip(NSA_INPUTS, nsa_inputs(small, case["seq_len"]), strict=True))
        entries = {}
        for name, (error, plain) in errors(inputs, small.impl, config=CONFIG, wrap=small.compile).items():
            allowed = (2 if name == "out" else 3) * plain + 1e-6
            entries[name] = {"error": error, "allowed": allowed, "ok": error <= allowed}
        report = {
            "case": {**case, "dtype": str(case["dtype"])},
            "errors": entries,
            "rows_selected_as_in_fp64": rows_selected_alike(small, inputs["q"], inputs["k_cmp"]),
            "ok": all(entry["ok"] for entry in entries.values()),
        }
        reports.append(report)
        print(f"{'right' if report['ok'] else 'WRONG'}: {small.impl}, {report['case']}", flush=True)
        for name, entry in entries.items():
            print(f"  {name:6} error {entry['error']:.1e}, allowed {entry['allowed']:.1e}")
        print(f"  rows selected as in float64: {report['rows_selected_as_in_fp64']:.4%}", flush=True)
    return reports
