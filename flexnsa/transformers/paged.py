"""Continuous batching of transformers (``generate_batch``): new tokens of many requests, and the pages of their keys.

A pass has one sequence, in which the new tokens of each request follow those of another. Its cache hands out the keys
of the same requests in the same order, one request after the other: to NSA these are packed documents, of which only
the last tokens are queries. Requests come, go and share pages as transformers arranges it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from threading import Lock
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from flexnsa.config import NSAConfig, num_compressed
from flexnsa.masks.document import document_positions, first_tokens
from flexnsa.primitives import describe
from flexnsa.transformers.choice import NAME
from flexnsa.transformers.local_layers import LOCAL, PLAIN, attend_as, layer_type, local_attention
from flexnsa.transformers.options import DropInOptions
from flexnsa.transformers.softmax import Softmax, attend_to_own_keys

SWITCH, START = "switch_to_cb_friendly_attn", "init_continuous_batching"
"""What chooses the attention of continuous batching, and knows transformers' own only; and what of a model calls it."""
_STARTING = Lock()


def serve_requests(model: Any) -> None:
    """Make continuous batching of a model keep flexnsa, which it would refuse, or replace by a dense attention."""
    if hasattr(ContinuousBatchingManager, SWITCH) and hasattr(model, START):
        setattr(model, START, _Start(model))


class _Start:
    """Starts continuous batching of a model, whose memory it does not hold; a copy of the model has its own."""

    def __init__(self, model: Any) -> None:
        self.model = ref(model)

    def __reduce__(self) -> Any:
        return _Start, (self.model(),)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Start it; transformers' class has another method for as long as the manager is made."""
        model, manager = self.model(), cast("Any", ContinuousBatchingManager)
        with _STARTING:
            switch = getattr(manager, SWITCH)
            setattr(manager, SWITCH, partialmethod(_switch, switch))
            try:
                return getattr(type(model), START)(model, *args, **kwargs)
            finally:
                setattr(manager, SWITCH, switch)


def _switch(manager: Any, switch: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> None:
    if model.config._attn_implementation != NAME:
        switch(manager, model, *args, **kwargs)


def attend_to_pages(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Attend from the new tokens of several requests to the keys that each has in a paged cache.

    Query ``(1, Hq, T, Dk)`` is of new tokens. Key ``(1, Hkv, S, Dk)``, both rotated, and value ``(1, Hkv, S, Dv)`` are
    of all; before transformers 5.24 of new ones, with the cache that returns all. ``cu_seq_lens_q (R + 1,)`` comes from
    the model, ``cu_seq_lens_k (R + 1,)`` and ``max_length_k`` of the layer from the cache.

    Raises:
        ValueError: the cache would have a kernel read its pages.
    """
    if kwargs.get("block_table") is not None:
        raise ValueError(f"block_table: expected None with {NAME}, got {describe(kwargs['block_table'])}")
    if (cache := kwargs.pop("cache", None)) is not None:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    elif isinstance(kwargs["cu_seq_lens_k"], dict):  # a layer that reads another's keys updates no cache
        kwargs |= {name: kwargs[name][layer_type(module)] for name in ("cu_seq_lens_k", "max_length_k")}
    queries, keys = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
    token = torch.arange(query.shape[2], device=query.device)
    request = _requests(queries, query.shape[2])
    token = token - queries[request + 1] + keys[request + 1]  # the last token of a request is its last key
    documents = _requests(keys, key.shape[2])
    softmax = Softmax(scaling, kwargs.get("softcap"), kwargs.get("s_aux"), getattr(module, "choose_blocks", None))
    if layer_type(module) in LOCAL:
        distance = token[:, None] - torch.arange(len(documents), device=token.device)
        mask = (request[:, None] == documents) & (distance >= 0) & (distance < kwargs["sliding_window"])
        name = local_attention(module.config)
        if name not in PLAIN:
            raise ValueError(f"local: expected one of {PLAIN} in continuous batching, got {name!r}")
        if name == "eager":
            mask = query.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(query.dtype).min)
        return attend_as(name, module, query, key, value, mask[None, None], scaling=scaling, **kwargs)
    options = DropInOptions.of(module.config)
    positions = document_positions(documents[None], options.sizes)
    firsts = first_tokens(positions, num_compressed(key.shape[2], options.sizes), options.sizes)

    def compress(x: Tensor) -> Tensor:
        return average_pages(x, firsts[0], options.sizes)

    query_positions = replace(positions.at_tokens(token), longest=kwargs.get("max_length_k"))
    out = attend_to_own_keys(query, key, value, compress, query_positions, softmax, options, cached=False)
    return out.transpose(1, 2).contiguous(), None


def _requests(starts: Tensor, count: int) -> Tensor:
    """Return the request of each of ``count`` tokens, int64 ``(count,)``; what follows the last one belongs to it."""
    token = torch.arange(count, dtype=starts.dtype, device=starts.device)
    return torch.searchsorted(starts[1:], token, right=True).clamp_max(len(starts) - 2)


def average_pages(x: Tensor, first_tokens: Tensor, sizes: NSAConfig) -> Tensor:
    """Average the blocks of ``x (1, Hkv, S, D)`` that start at ``first_tokens (N,)``, without storing them.

    An embedding bag has no second derivative and no forward one, which serving does not need.
    """
    _, heads, num_tokens, dim = x.shape
    rows = x.transpose(1, 2).reshape(num_tokens, heads * dim)  # the heads of a token lie together in a page
    blocks = first_tokens[:, None] + torch.arange(sizes.compress_block_size, device=x.device)
    return F.embedding_bag(blocks, rows, mode="mean").view(1, -1, heads, dim).transpose(1, 2)
