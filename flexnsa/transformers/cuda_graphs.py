"""``generate`` with a CUDA graph, because launching the kernels of a small step takes longer than running them.

For caches with fixed memory, transformers compiles the steps after the prompt. A cache of NSA layers has fixed memory,
so at that point in ``generate`` a step is captured instead: nothing is compiled, and one graph serves all lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from flexnsa.config import NSAConfig
from flexnsa.layers.projection import has_no_hooks, is_dense
from flexnsa.operators.graphs import Step, capture
from flexnsa.transformers.cache import CACHE, FlexNSACache, take_cache
from flexnsa.transformers.rotary import looks_at_positions

NextLogits = Callable[[Tensor, FlexNSACache, Tensor], Tensor]
"""Tokens ``(B, 1)``, a cache, and int32 ``(B,)``, 1 for real tokens, 0 for padding, to logits ``(B, 1, vocab)``."""
DEVICES = ["cuda"]
"""Device types with graphs."""
SETTINGS = (bool, int, float, str, tuple, NSAConfig)
"""Types of the attributes that decide what a module computes."""
WITHOUT_EFFECT = {"position_ids", "cache_position", "use_cache", "return_dict", "logits_to_keep"}
"""Arguments of a forward pass that have no effect on one token per sequence."""


class CapturedStep:
    """A captured step of one token per sequence. It needs the model's and the cache's memory, not the objects.

    Args:
        next_logits: the function to capture. It writes to the cache.
        cache: with tokens in it already, and capacity for one more per sequence.
        place: the memory addresses and settings that it is captured with.
    """

    def __init__(self, next_logits: NextLogits, cache: FlexNSACache, place: object) -> None:
        lengths = cache.kept[0].lengths
        self.place = place
        self._tokens = torch.zeros(len(lengths), 1, dtype=torch.int64, device=lengths.device)
        self._num_valid = torch.zeros_like(lengths)  # so that the calls during capture append no token
        self._logits: Tensor | None = None

        def step() -> None:
            seen = cache.seen
            try:
                self._logits = next_logits(self._tokens, cache, self._num_valid)
            finally:
                cache.seen = seen  # __call__ of CapturedModel counts

        advice = "disable_compile: expected True for a model whose steps cannot be captured in a CUDA graph"
        self._replay: Step = capture(step, lengths.device, advice=advice)

    def __call__(self, tokens: Tensor, num_valid: Tensor | None) -> Tensor:
        """Append new tokens, where ``num_valid (B,)`` is not 0, and return the logits ``(B, 1, vocab)``."""
        self._tokens.copy_(tokens)
        self._num_valid.fill_(1) if num_valid is None else self._num_valid.copy_(num_valid != 0)
        self._replay()
        assert self._logits is not None
        return self._logits.clone()


class CapturedModel:
    """A model as ``generate`` calls it: one token per sequence replays a graph, which is stored in the cache."""

    def __init__(self, model: Any, next_logits: NextLogits) -> None:
        self._model, self._next_logits = model, next_logits
        self._weights = [x.data_ptr() for x in chain(model.parameters(), model.buffers())]
        self._settings = settings(model)

    def __call__(self, **inputs: Any) -> Any:
        """Call the model, or replay its captured step."""
        cache = take_cache(inputs, inputs.pop("cache", None))
        tokens, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        others = inputs.keys() - WITHOUT_EFFECT - {"input_ids", "attention_mask"}
        asks_more = any(inputs[name] is not None and inputs[name] is not False for name in others)
        if asks_more or not _fits(tokens, cache, mask):
            return self._model(**inputs, **{CACHE: cache})
        assert isinstance(tokens, Tensor)
        assert isinstance(cache, FlexNSACache)
        buffers = (x for nsa in cache.kept for x in (nsa.lengths, nsa.reached, *nsa.buffers.values()))
        place = self._weights, self._settings, [x.data_ptr() for x in buffers]  # others with more capacity or rows
        if cache.captured is None or cache.captured.place != place:
            cache.captured = None  # frees its memory before the next is captured
            cache.captured = CapturedStep(self._next_logits, cache, place)
        logits = cache.captured(tokens, None if mask is None else mask[:, -1])
        cache.seen += 1
        return CausalLMOutputWithPast(logits=logits, **cast("Any", {CACHE: cache}))


def can_capture(model: nn.Module) -> bool:
    """Return whether a graph can replace calls of a model: it is on one device with graphs, and has no hooks."""
    tensors = list(chain(model.parameters(), model.buffers()))
    if tensors[0].device.type not in DEVICES or not all(x.device == tensors[0].device and is_dense(x) for x in tensors):
        return False
    return all(has_no_hooks(module) and not looks_at_positions(module) for module in model.modules())


def settings(model: Any) -> str:
    """Return all non-tensor settings of a model as a string: a graph keeps those that it was captured with."""
    values = (value for module in model.modules() for value in vars(module).values() if isinstance(value, SETTINGS))
    return repr([getattr(model.config, "flexnsa", None), *values])


def _fits(tokens: Any, cache: Any, mask: Any) -> bool:
    """Return whether this is one token per sequence, on a cache that is not empty and need not grow for it."""
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.shape[1] != 1:
        return False
    if not isinstance(cache, FlexNSACache) or torch.is_autocast_enabled(tokens.device.type):
        return False
    if len(cache.kept) < len(cache.layers) or cache.seen == 0:
        return False
    if mask is not None and tuple(mask.shape) != (len(tokens), cache.seen + 1):
        return False  # the model raises the error
    return all(nsa.batch_size == len(tokens) and cache.seen < nsa.max_seq_len for nsa in cache.kept)
