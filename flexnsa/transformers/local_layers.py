"""Which layers NSA acts on, those with full causal attention, and how sliding and chunked layers attend beside them.

The config's ``layer_types`` tell layers apart. Sliding and chunked ones attend as in a model without NSA.

A model has one ``attn_implementation`` for all of its layers. Where that is one of ours, the mask of a local layer is
made by another one, which then computes its attention: the one that ``config.flexnsa`` names as ``local``, by default
``sdpa``, or ``eager`` where the model does not support that.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from flexnsa.primitives import check_choice, describe
from flexnsa.transformers.mask_functions import MaskFunction, is_local, make_padding_mask
from flexnsa.transformers.padding import Rows

FULL = ("full_attention", "hybrid")
"""Layers that attend to all tokens before; hybrid ones have a recurrent layer beside that."""
LOCAL = ("sliding_attention", "chunked_attention")
"""Layers that attend to some of the last tokens. They are left to the attention that the model has without NSA."""
MSA, QSA = "minimax_m3_sparse", "indexed_attention"
SELECTING = {MSA: "index_block_size", QSA: "indexer_compress_ratio"}
"""Layers that select blocks as NSA can, and a size that models without have not. These become NSA; full ones stay."""
WITHOUT = ("linear_attention", "conv", "moe", "mlp")
"""Layers without attention."""
PLAIN = ("eager", "sdpa")
"""Attention whose mask is a tensor ``(B, 1, T, S)``, of truth values or of terms of the scores."""


def layer_type(module: Any) -> str:
    """Return the type of an attention module's layer; full attention where the config does not tell layers apart."""
    types, index = layer_types(module.config), getattr(module, "layer_idx", None)
    return FULL[0] if index is None or index >= len(types) else types[index]


def layer_types(config: Any) -> list[str]:
    """Return the type of each layer; none where the config does not tell layers apart."""
    return list(getattr(config, "layer_types", None) or ())


def nsa_types(config: Any) -> tuple[str, ...]:
    """Return the types of the layers that are NSA in a converted model."""
    types = layer_types(config)
    return tuple(kind for kind, size in SELECTING.items() if kind in types and getattr(config, size, None)) or FULL


def check_layer_types(config: Any, purpose: str) -> None:
    """Check that NSA knows all types of a model's layers, and that some layers have full attention.

    Raises:
        ValueError: it does not, or none has; ``purpose`` says what for.
    """
    types = layer_types(config)
    unknown = [kind for kind in types if kind not in FULL + LOCAL + WITHOUT]
    if unknown or (types and not {*types} & {*FULL}):
        expected = f"some of {', '.join(FULL + LOCAL + WITHOUT)}" if unknown else f"some {FULL[0]!r}"
        raise ValueError(f"layer_types: expected {expected} {purpose}, got {describe(sorted({*(unknown or types)}))}")


def local_attention(config: Any) -> str:
    """Return the name of the attention of a model's local layers."""
    options = getattr(config, "flexnsa", None) or {}
    name = options.get("local")
    check_local(name)
    return name or _default_attention(type(config))


def check_local(name: Any) -> None:
    """Check that a name is that of an attention of transformers, with a mask, or None."""
    if name is not None:
        known = ("eager", *(name for name in ALL_ATTENTION_FUNCTIONS if name in ALL_MASK_ATTENTION_FUNCTIONS))
        check_choice("local", name, tuple(name for name in known if not name.startswith("flexnsa")))


@torch.compiler.assume_constant_result
def _default_attention(config_class: type) -> str:
    model_class: Any = MODEL_MAPPING.get(config_class, None)  # pyright: ignore[reportArgumentType]
    return "sdpa" if getattr(getattr(model_class, "dense_class", model_class), "_supports_sdpa", True) else "eager"


def make_layer_mask(
    *,
    config: Any = None,
    local_size: int | None = None,
    mask_function: MaskFunction = causal_mask_function,
    **kwargs: Any,
) -> Any:
    """Return :func:`make_padding_mask`, or the mask of local layers where the config says which layers these are."""
    kwargs |= {"config": config, "local_size": local_size, "mask_function": mask_function}
    if layer_types(config) and (local_size is not None or is_local(mask_function)):
        if kwargs.get("dtype") == torch.float64:  # eager layers put scores in float32, where its least is infinite
            kwargs["dtype"] = torch.float32
        make = ALL_MASK_ATTENTION_FUNCTIONS[local_attention(config)]
        return make(**kwargs | {"allow_is_causal_skip": False})  # so that no mask is that of full attention
    return make_padding_mask(**kwargs)


def attend_locally(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Compute the attention of a local layer, with the signature of transformers' attention functions.

    The mask is from :func:`make_layer_mask`. ``position_ids`` and ``cu_seq_lens_q`` tell of packed documents, of which
    transformers does not find all.

    Raises:
        ValueError: the mask is another one, or the layer's attention cannot do what the model asks for.
    """
    config: Any = module.config
    name, shape = local_attention(config), (query.shape[0], query.shape[2], key.shape[2])
    documents = Rows.of(None, kwargs.get("position_ids"), kwargs.get("cu_seq_lens_q"), shape).documents
    if name in PLAIN:
        shape = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else ()
        if len(shape) != 4 or shape[2:] != (query.shape[2], key.shape[2]) or attention_mask.dtype == torch.int8:
            expected = "that of a sliding or chunked layer, with a value for each query and key"
            raise ValueError(f"attention_mask: expected {expected}, got {describe(attention_mask)}")
        if documents is not None:
            chunked = layer_type(module) == "chunked_attention"
            attention_mask = _within(documents, attention_mask, config.attention_chunk_size if chunked else None)
    elif documents is not None:
        raise ValueError(f"position_ids: expected one document in a sequence with local={name!r}, got several")
    return attend_as(name, module, query, key, value, attention_mask, **kwargs)


def attend_as(
    name: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Compute attention by that of transformers of this name.

    Raises:
        ValueError: it cannot do what the model asks for.
    """
    if name == "sdpa" and kwargs.get("s_aux") is not None:
        raise ValueError("local: expected an attention that takes attention sinks, such as 'eager', got 'sdpa'")
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    attend: Any = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)  # pyright: ignore[reportArgumentType]
    return attend(module, query, key, value, attention_mask, **kwargs)


def _within(documents: Tensor, mask: Tensor, chunk_size: int | None) -> Tensor:
    """Restrict a mask to documents; chunks start anew with each, and behind padding."""
    allowed = (mask if mask.dtype == torch.bool else mask == 0)[:, 0]
    is_real = allowed.any(1).expand(len(documents), -1)  # padding is seen by no query
    token = torch.arange(documents.shape[1], device=documents.device)
    seen = documents[:, :, None] == documents[:, None]
    if chunk_size is None:
        seen = seen & allowed
    else:
        starts = F.pad(documents.diff(dim=1) != 0, (1, 0), value=True) | (is_real & ~F.pad(is_real[:, :-1], (1, 0)))
        chunk = (token - torch.where(starts, token, 0).cummax(1).values) // chunk_size
        seen = seen & (chunk[:, :, None] == chunk[:, None]) & (token[:, None] >= token) & is_real[:, None]
    if mask.dtype == torch.bool:
        return seen[:, None]
    return mask.new_zeros(seen.shape).masked_fill(~seen, torch.finfo(mask.dtype).min)[:, None]
