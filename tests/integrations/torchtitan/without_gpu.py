"""What torchtitan's trainer asks of a GPU and of a newer PyTorch, given by stand-ins; import this before torchtitan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.pipelining import schedules

IS_OLD = not hasattr(torch.distributed, "set_timeout")
"""Whether this PyTorch, such as 2.13, lacks what torchtitan asks of a newer one."""
MEMORY = 2**34
STAND_INS: dict[str, Any] = {
    "get_device_name": lambda *_: "CPU",
    "get_device_properties": lambda *_: SimpleNamespace(total_memory=MEMORY, multi_processor_count=1),
    "reset_peak_memory_stats": lambda *_: None,
    "empty_cache": lambda: None,
    "memory_stats": lambda *_: {},
    "mem_get_info": lambda *_: (MEMORY, MEMORY),
    "current_device": lambda: 0,
    "set_device": lambda *_: None,
}


def pretend() -> None:
    """Put the stand-ins in place, in this process."""
    torch_utils: Any = torch._utils  # pyright: ignore[reportAttributeAccessIssue]
    torch_utils._get_available_device_type = lambda: "cpu"
    for name, function in STAND_INS.items():
        setattr(torch.cpu, name, function)
    made = _fsdp_param_group.FSDPParamGroup.__init__

    def make(self: Any, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        self.force_sum_reduction_for_comms = True  # gloo cannot scale what it sums

    _fsdp_param_group.FSDPParamGroup.__init__ = make
    if IS_OLD:
        distributed: Any = torch.distributed
        distributed.set_timeout = lambda *_: None
        for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
            kind.step = _taking_microbatches(kind.step)


def _taking_microbatches(step: Any) -> Any:
    """Let a pipeline take a batch that is in microbatches already, which it then splits again."""

    def take(self: Any, *whole: Any, kwarg_mbs: Any = None, **options: Any) -> Any:
        if kwarg_mbs is None:
            return step(self, *whole, **options)
        inputs, targets = options.pop("arg_mbs"), options.pop("target_mbs")
        joined = [torch.cat(parts) for parts in zip(*inputs, strict=True)] if inputs else []
        named = {name: torch.cat([part[name] for part in kwarg_mbs]) for name in kwarg_mbs[0]}
        return step(self, *joined, target=torch.cat(targets) if targets else None, **named, **options)

    return take


pretend()
