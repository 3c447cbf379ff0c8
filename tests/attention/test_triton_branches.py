"""The branches in Triton, run by Triton's interpreter or a GPU, against the oracle in float64."""

from __future__ import annotations

import pytest
import torch

from flexnsa import NativeSparseAttention, selected_attention
from flexnsa.attention.dispatch import REFERENCE
from flexnsa.attention.interface import Call
from flexnsa.attention.triton import intervals, selected
from flexnsa.config import NSAConfig
from flexnsa.mods import soft_cap
from tests.support import triton_branches
from tests.support.comparison import assert_as_exact_as_plain, at_precision_of_gpu
from tests.support.interpreter import Interpret
from tests.support.triton_branches import attend
from tests.support.triton_cases import CASES


@pytest.mark.parametrize("name", CASES)
def test_results_are_as_exact_as_plain_pytorch_with_equal_bits_at_every_call(name: str, compute: Interpret) -> None:
    case, got = CASES[name], compute(triton_branches, name)
    plain = attend(REFERENCE, at_precision_of_gpu(case) if got["on_gpu"] else case)
    exact = attend(REFERENCE, case, torch.float64)
    forward, backward = ([key for key in exact if key.startswith("d") == of_backward] for of_backward in (False, True))
    for names, factor in ((forward, 2), (backward, 3)):
        parts = ({key: results[key] for key in names} for results in (got["results"], plain, exact))
        assert_as_exact_as_plain(*parts, factor=factor)
    assert got["same"]


def test_one_graph_of_each_kind_serves_every_length(interpret: Interpret) -> None:
    assert interpret(triton_branches, "compiled") == {"same": True, "graphs": [1, 1, 1]}


@pytest.mark.parametrize(("heads", "bytes_of_head"), [(4, 2**20), (3, 2**29), (5, 2**31), (2, 2**33)])
def test_parts_hold_every_head_once_within_the_workspace(heads: int, bytes_of_head: int) -> None:
    k = torch.arange(3 * heads).view(3, heads)
    parts = [k[part] for part in selected.parts_of(k, bytes_of_head)]
    assert sorted(torch.cat([x.flatten() for x in parts]).tolist()) == list(range(3 * heads))
    assert all(x.numel() == 1 or x.numel() * bytes_of_head <= selected.WORKSPACE_BYTES for x in parts)
    assert all(len(x) == 1 or x.shape[1] == heads for x in parts)
    assert max(x.numel() for x in parts) - min(x.numel() for x in parts) <= heads


@pytest.mark.parametrize("bytes_of_query", [16 * 16 * 128 * 2, 64 * 32 * 256 * 4])
def test_partial_outputs_fill_at_most_half_the_workspace(bytes_of_query: int) -> None:
    assert selected.chunk_of(bytes_of_query) * bytes_of_query <= selected.WORKSPACE_BYTES // 2


@pytest.mark.parametrize(("group", "queries"), [(1, 2048), (2, 1024), (4, 512), (6, 512), (16, 512), (64, 128)])
def test_a_program_serves_512_queries_within_bounds_of_rows(group: int, queries: int) -> None:
    assert selected.capacity_of(group, number_bytes=2) == queries
    assert selected.capacity_of(group, number_bytes=4) == max(1, 512 // group)  # longer sums are not accurate in fp32


def test_unsupported_inputs_of_triton_raise() -> None:
    config, chosen = NSAConfig(), torch.zeros(1, 1, 8, 16, dtype=torch.int32).fill_(-1)
    x = torch.zeros(1, 1, 8, 16)
    with pytest.raises(ValueError, match=r"^q: expected a CUDA device with impl='triton', got cpu"):
        selected_attention(x, x, x, chosen, config=config, impl="triton")
    with pytest.raises(ValueError, match=r"^x: expected a CUDA device with impl='triton', got cpu"):
        NativeSparseAttention(16, 2, 1, 16, impl="triton")(x[0], score_mod=soft_cap(3.0))
    mod = soft_cap(torch.tensor(3.0))
    with pytest.raises(ValueError, match=r"^impl: expected 'flex', .* with mods other than soft_cap, got 'triton'"):
        selected_attention(x, x, x, chosen, config=config, impl="triton", score_mod=mod)
    call = Call(config, 1.0, mod)
    with pytest.raises(ValueError, match=r"^score_mod: expected None or a soft cap with impl='triton'"):
        selected.selected(x, x, x, chosen, call)
    with pytest.raises(ValueError, match=r"^score_mod: expected None or a soft cap with impl='triton'"):
        intervals.window(x, x, x, call)


def test_more_heads_than_a_grid_has_programs_raise() -> None:
    config, x = NSAConfig(), torch.zeros(1, 1, 1, 16).expand(2**15, 2, 1, 16)
    with pytest.raises(ValueError, match=r"^k: expected at most 65535 heads in all .*, got \(32768, 2\)"):
        selected.selected(x, x, x, torch.zeros(1, dtype=torch.int32).expand(2**15, 2, 1, 16), Call(config, 1.0))
    with pytest.raises(ValueError, match=r"^q: expected at most 65535 heads in all .*, got \(32768, 2\)"):
        intervals.window(x, x, x, Call(config, 1.0))
