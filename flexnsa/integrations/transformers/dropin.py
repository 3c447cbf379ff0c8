"""``attn_implementation="flexnsa"``: NSA in a model that knows nothing of it, with the model's own keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from flexnsa.attention.implementations import attend, choose_implementation
from flexnsa.attention.seam import Call, Keys
from flexnsa.geometry import num_compressed
from flexnsa.integrations.transformers.choice import NAME, check_choice_counts
from flexnsa.integrations.transformers.marks import Alignment, check_marks, mark_slots
from flexnsa.integrations.transformers.options import DropInOptions
from flexnsa.integrations.transformers.packs import demand_no_pack, demand_one_document, document_begins, document_ids
from flexnsa.layers.compression import average_blocks, average_kept_blocks
from flexnsa.masks.document import document_positions, first_tokens
from flexnsa.positions import Positions
from flexnsa.validation import describe

REFUSED = ("sliding_window", "softcap", "s_aux", "position_bias")
"""What some models pass to their attention, and NSA here does not do."""


def make_mask(*args: Any, config: Any = None, **kwargs: Any) -> Tensor | None:
    """As :func:`mark_slots`; and, except inside of a compiler, see to it that the marks go to this attention."""
    if config is not None and not torch.compiler.is_compiling():
        check_choice_counts(config)
    return mark_slots(*args, **kwargs)


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
) -> tuple[Tensor, None]:
    """Attend as transformers asks its attention to, by the options in ``module.config.flexnsa``.

    Args:
        module: of the model; its ``config`` says how to attend, see :class:`DropInOptions`.
        query: ``(B, Hq, T, Dk)``, turned.
        key: ``(B, Hkv, S, Dk)``, turned, those of a cache included.
        value: ``(B, Hkv, S, Dv)``.
        attention_mask: marks ``(B, 1, 1, S)``, see :mod:`flexnsa.integrations.transformers.marks`.
        scaling: factor on the scores, by default ``Dk ** -0.5``.
        dropout: has to be 0.
        position_ids: int ``(B or 1, T)``: packed documents are told by positions that begin anew.
        cu_seq_lens_q: int ``(D + 1,)``, where the documents of a single packed row begin.
        kwargs: whatever else the model passes; what would be ignored is refused.

    Returns:
        ``(B, T, Hq, Dv)``, and None in the place of probabilities.

    Raises:
        TypeError: an option is not of its kind.
        ValueError: the model asks for what NSA does not do, or an option does not fit; the message names it.
    """
    _check(module, dropout, kwargs)
    check_marks(attention_mask, len(key), key.shape[2])
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast, norms of them give float32
    options, num_queries = DropInOptions.of(module.config), query.shape[2]
    alignment, real = None, None
    if attention_mask is not None:
        alignment = Alignment.of(attention_mask, num_queries)
        real = alignment.real
        query = alignment.align_queries(query, dim=2)
        key, value = alignment.align_keys(key), alignment.align_keys(value)
        if position_ids is not None:
            position_ids = alignment.align_queries(position_ids.expand(len(query), -1), dim=1)
    begins = document_begins(position_ids, num_queries, real)
    if num_queries == key.shape[2]:
        documents = document_ids(begins, cu_seq_lens_q, len(query), num_queries)
        out = _attend_rows(query, key, value, documents, scaling, options)
    else:
        demand_no_pack(begins, cu_seq_lens_q)
        positions = _kept_positions(query, key, alignment)
        demand_one_document(position_ids, positions.token[:, :1], real)
        out = _attend_kept(query, key, value, positions, scaling, options)
    out = out.transpose(1, 2)
    return (out if alignment is None else alignment.restore_queries(out, dim=1)), None


def _attend_rows(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float | None, options: DropInOptions
) -> Tensor:
    """Attend within whole rows, or within the documents ``(B, S)`` of packed ones."""
    positions = firsts = None
    if documents is not None:
        positions = document_positions(documents, options.sizes)
        firsts = first_tokens(positions, num_compressed(k.shape[2], options.sizes), options.sizes)

    def compress(x: Tensor) -> Tensor:
        return average_blocks(x, firsts, options.sizes)

    return _attend(q, k, v, compress, positions, scale, options, cached=False)


def _kept_positions(q: Tensor, k: Tensor, alignment: Alignment | None) -> Positions:
    """Say where the last tokens of rows stand, or some that further slots of the keys are still waiting behind."""
    if alignment is None:
        positions = Positions.of_sequence(k.shape[2], k.device).at(slice(-q.shape[2], None))
        return positions.map(lambda x: x.expand(len(q), -1).contiguous())
    zero = torch.zeros_like(alignment.token)
    return Positions(alignment.token, zero, zero)


def _attend_kept(
    q: Tensor, k: Tensor, v: Tensor, positions: Positions, scale: float | None, options: DropInOptions
) -> Tensor:
    """Attend from tokens at these positions to the keys of a cache."""

    def compress(x: Tensor) -> Tensor:
        return F.pad(average_kept_blocks(x, options.sizes), (0, 0, 0, 1))  # there is always one, be it seen by nobody

    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return _attend(q, k, v, compress, positions, scale, options, cached=not trains)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    compress: Callable[[Tensor], Tensor],
    positions: Positions | None,
    scale: float | None,
    options: DropInOptions,
    *,
    cached: bool,
) -> Tensor:
    """Attend to one set of keys and values in all branches."""
    k_cmp = compress(k) if {"cmp", "slc"} & {*options.branches} else None
    v_cmp = compress(v) if "cmp" in options.branches else None
    implementation = choose_implementation(options.impl, q, modded=False, cached=cached)
    gates = torch.cat([q.new_full((1,), gate) for gate in options.gates]).expand(*q.shape[:3], -1)
    factor = q.shape[3] ** -0.5 if scale is None else scale
    call = Call(options.sizes, factor, None, positions, positions)
    return attend(implementation, q, Keys(k_cmp, v_cmp, k, v, k, v), gates, call, branches=options.branches)[0]


def _check(module: nn.Module, dropout: float, others: dict[str, Any]) -> None:
    """Demand nothing of the attention that would be ignored.

    Raises:
        ValueError: there is something.
    """
    config: Any = module.config
    for name in REFUSED:
        if others.get(name) is not None:
            raise ValueError(f"{name}: expected None with attn_implementation={NAME!r}, got {describe(others[name])}")
    if dropout:
        raise ValueError(f"attention_dropout: expected 0 with attn_implementation={NAME!r}, got {describe(dropout)}")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ValueError(f"is_causal: expected True with attn_implementation={NAME!r}, got False")
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds is not None and layer is not None and kinds[layer] != "full_attention":
        raise ValueError(
            f"layer_types: expected 'full_attention' in layer {layer} with attn_implementation={NAME!r}, "
            f"got {kinds[layer]!r}"
        )
    own = config._attn_implementation
    if ALL_MASK_ATTENTION_FUNCTIONS.get(own) is not make_mask:
        raise ValueError(
            f"attn_implementation: expected {NAME!r}, whose mask tells of padding, got {own!r}, whose mask does not"
        )
