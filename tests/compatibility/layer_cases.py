"""Layers and models, said with public names only: packed, modded, recomputed in backward, and token by token.

Weights are drawn by parameter name, not by the layers themselves, so that the order of construction is free.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from flexnsa import NativeSparseAttention, NSAConfig, mods
from flexnsa.lm import DecoderConfig, DecoderLM, Sampling

SMALL = NSAConfig(compress_block_size=8, compress_stride=4, select_block_size=16, num_selected_blocks=4, window_size=24)
MODEL = {"dim": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "vocab_size": 32, "nsa": SMALL}
LENGTH = 130


def draw_weights(module: nn.Module, scale: float = 0.3) -> None:
    """Fill every parameter from a generator that its name seeds."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            generator = torch.Generator().manual_seed(sum(name.encode()))
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.1 * drawn if parameter.dim() == 1 else scale * drawn)


def layer_of_whole_rows(impl: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The paper's layer, Dk != Dv."""
    layer, x = _layer(impl, dtype, v_head_dim=12)
    return _forward_and_backward(layer, x, layer(x))


def layer_of_packed_rows(impl: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Documents, linear compression, softmax gates."""
    layer, x = _layer(impl, dtype, compression="linear", gate="softmax")
    documents = (torch.arange(LENGTH) >= 50).int() + (torch.arange(LENGTH) >= 57).int()
    return _forward_and_backward(layer, x, layer(x, document_ids=documents.expand(len(x), -1)))


def layer_with_mods(impl: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """A score mod and a mask mod, mean compression."""
    layer, x = _layer(impl, dtype, compression="mean")
    out = layer(x, score_mod=mods.alibi(mods.alibi_slopes(4).to(dtype)), mask_mod=mods.prefix_lm(10, 60))
    return _forward_and_backward(layer, x, out)


def layer_without_compressed_branch(impl: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Blocks are scored by means of the selected branch's own keys."""
    layer, x = _layer(impl, dtype, branches=("slc", "win"))
    return _forward_and_backward(layer, x, layer(x))


def layer_token_by_token(impl: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """A prompt, then chunks of several sizes, into a cache; then one step back, and padding in the second row."""
    layer, x = _layer(impl, dtype)
    cache = layer.new_cache(len(x), LENGTH)
    with torch.no_grad():
        chunks = x.split([60, 1, 1, 7, 1, 20, 1, 1, 38], dim=1)
        found = {f"chunk {index}": layer(chunk, cache=cache) for index, chunk in enumerate(chunks)}
        cache.crop(LENGTH - 1)
        found["last token again"] = layer(x[:, -1:], cache=cache, lengths=torch.tensor([1, 0]))[:1]
    return found


def model_recomputed_in_backward(impl: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """A training step with activation checkpointing."""
    model = _model(impl, dtype, checkpointing=True).train()
    tokens = torch.arange(2 * LENGTH).mul(7).remainder(31).view(2, LENGTH)
    logits = model(tokens)
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1).flatten()).backward()
    return {"logits": logits.detach(), **_gradients(model)}


def model_greedy(impl: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Forty tokens behind two prompts of different lengths."""
    model = _model(impl, dtype).eval()
    prompts = torch.arange(2 * 50).mul(11).remainder(29).view(2, 50)
    rows = model.generate(prompts, 40, lengths=torch.tensor([50, 37]), sampling=Sampling(temperature=0))
    return {"tokens": torch.tensor(rows)}


LAYER_CASES: dict[str, Callable[[str, torch.dtype], dict[str, Tensor]]] = {
    case.__name__.replace("_", " "): case
    for case in (
        layer_of_whole_rows,
        layer_of_packed_rows,
        layer_with_mods,
        layer_without_compressed_branch,
        layer_token_by_token,
        model_recomputed_in_backward,
        model_greedy,
    )
}


def _layer(impl: str, dtype: torch.dtype, **options: object) -> tuple[NativeSparseAttention, Tensor]:
    layer = NativeSparseAttention(24, 4, 2, 8, config=SMALL, impl=impl, **options).to(dtype)  # pyright: ignore[reportArgumentType]
    draw_weights(layer)
    x = torch.randn(2, LENGTH, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return layer, x.to(dtype).requires_grad_()


def _model(impl: str, dtype: torch.dtype, **options: object) -> DecoderLM:
    model = DecoderLM(DecoderConfig(**MODEL, impl=impl, **options)).to(dtype)  # pyright: ignore[reportArgumentType]
    draw_weights(model)
    return model


def _forward_and_backward(layer: nn.Module, x: Tensor, out: Tensor) -> dict[str, Tensor]:
    out.square().sum().backward()
    assert x.grad is not None
    return {"out": out.detach(), "gradient of x": x.grad, **_gradients(layer)}


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    return {f"gradient of {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
