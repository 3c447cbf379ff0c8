"""Checkpoints with random weights, and the tokens with which transformers' ``generate`` continues prompts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from flexnsa import NSAConfig
from flexnsa.lm.transformers_model import FlexNSAConfig, FlexNSAForCausalLM
from flexnsa.transformers import convert

SIZES = {"dim": 64, "num_layers": 2, "num_heads": 8, "num_kv_heads": 2, "head_dim": 16, "vocab_size": 256}
NSA: dict[str, Any] = {"num_selected_blocks": 4, "window_size": 64}
INDEX: dict[str, Any] = {"index_heads": 2, "index_block_size": 8, "index_stride": 8}
MODELS: dict[str, dict[str, Any]] = {
    "paper": {"nsa": NSA},
    "index": {"nsa": NSA | INDEX},
    "rank": {"nsa": NSA | INDEX, "index_rank": 4, "gate": "residual", "v_head_dim": 24, "shared_keys": True}
    | {"num_layers": 4, "share_index": [0, 1, 0, 3]},
    "linear": {"nsa": NSA | {"compress_block_size": 64}, "compression": "linear", "gate": "softmax"},
    "cmp_win": {"nsa": NSA, "compression": "mean", "branches": ["cmp", "win"]},
    "slc": {"nsa": NSA, "branches": ["slc"]},
    "slc_win": {"nsa": NSA | INDEX, "branches": ["slc", "win"], "gate": "residual"},
}
"""Fields of the decoder. Prompts of more than 4 blocks of 64 tokens are attended to sparsely."""
DENSE = {
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "eos_token_id": None,
}
STRETCHED = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
CONVERTED: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, {"attention_bias": True, "rope_parameters": STRETCHED}, {"config": NSAConfig(**NSA)}),
    "mistral": (
        MistralForCausalLM,
        {"sliding_window": None, "tie_word_embeddings": True},
        {"config": NSAConfig(**NSA), "branches": ("slc",)},
    ),
    "qwen2": (Qwen2ForCausalLM, {}, {"config": NSAConfig(**NSA, **INDEX), "branches": ("slc", "win")}),
    "qwen3": (Qwen3ForCausalLM, {}, {"config": NSAConfig(**NSA, **INDEX), "index_rank": 4, "share_index": 2}),
}
"""Classes of dense models, what their configs have besides :data:`DENSE`, and arguments of ``convert``."""
PROMPT_LENGTHS, NEW_TOKENS = (700, 33, 401, 522, 5), 16
ROUNDING = 1e-3
"""Other weights are drawn if fp32 and fp64 differ by more: two blocks then have nearly the same score."""


@dataclass(frozen=True)
class Answer:
    """What follows a prompt: tokens, and the logarithms of their probabilities."""

    prompt: list[int]
    tokens: list[int]
    logs: list[float]


@dataclass(frozen=True)
class Reference:
    """A saved checkpoint and its answers."""

    folder: Path
    answers: list[Answer]


def make_model(name: str) -> Any:
    """Make a model of :data:`MODELS` or :data:`CONVERTED`."""
    if name in MODELS:
        return FlexNSAForCausalLM(FlexNSAConfig(**SIZES | MODELS[name], max_position_embeddings=2048)).eval()
    dense, sizes, options = CONVERTED[name]
    return convert(dense(dense.config_class(**DENSE, **sizes)).eval(), **options)


def make_reference(folder: Path, name: str) -> Reference:
    """Draw a model whose answers do not depend on rounding, save it, and have it answer prompts."""
    for seed in range(10):
        torch.manual_seed(seed)
        model = make_model(name)
        draw_weights(model)
        prompts = [torch.randint(256, (length,)) for length in PROMPT_LENGTHS]
        prompts.append(torch.cat((prompts[0][:500], prompts[2][:60])))  # a prefix in common
        answers = [answer(model, prompt) for prompt in prompts]
        model.save_pretrained(folder)
        exact = type(model).from_pretrained(folder).eval().double()
        if max(_rounding(exact, each) for each in answers) < ROUNDING:
            return Reference(folder, answers)
    raise AssertionError(f"no weights for which fp32 and fp64 agree: {name}")


@torch.no_grad()
def draw_weights(model: torch.nn.Module) -> None:
    """Draw weights so large that attention, selection and indexer decide which tokens follow."""
    for name, weight in model.named_parameters():
        if "norm" not in name:
            scale = 2 if "w_q" in name or "q_proj" in name else 1
            weight.copy_(torch.randn_like(weight) * scale * weight.shape[-1] ** -0.5)


@torch.no_grad()
def add_adapter(folder: Path, model: Any, layers: tuple[str, ...]) -> None:
    """Draw an adapter (LoRA) of layers by their last names, save it, and add it to the model's weights."""
    tensors: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if name.rpartition(".")[2] in layers:
            a = torch.randn(4, layer.in_features) * layer.in_features**-0.5
            b = torch.randn(layer.out_features, 4) / 4
            layer.weight += b @ a
            tensors |= {f"base_model.model.{name}.lora_{x}.weight": weight for x, weight in (("A", a), ("B", b))}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 4, "target_modules": layers}))


def answer(model: Any, prompt: Tensor) -> Answer:
    """Continue a prompt by the likeliest tokens."""
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "attention_mask": torch.ones_like(prompt)[None]}
    out = model.generate(prompt[None], return_dict_in_generate=True, output_logits=True, **options)
    new = out.sequences[0, len(prompt) :]
    logs = torch.stack(out.logits)[:, 0].log_softmax(-1).gather(1, new[:, None])[:, 0]
    return Answer(prompt.tolist(), new.tolist(), logs.tolist())


@torch.no_grad()
def _rounding(exact: Any, said: Answer) -> float:
    """Return how far the logarithms are from those of a model in fp64, which reads all tokens at once."""
    tokens = torch.tensor([said.prompt + said.tokens])
    logs = exact(tokens[:, :-1], use_cache=False).logits[0, len(said.prompt) - 1 :].log_softmax(-1)
    return float((logs.gather(1, tokens[0, len(said.prompt) :, None])[:, 0] - torch.tensor(said.logs)).abs().max())
