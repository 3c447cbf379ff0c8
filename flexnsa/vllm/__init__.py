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

    from flexnsa.vllm.unsupported import refuse_models

    for name, place in MODELS.items():
        ModelRegistry.register_model(name, place)
    ModelRegistry.inspect_model_cls = refuse_models(ModelRegistry.inspect_model_cls, MODELS)
    CompilationConfig._attention_ops.append(OPERATOR)  # piecewise compilation splits the model there
