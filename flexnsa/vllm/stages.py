"""What a stage of pipeline parallelism holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs


def keep_empty_groups(project: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return vLLM's ``project`` of groups to a stage so that one without layers there has no buffers there."""

    def projected(*args: Any) -> list[Any]:
        groups = project(*args)
        for number, group in enumerate(groups):
            if not group.layer_names and isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
                groups[number] = replace(group, kv_cache_spec=group.kv_cache_spec.first_spec)
        return groups

    return projected
