"""What vLLM cannot do with NSA, refused by name before a model is loaded: nothing falls back to dense attention."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from vllm.config import ModelConfig, VllmConfig

NAMES = "FlexNSA"
"""With this begin the names of all classes of models with NSA layers."""
DROP_IN = "flexnsa"
"""The ``attn_implementation`` of dense models that attend sparsely."""


def refuse_options(vllm_config: VllmConfig) -> None:
    """Check the options of an engine.

    Raises:
        ValueError: one of them asks for what the paged buffers of NSA cannot do.
    """
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    options: list[tuple[str, Any, Any]] = [
        ("kv_cache_dtype", cache.cache_dtype, "auto"),
        ("quantization", vllm_config.model_config.quantization, None),
        ("kv_transfer_config", vllm_config.kv_transfer_config, None),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size, 1),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size, 1),
    ]
    for name, value, expected in options:
        if value != expected:
            raise ValueError(f"{name}: expected {expected!r} of a model with NSA, got {value!r}")


def refuse_models(inspect: Callable[..., Any], served: Collection[str]) -> Callable[..., Any]:
    """Return vLLM's ``inspect`` of a model's class so that it refuses models which would silently be dense."""

    def checked(architectures: str | Sequence[str], model_config: ModelConfig) -> Any:
        names = [architectures] if isinstance(architectures, str) else architectures
        attention = getattr(model_config.hf_config, "_attn_implementation", None)
        if attention == DROP_IN or (isinstance(attention, dict) and DROP_IN in attention.values()):
            expected = "a model whose layers are NSA (flexnsa.transformers.convert)"
            raise ValueError(f"attn_implementation: expected {expected} in vLLM, got {attention!r}")
        for name in names:
            if not name.startswith(NAMES):
                continue
            if name not in served:
                raise ValueError(f"architectures: expected one of {', '.join(sorted(served))} in vLLM, got {name!r}")
            if model_config.model_impl not in ("auto", "vllm"):
                raise ValueError(
                    f"model_impl: expected 'auto' or 'vllm' of a model with NSA, got {model_config.model_impl!r}"
                )
        return inspect(architectures, model_config)

    return checked
