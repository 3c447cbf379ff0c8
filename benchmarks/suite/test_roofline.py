"""Work that is counted in closed form is the work of the definition, and nothing recorded is faster than the device."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness.options import RESULTS
from benchmarks.harness.phases import random_blocks
from benchmarks.harness.setting import Setting
from benchmarks.harness.work import Work, pairs, work_of
from benchmarks.kernels.roofline import H200, points, rates, sizes_of, table
from flexnsa import MLPCompressor, NSAConfig
from flexnsa.config import num_compressed

CONFIG = NSAConfig(
    compress_block_size=8, compress_stride=4, select_block_size=16, num_selected_blocks=4, window_size=24
)
SETTING = Setting(num_heads=4, num_kv_heads=2, head_dim=8, config=CONFIG, dtype=torch.bfloat16, device="cpu")


@pytest.mark.parametrize("length", [1, 7, 8, 24, 64, 150])
def test_pairs_are_those_of_the_masks(length: int) -> None:
    t, s = torch.arange(length)[:, None], torch.arange(length)
    assert pairs("win", length, CONFIG) == ((s <= t) & (s > t - CONFIG.window_size)).sum()
    ends = torch.arange(num_compressed(length, CONFIG)) * CONFIG.compress_stride + CONFIG.compress_block_size - 1
    assert pairs("cmp", length, CONFIG) == (ends <= t).sum()
    blocks = random_blocks(SETTING, length)[0, 0]
    chosen = (s // CONFIG.select_block_size == blocks[..., None]).any(1)
    assert pairs("slc", length, CONFIG) == (chosen & (s <= t)).sum()


def test_bytes_at_the_least_are_those_of_inputs_and_outputs() -> None:
    length, batch = 150, 3
    keys = num_compressed(length, CONFIG)

    def nbytes(heads: int, length: int, dim: int = 8, dtype: torch.dtype = torch.bfloat16) -> int:
        return torch.empty(batch, heads, length, dim, dtype=dtype).nbytes

    work = work_of(sizes_of(SETTING.to_dict() | {"batch": batch}, length))
    q = out = nbytes(4, length)
    lse, blocks = nbytes(4, length, 1, torch.float32), nbytes(2, length, 4, torch.int32)
    for name, kv in (("cmp branch", 2 * nbytes(2, keys)), ("slc branch", 2 * nbytes(2, length))):
        assert work[name]["forward"].least == q + kv + out + lse
        assert work[name]["backward"].least == 2 * (q + kv + out) + lse
    assert work["score and select"]["forward"].least == q + nbytes(2, keys) + lse + blocks
    assert work["gate"]["forward"].least == 4 * out + nbytes(4, length, 3)
    assert work["gate"]["backward"].least == 7 * out + 2 * nbytes(4, length, 3)


def test_operations_are_those_of_plain_products() -> None:
    """Of a window that shows everything, half of what a product counts that knows no mask; of the MLPs, all."""
    length = 1000
    setting = SETTING.to_dict() | {"num_kv_heads": 4, "config": {**SETTING.to_dict()["config"], "window_size": length}}
    work = work_of(sizes_of(setting, length))
    q, k, v = torch.randn(3, 4, length, 8, requires_grad=True).unbind()
    with FlopCounterMode(display=False) as counter:
        _ = (q @ k.mT).softmax(-1) @ v
    assert work["win branch"]["forward"].flops == pytest.approx(counter.get_total_flops() / 2, rel=2 / length)

    phi, x = MLPCompressor(4, 8, config=CONFIG), torch.randn(1, 4, length, 8)
    first = torch.arange(num_compressed(length, CONFIG))[None] * CONFIG.compress_stride
    with FlopCounterMode(display=False) as counter:
        phi(x, first)
    assert work["compress"]["forward"].flops == pytest.approx(2 * counter.get_total_flops(), rel=0.01)


def test_a_pass_at_the_peak_reaches_all_of_it() -> None:
    work = Work(flops=int(H200.flops), least=int(H200.bytes), extra=int(H200.bytes))
    point = rates(work, 2000.0, H200)
    assert point["bound"] == "memory"
    assert point["floor_ms"] == pytest.approx(2000)
    assert point["share"] == pytest.approx({"products": 0.5, "memory": 1, "exponentials": 0})


def test_nothing_recorded_is_faster_than_the_device() -> None:
    record = json.loads((RESULTS / "attention_h200.json").read_text())
    passes = points(record, H200)
    assert {point["name"] for point in passes} >= {"compress", "cmp branch", "slc branch", "win branch", "gate"}
    assert all(point["floor_ms"] < point["ms"] for point in passes)
    assert len(table(passes).splitlines()) == len(passes) + 2
