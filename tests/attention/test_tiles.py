"""Every GPU has tiles for every head, and those measured on an H200 stay; that they fit is for ``tests/emitted``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexnsa.attention.tiles import flex, intervals, scoring, selected
from flexnsa.attention.tiles.device import AMPERE, BLACKWELL, HOPPER, Device, generation_of, padded

KIB = 1024
A100, RTX_4090 = Device(163 * KIB, AMPERE), Device(99 * KIB, AMPERE)
H200, B200 = Device(227 * KIB, HOPPER), Device(227 * KIB, BLACKWELL)
DEVICES = {"A100": A100, "RTX 4090": RTX_4090, "H200": H200, "B200": B200}
BF16, FP32 = torch.bfloat16, torch.float32
DIMS = [(16, 16), (64, 64), (96, 80), (128, 128), (160, 128), (192, 128), (256, 256)]


def test_devices_that_multiply_alike_are_of_one_generation() -> None:
    of = {"T4": 7, "A100": 8, "H200": 9, "B200": 10, "Thor": 11, "RTX 5090": 12}
    generations = [generation_of(major) for major in of.values()]
    assert generations == [AMPERE, AMPERE, HOPPER, BLACKWELL, BLACKWELL, AMPERE]


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("dims", DIMS)
def test_flex_attention_has_tiles_everywhere(device: Device, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    dense = flex.dense_tiles(device, dtype, *dims)
    for name in ("fwd_BLOCK_M", "fwd_BLOCK_N", "bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2"):
        assert dense[name] in (16, 32, 64, 128)  # divides the masks' tiles of 128
    sparse = flex.sparse_tiles(device, dtype, *dims, rows=48, keys=192)
    assert sparse["fwd_BLOCK_M"] == 16  # divides 48
    assert sparse["fwd_BLOCK_N"] in (16, 32, 64)
    assert flex.decoding_tiles(device, dtype, *dims, rows=16, keys=64)["BLOCK_N"] in (16, 32, 64)


@pytest.mark.parametrize(
    ("dtype", "dim", "expected"),
    [
        (BF16, 64, {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 128, "fwd_num_warps": 8, "fwd_num_stages": 3}),
        (BF16, 128, {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 8, "fwd_num_stages": 3}),
        (BF16, 128, {"bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 32}),
        (BF16, 256, {"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_num_stages": 2, "fwd_BLOCK_N": 32}),
        (FP32, 128, {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3}),
        (FP32, 128, {"bwd_BLOCK_M1": 16, "bwd_BLOCK_N1": 16, "bwd_num_warps": 4, "bwd_num_stages": 1}),
    ],
)
def test_the_dense_branches_of_an_h200_keep_their_tiles(dtype: torch.dtype, dim: int, expected: dict[str, Any]) -> None:
    assert flex.dense_tiles(H200, dtype, dim, dim).items() >= expected.items()


def test_the_other_kernels_of_an_h200_keep_their_tiles() -> None:
    sparse = flex.sparse_tiles(H200, BF16, 128, 128, rows=16, keys=64)
    assert sparse.items() >= {"fwd_BLOCK_M": 16, "fwd_BLOCK_N": 64, "fwd_num_warps": 1, "fwd_num_stages": 2}.items()
    assert sparse.items() >= {"bwd_BLOCK_N1": 16, "bwd_num_warps": 1, "bwd_num_stages": 3}.items()
    decoding = {"BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
    assert flex.decoding_tiles(H200, BF16, 128, 128, rows=16, keys=64) == decoding
    tiles = intervals.Tiles
    assert intervals.forward_tiles(H200, BF16, 128, 128, windowed=True) == tiles(64, 32, 4, 3)
    assert intervals.forward_tiles(H200, BF16, 64, 64, windowed=False) == tiles(128, 64, 8, 3)
    windowed = intervals.backward_tiles(H200, BF16, 64, 64, windowed=True, placed=False)
    assert windowed == (tiles(64, 32, 4, 3), tiles(64, 64, 4, 2))
    compressed = intervals.backward_tiles(H200, BF16, 64, 64, windowed=False, placed=False)
    assert compressed == (tiles(64, 32, 4, 3), tiles(128, 64, 4, 2))
    assert selected.forward_tiles(H200, BF16, 64, 64, 64) == selected.Tiles(128, 64, 4, 2)
    assert scoring.importance_tiles(H200, BF16, 128, 4) == scoring.Tiles(64, 64, 4, 1)
    assert scoring.importance_tiles(H200, FP32, 128, 4) == scoring.Tiles(32, 16, 4, 2)
    assert scoring.importance_tiles(H200, BF16, 64, 8) == scoring.Tiles(64, 32, 4, 1, 128)
    assert scoring.importance_tiles(H200, FP32, 64, 64) == scoring.Tiles(16, 8, 4, 1)
    assert scoring.log_sum_exp_tiles(H200, BF16, 128) == scoring.Tiles(128, 64, 4, 2)
    assert scoring.log_sum_exp_tiles(H200, FP32, 256) == scoring.Tiles(32, 32, 4, 2)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_kernels_of_our_own_have_tiles(device: Device, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    importance = scoring.importance_tiles(device, dtype, dims[0], 4)
    held = importance.keys * 4 + importance.queries * importance.num_stages
    assert held * padded(dims[0]) * dtype.itemsize <= device.shared_memory
    assert scoring.log_sum_exp_tiles(device, dtype, dims[0]).queries >= 16
    for windowed in (True, False):
        assert intervals.forward_tiles(device, dtype, *dims, windowed=windowed).keys >= 16
        both = intervals.backward_tiles(device, dtype, *dims, windowed=windowed, placed=True)
        assert all(tiles.keys >= 16 for tiles in both)
    if dtype == FP32 and dims[0] > 128:
        return  # refused where they do not fit
    for choose in (selected.forward_tiles, selected.backward_tiles):
        chosen = choose(device, dtype, *dims, 64)
        assert chosen.queries >= 16
        assert chosen.num_warps in (4, 8, 16)  # Triton takes powers of two


@pytest.mark.parametrize(("programs", "heads"), [(1, 1), (1055, 1), (2111, 1), (2112, 2), (6336, 6), (10**6, 6)])
def test_gradients_of_keys_are_enough_programs_for_a_gpu(programs: int, heads: int) -> None:
    assert intervals.heads_of_program(6, programs, 4, 132) == heads
    assert intervals.heads_of_program(6, programs // 4, 8, 132) == heads


def test_wide_heads_fit_the_tensor_memory_of_blackwell() -> None:
    """Triton 3.6 and 3.7 compile 64 rows of 256 and 256 columns to an empty kernel, without a word."""
    assert selected.backward_tiles(B200, BF16, 256, 256, 64).queries <= 32


def test_tiles_that_fit_no_device_raise() -> None:
    with pytest.raises(ValueError, match=r"k: impl='triton' expects blocks of 64 keys of 256 .* to fit 101376 bytes"):
        selected.backward_tiles(RTX_4090, FP32, 256, 256, 64)
    with pytest.raises(ValueError, match=r"k: impl='flex' expects .* keys of 1024 and values of 1024 .* 101376 bytes"):
        flex.dense_tiles(RTX_4090, FP32, 1024, 1024)
    with pytest.raises(ValueError, match=r"q: expected 512 compressed keys of 256 .* to fit 101376 bytes"):
        scoring.importance_tiles(RTX_4090, FP32, 256, 64)
    with pytest.raises(ValueError, match=r"k: impl='triton' expects .* keys of 2048 .* 101376 bytes"):
        intervals.forward_tiles(RTX_4090, FP32, 2048, 2048, windowed=True)
    with pytest.raises(ValueError, match=r"q: expected 48 rows of 1024 .* to fit 101376 bytes"):
        scoring.log_sum_exp_tiles(RTX_4090, FP32, 1024)
