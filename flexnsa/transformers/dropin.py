"""``attn_implementation="flexnsa"``: NSA in an unchanged model, with the model's own keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from flexnsa.config import num_compressed
from flexnsa.layers.compression import average_blocks, average_cached_blocks
from flexnsa.masks.document import document_positions, first_tokens
from flexnsa.masks.positions import Positions
from flexnsa.primitives import describe
from flexnsa.transformers.choice import NAME
from flexnsa.transformers.local_layers import LOCAL, attend_locally, layer_type, make_layer_mask
from flexnsa.transformers.options import DropInOptions
from flexnsa.transformers.padding import Rows
from flexnsa.transformers.paged import attend_to_pages
from flexnsa.transformers.softmax import Softmax, attend_to_own_keys
from flexnsa.transformers.unsupported import PURPOSE, check_config, refuse_attentions, takes_positions

REFUSED = ("sliding_window", "position_bias")
"""Arguments that some models pass to their attention, and that raise here: NSA does not support them."""


def make_mask(*, config: Any = None, **kwargs: Any) -> Any:
    """Return :func:`make_layer_mask`, after checking, outside ``torch.compile``, that NSA can act in the model."""
    if config is not None and not torch.compiler.is_compiling():
        check_config(config)
    return make_layer_mask(config=config, **kwargs)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Compute attention with the signature of transformers' attention functions.

    Layers with sliding or chunked attention attend as they do without NSA. In continuous batching keys come from pages.

    Args:
        module: layer of the model, whose ``config.flexnsa`` has the options, see :class:`DropInOptions`.
        query: ``(B, Hq, T, Dk)``, rotated.
        key: ``(B, Hkv, S, Dk)``, rotated, those of a cache included.
        value: ``(B, Hkv, S, Dv)``.
        attention_mask: see :mod:`flexnsa.transformers.mask_functions`.
        scaling: factor on the scores, by default ``Dk ** -0.5``.
        dropout: must be 0.
        position_ids: int ``(B or 1, T)``, or ``(A, B or 1, T)`` with image axes: if the mask has no documents, one
            starts wherever a position is lower than the one before.
        cu_seq_lens_q: int ``(D + 1,)``, the starts of the documents of a single packed sequence.
        kwargs: other arguments of the model: ``softcap``, the limit of the scores, and ``s_aux (Hq,)``, a sink for each
            head. Others that change the attention raise.

    Returns:
        ``(B, T, Hq, Dv)``, contiguous, and None instead of probabilities.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: the model asks for something that NSA does not support, or an option does not fit; the message
            names it.
    """
    _check_model(module, position_ids)
    if kwargs.get("read_index") is not None or kwargs.get("block_table") is not None:  # of continuous batching
        if layer_type(module) not in LOCAL:
            _check(module, dropout, kwargs)
        return attend_to_pages(module, query, key, value, scaling=scaling, cu_seq_lens_q=cu_seq_lens_q, **kwargs)
    if layer_type(module) in LOCAL:
        kwargs |= {"position_ids": position_ids, "cu_seq_lens_q": cu_seq_lens_q}
        return attend_locally(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    _check(module, dropout, kwargs)
    shape = key.shape[0], query.shape[2], key.shape[2]  # len() would make a constant of it in an export
    rows = Rows.of(attention_mask, position_ids, cu_seq_lens_q, shape)
    softmax = Softmax(scaling, kwargs.get("softcap"), kwargs.get("s_aux"), getattr(module, "choose_blocks", None))
    return attend_in_rows(query, key, value, rows, softmax, DropInOptions.of(module.config)), None


def attend_in_rows(
    query: Tensor, key: Tensor, value: Tensor, rows: Rows, softmax: Softmax, options: DropInOptions
) -> Tensor:
    """Attend from new tokens, laid out as ``rows``, to a model's own keys; see :func:`attention_forward`."""
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast, their norms return float32
    query, key, value = rows.align(query, dim=2), rows.align_keys(key), rows.align_keys(value)
    sizes, positions, firsts = options.sizes, None, None
    if rows.cached:
        if rows.positions is None:  # new tokens are the last keys
            positions = Positions.of_sequence(key.shape[2], key.device).at(slice(-query.shape[2], None))
            positions = positions.map(lambda x: x.expand(query.shape[0], -1).contiguous())
        else:
            positions = Positions(rows.positions, *[torch.zeros_like(rows.positions)] * 2)
        rows.check_positions(positions.token[:, :1])
    elif rows.documents is not None:
        positions = document_positions(rows.documents, sizes)
        firsts = first_tokens(positions, num_compressed(key.shape[2], sizes), sizes)

    def compress(x: Tensor) -> Tensor:
        if rows.cached:
            return F.pad(average_cached_blocks(x, sizes), (0, 0, 0, 1))  # one at least, which no query may see
        return average_blocks(x, firsts, sizes)

    cached = rows.cached and not (torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)))
    out = attend_to_own_keys(query, key, value, compress, positions, softmax, options, cached=cached)
    return rows.restore(out.transpose(1, 2), dim=1).contiguous()  # some models take a view of it


def _check(module: nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    """Check that the model asks for nothing that would be ignored."""
    refuse_attentions(module.config, kwargs)
    for name in REFUSED:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: expected None {PURPOSE}, got {describe(kwargs[name])}")
    if dropout:
        raise ValueError(f"attention_dropout: expected 0 {PURPOSE}, got {describe(dropout)}")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ValueError(f"is_causal: expected True {PURPOSE}, got False")


def _check_model(module: nn.Module, position_ids: Tensor | None) -> None:
    """Check that the model makes its masks for this attention, and has a use for ``position_ids``."""
    config: Any = module.config
    if position_ids is not None and not takes_positions(type(config)):
        expected = "None for a model that has no such argument"
        raise ValueError(f"position_ids: expected {expected}, got {describe(position_ids)}")
    chosen = config._attn_implementation
    if ALL_MASK_ATTENTION_FUNCTIONS.get(chosen) is not make_mask:
        got = f"{chosen!r}, whose mask does not"
        raise ValueError(f"attn_implementation: expected {NAME!r}, whose mask marks padding, got {got}")
