"""A plugin of vLLM that serves checkpoints of flexnsa: ``pip install 'flexnsa[vllm]'``, then ``vllm serve FOLDER``."""

CONVERTED = tuple(f"FlexNSA{dense}ForCausalLM" for dense in ("Llama", "Mistral", "Qwen2", "Qwen3"))
MODELS = {
    "FlexNSAForCausalLM": "flexnsa.vllm.decoder:FlexNSAForCausalLM",
    **{name: f"flexnsa.vllm.converted:{name}" for name in CONVERTED},
}
"""Where models are, by the names of their classes in a checkpoint."""
OPERATOR = "flexnsa::paged_attention"


def register() -> None:
    """Tell vLLM of the models; it calls this once in each of its processes."""
    from vllm import ModelRegistry
    from vllm.config import CompilationConfig
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.v1.core import kv_cache_utils

    from flexnsa.vllm.buffers import keep_empty_groups
    from flexnsa.vllm.unsupported import Refusals, refuse_models

    for name, place in MODELS.items():
        ModelRegistry.register_model(name, place)
        MODELS_CONFIG_MAP[name] = Refusals
    ModelRegistry.inspect_model_cls = refuse_models(ModelRegistry.inspect_model_cls, MODELS)
    kv_cache_utils._project_kv_cache_groups_to_worker = keep_empty_groups(
        kv_cache_utils._project_kv_cache_groups_to_worker
    )
    CompilationConfig._attention_ops.append(OPERATOR)  # piecewise compilation splits the model there
