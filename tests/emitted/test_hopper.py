"""Which calls the kernels for Hopper take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flexnsa.attention.interface import Call
from flexnsa.attention.tiles.device import AMPERE, Device
from flexnsa.attention.triton import hopper
from flexnsa.attention.triton.intervals import is_preferred
from flexnsa.config import NSAConfig
from flexnsa.positions import Positions


def heads(length: int = 256, dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(1, 4, length, dim, dtype=dtype)


def runs(*others: Tensor, q: Tensor | None = None, **options: Any) -> bool:
    return hopper.runs_on_hopper(heads() if q is None else q, *others, **{"placed": False, **options})


CALLS: dict[str, tuple[bool, Callable[[], bool]]] = {
    "heads of 64": (True, runs),
    "heads of 64 and 128, fp16": (
        True,
        lambda: runs(heads(dim=128, dtype=torch.float16), q=heads(dtype=torch.float16)),
    ),
    "token-major": (True, lambda: runs(heads().transpose(1, 2))),
    "every second token": (True, lambda: runs(heads()[:, :, ::2])),
    "blocks of 33": (True, lambda: runs(block_size=33)),
    "a group of 64": (True, lambda: runs(group=64)),
    "fp32": (False, lambda: runs(q=heads(dtype=torch.float32))),
    "heads of 80": (False, lambda: runs(heads(dim=80))),
    "documents": (False, lambda: runs(placed=True)),
    "blocks of 32": (False, lambda: runs(block_size=32)),
    "blocks of 128": (False, lambda: runs(block_size=128)),
    "a group of 65": (False, lambda: runs(group=65)),
    "64-bit offsets": (False, lambda: runs(wide=True)),
    "rows that are not aligned": (False, lambda: runs(heads(dim=72)[..., :64])),
    "rows that begin at the second number": (False, lambda: runs(heads(dim=80)[..., 1:65])),
    "rows that are far apart": (False, lambda: runs(torch.empty(1, 1, 64, 2**25, dtype=torch.bfloat16)[..., :64])),
    "a CPU": (False, lambda: runs(q=torch.empty(1, 4, 256, 64, dtype=torch.bfloat16, device="cpu"))),
}


@pytest.mark.parametrize("name", CALLS)
def test_they_take_16_bit_rows_that_they_can_copy_and_leave_the_rest_to_triton(name: str) -> None:
    taken, call = CALLS[name]
    with FakeTensorMode(), torch.device("cuda"):
        assert call() == taken


def test_they_take_long_compressed_branches_that_others_leave_to_flex_attention() -> None:
    with FakeTensorMode(), torch.device("cuda"):
        k = heads(length=4095, dim=128)
        q = heads(length=65536, dim=128)
        token = torch.zeros(1, 65536, dtype=torch.int32)
        documents = Call(NSAConfig(), 1.0, positions=Positions(token, token, token))
        assert is_preferred(q, k, k, Call(NSAConfig(), 1.0))
        assert not is_preferred(q, k, k, documents)
        assert is_preferred(q, k[:, :, :2048], k[:, :, :2048], documents)
        assert not is_preferred(q.float(), k.float(), k.float(), Call(NSAConfig(), 1.0))


def test_they_leave_other_generations_and_unknown_versions_to_triton() -> None:
    with FakeTensorMode(), torch.device("cuda"):
        with mock.patch.object(hopper, "device_of", return_value=Device(2**16, AMPERE)):
            assert not runs()
        with (
            mock.patch("triton.__version__", "4.0.0"),
            pytest.warns(UserWarning, match=r"^triton: expected .*got 4\.0"),
        ):
            assert not runs()
        assert runs()


def test_sums_are_joined_with_a_window_over_the_same_keys_only() -> None:
    def joins(keys: Tensor, *, placed: bool = False) -> bool:
        k = heads()
        return hopper.joins_window(k, k, k, keys, keys, block_size=64, chunk=256, placed=placed)

    with FakeTensorMode(), torch.device("cuda"):
        assert joins(heads())
        assert not joins(heads(length=128))
        assert not joins(heads(), placed=True)
        assert not joins(heads(dim=96))
