"""What every implementation is given, and how results are brought into one layout."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.phases import random_blocks
from benchmarks.harness.setting import Setting
from benchmarks.harness.workloads import Workload


@dataclass(frozen=True)
class Problem:
    """One sequence, its tensors ``(1, H, S, D)``.

    Args:
        setting: of the heads and branches.
        q: queries.
        k: keys, of every branch.
        v: values, of every branch.
        gates: ``(1, Hq, S, 3)``, before the sigmoid.
        block_indices: ``(1, Hkv, S, n)``, ascending, padded with -1: what the selected branch is to attend to.
    """

    setting: Setting
    q: Tensor
    k: Tensor
    v: Tensor
    gates: Tensor
    block_indices: Tensor

    @classmethod
    def draw(cls, setting: Setting, length: int) -> Problem:
        """The same problem every time."""
        torch.manual_seed(0)
        q, gates = (setting.draw(setting.num_heads, length, dim) for dim in (None, 3))
        k, v = (setting.draw(setting.num_kv_heads, length) for _ in range(2))
        return cls(setting, q, k, v, gates, random_blocks(setting, length))

    @property
    def length(self) -> int:
        """Tokens."""
        return self.q.shape[2]

    def token_major(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Leaves ``(S, H, D)`` of tensors ``(1, H, S, D)``: the layout of packed sequences."""
        return tuple(x.detach()[0].transpose(0, 1).contiguous().requires_grad_() for x in tensors)

    def ends(self) -> Tensor:
        """The sequence as cumulative lengths, int32 ``(2,)``."""
        return torch.tensor([0, self.length], dtype=torch.int32, device=self.q.device)


Adapter = Callable[[Problem], Workload]
"""Make an implementation of a problem; it differentiates by q, k and v first, in this order."""


@dataclass(frozen=True)
class Peer:
    """An implementation.

    Args:
        name: of the project.
        package: that has to be importable, by its first name.
        selected: the selected branch alone, given its blocks.
        whole: q, k, v and gates to the output.
        differences: of its whole from ours without a window.
    """

    name: str
    package: str
    selected: Adapter
    whole: Adapter
    differences: str

    @property
    def is_installed(self) -> bool:
        """Whether it can be imported; it is not."""
        return importlib.util.find_spec(self.package) is not None


def head_major(x: Tensor) -> Tensor:
    """``(1, H, S, D)`` of either token-major layout, ``(S, H, D)`` or ``(1, S, H, D)``."""
    return x.reshape(1, *x.shape[-3:]).transpose(1, 2)


def attribute(module: str, name: str) -> Any:
    """Return an attribute of another package, which need not be installed to import this file."""
    return getattr(importlib.import_module(module), name)
