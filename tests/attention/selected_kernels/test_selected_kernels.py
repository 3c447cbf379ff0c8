"""The selected branch in Triton, run by Triton's interpreter, against the oracle in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import assert_as_exact_as_plain
from selected_cases import CASES, attend, run

from flexnsa.attention import reference
from flexnsa.attention.triton import selected
from flexnsa.config import NSAConfig

Interpret = Callable[[str], dict[str, Any]]
SCRIPT = Path(__file__).with_name("selected_cases.py")


@pytest.fixture(scope="module")
def interpret(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpret]:
    """A process that runs cases by name, one after the other."""
    pytest.importorskip("triton")
    command = [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("interpreted"))]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(SCRIPT.parents[3])}
    pipe: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(command, env=environment, **pipe) as process:

        def ask(name: str) -> dict[str, Any]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(name + "\n")
            answer = process.stdout.readline().strip()
            assert answer, f"the interpreter ended with {process.wait()}; what it said is above"
            return torch.load(answer)

        yield ask
        assert process.stdin is not None
        process.stdin.close()


def check(name: str, got: dict[str, Any]) -> None:
    """Demand the oracle's results to the precision of plain PyTorch, and equal bits at every call."""
    exact, plain = (attend(reference.selected_attention, CASES[name], dtype) for dtype in (torch.float64, None))
    for names, factor in ((("out", "lse"), 2), (("dq", "dk", "dv"), 3)):
        parts = ({key: results[key] for key in names} for results in (got["results"], plain, exact))
        assert_as_exact_as_plain(*parts, factor=factor)
    assert got["same"], "another call gave other bits"


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_match_float64(name: str, interpret: Interpret) -> None:
    check(name, interpret(name))


def test_one_graph_of_each_kind_serves_every_length(interpret: Interpret) -> None:
    assert interpret("compiled") == {"same": True, "graphs": [1, 1]}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_compiled_kernels_match_float64_and_repeat_their_bits(name: str) -> None:
    check(name, run(CASES[name], "cuda"))


@pytest.mark.parametrize(("heads", "bytes_of_head"), [(4, 2**20), (3, 2**29), (5, 2**31), (2, 2**33)])
def test_parts_hold_every_head_once_within_the_workspace(heads: int, bytes_of_head: int) -> None:
    k = torch.arange(3 * heads).view(3, heads)
    parts = [k[part] for part in selected._parts(k, bytes_of_head)]
    assert sorted(torch.cat([x.flatten() for x in parts]).tolist()) == list(range(3 * heads))
    assert all(x.numel() == 1 or x.numel() * bytes_of_head <= selected.WORKSPACE_BYTES for x in parts)
    assert all(len(x) == 1 or x.shape[1] == heads for x in parts)


@pytest.mark.parametrize("bytes_of_query", [16 * 16 * 128 * 2, 64 * 32 * 256 * 4])
def test_partial_rows_of_a_chunk_take_at_most_half_the_workspace(bytes_of_query: int) -> None:
    assert selected._chunk(bytes_of_query) * bytes_of_query <= selected.WORKSPACE_BYTES // 2


def test_what_the_kernels_cannot_take_is_refused_by_name() -> None:
    config, chosen = NSAConfig(), torch.zeros(1, 1, 8, 16, dtype=torch.int32)
    x = torch.zeros(1, 1, 8, 16)
    for bad, message in (
        ((x.double(), x.double(), x.double()), r"q: impl='triton' expects float32, bfloat16 or float16, got .*float64"),
        ((x, x, torch.zeros(1, 1, 8, 257)), r"v: impl='triton' expects a head dimension of at most 256, got 257"),
        ((x, x, x), r"q: impl='triton' expects a CUDA device, got cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            selected.selected_attention(*bad, chosen, None, config=config, scale=1.0)


KIB = 1024
DEVICES = {"A100": (163, 8), "RTX 4090": (99, 8), "H200": (227, 9), "B200": (227, 10)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "dims"),
    [
        (torch.float32, (64, 64)),
        (torch.float32, (128, 128)),
        (torch.bfloat16, (64, 64)),
        (torch.bfloat16, (128, 128)),
        (torch.bfloat16, (192, 128)),
        (torch.bfloat16, (256, 256)),
    ],
)
def test_every_device_has_tiles(device: str, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    tiles = pytest.importorskip("flexnsa.attention.triton.tiles")
    shared, generation = DEVICES[device]
    for choose in (tiles.forward_tiles, tiles.backward_tiles):
        chosen = choose(tiles.Device(shared * KIB, generation), dtype, *dims, 64)
        assert chosen.rows >= 16
        assert chosen.num_warps in (4, 8, 16)  # Triton takes powers of two


def test_wide_heads_stay_within_the_tensor_memory_of_blackwell() -> None:
    """Triton 3.6 and 3.7 compile 64 rows of 256 and 256 columns to an empty kernel, without a word."""
    tiles = pytest.importorskip("flexnsa.attention.triton.tiles")
    assert tiles.backward_tiles(tiles.Device(227 * KIB, 10), torch.bfloat16, 256, 256, 64).rows <= 32


def test_blocks_that_do_not_fit_a_device_are_refused_by_name() -> None:
    tiles = pytest.importorskip("flexnsa.attention.triton.tiles")
    with pytest.raises(ValueError, match=r"k: impl='triton' expects blocks of 64 keys of 256 .* to fit 101376 bytes"):
        tiles.backward_tiles(tiles.Device(99 * KIB, 8), torch.float32, 256, 256, 64)
