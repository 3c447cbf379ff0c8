"""What vLLM cannot do with NSA, refused by name before a model is loaded: nothing falls back to dense attention."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from flexnsa.layers.config import leaders_of
from flexnsa.transformers.choice import NAME
from flexnsa.transformers.classes import PREFIX
from flexnsa.transformers.local_layers import layer_types
from flexnsa.transformers.options import LayerOptions


class Refusals(VerifyAndUpdateConfig):
    """Has vLLM check what it is asked for before it starts a worker, whose errors only a log would show."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Check the options of an engine and the config of its model: a ValueError names what cannot be served."""
        model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
        ranks, heads = parallel.tensor_parallel_size, model.get_total_num_kv_heads()
        if heads % ranks:
            raise ValueError(f"tensor_parallel_size: expected a divisor of num_kv_heads={heads}, got {ranks}")
        for name, value, *served in (
            ("kv_cache_dtype", cache.cache_dtype, "auto"),
            ("quantization", model.quantization, None, "fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"),
            ("kv_transfer_config", vllm_config.kv_transfer_config, None),
            ("kv_offloading_size", cache.kv_offloading_size, None),
            ("decode_context_parallel_size", parallel.decode_context_parallel_size, 1),
            ("prefill_context_parallel_size", parallel.prefill_context_parallel_size, 1),
        ):
            _refuse_others(name, value, *served)
        if hasattr(model.hf_config, "decoder_config"):
            leaders = model.hf_config.decoder_config().leaders
        else:
            refuse_layers(model.hf_config)
            options = LayerOptions.of(model.hf_config)
            leaders = leaders_of(options.share_index, model.hf_config.num_hidden_layers, options.sizes)
        _refuse_stages(leaders, parallel.pipeline_parallel_size)


def _refuse_stages(leaders: Sequence[int], stages: int) -> None:
    for first, end in (get_pp_indices(len(leaders), stage, stages) for stage in range(stages)):
        for layer, leader in enumerate(leaders[first:end], first):
            if leader < first:
                got = f"{stages}: one begins with layer {first}, but layer {layer} reads the index of layer {leader}"
                raise ValueError(f"pipeline_parallel_size: expected stages that share no index, got {got}")


def refuse_layers(config: Any) -> None:
    """Check a converted model: a ValueError names what vLLM's classes, or the paged buffers, do not have."""
    options, rope = LayerOptions.of(config), getattr(config, "rope_parameters", None) or {}
    for kind in layer_types(config):
        _refuse_others("layer_types", kind, "full_attention")
    # vLLM computes these tables as transformers does, whatever the length of a sequence.
    _refuse_others("rope_type", rope.get("rope_type", "default"), "default", "linear", "llama3", "yarn")
    _refuse_others("rotary", options.rotary, "halves")
    _refuse_others("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), 1.0)
    _refuse_others("softcap", options.softcap, None)
    _refuse_others("index_score", options.sizes.index_score, None)
    if options.opening < 0:
        raise ValueError(f"opening: expected at least 0 of a model in vLLM, got {options.opening}")


def _refuse_others(name: str, value: object, *served: object) -> None:
    if value not in served:
        raise ValueError(f"{name}: expected {' or '.join(map(repr, served))} of a model in vLLM, got {value!r}")


def refuse_models(inspect: Callable[..., Any], served: Collection[str]) -> Callable[..., Any]:
    """Return vLLM's ``inspect`` of a model's class so that it refuses models which would silently be dense."""

    def checked(architectures: str | Sequence[str], model_config: ModelConfig) -> Any:
        names = [architectures] if isinstance(architectures, str) else architectures
        attention = getattr(model_config.hf_config, "_attn_implementation", None)
        if attention == NAME or (isinstance(attention, dict) and NAME in attention.values()):
            expected = "a model whose layers are NSA (flexnsa.transformers.convert)"
            raise ValueError(f"attn_implementation: expected {expected} in vLLM, got {attention!r}")
        for name in (each for each in names if each.startswith(PREFIX)):
            _refuse_others("architectures", name, *sorted(served))
            _refuse_others("model_impl", model_config.model_impl, "auto", "vllm")
        return inspect(architectures, model_config)

    return checked
