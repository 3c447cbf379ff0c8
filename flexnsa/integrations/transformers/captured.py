"""``generate`` with a CUDA graph: the host takes longer to launch a step of few tokens than a GPU to compute it.

transformers compiles the tokens behind a prompt where a cache stays where it is in memory. A cache of NSA layers does,
so there the same place in ``generate`` captures a step instead: nothing is compiled, and one graph serves all lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from flexnsa.config import NSAConfig
from flexnsa.integrations.transformers.attention import looks_at_positions
from flexnsa.integrations.transformers.cache import FlexNSACache
from flexnsa.layers.projection import has_no_hooks, is_dense
from flexnsa.models.steps import Step, capture

NextLogits = Callable[[Tensor, FlexNSACache, Tensor], Tensor]
"""Of tokens ``(B, 1)``, a cache and how many of a row's are real, 0 or 1, int32 ``(B,)``: logits ``(B, 1, vocab)``."""
DEVICES = ["cuda"]
"""That have graphs."""
SETTINGS = (bool, int, float, str, tuple, NSAConfig)
"""Types of attributes that say how a module computes."""
WITHOUT_EFFECT = {"position_ids", "cache_position", "use_cache", "return_dict", "logits_to_keep"}
"""Arguments of a forward pass that change nothing about one token a row."""


class CapturedStep:
    """A token for each row of one cache; what it was captured from may go, as long as the memory stays.

    Args:
        next_logits: what to capture. It writes to the cache.
        cache: whose rows hold tokens already, and have room for one more.
        place: says where in memory everything lies, and by which settings it was captured.
    """

    def __init__(self, next_logits: NextLogits, cache: FlexNSACache, place: object) -> None:
        lengths = cache.kept[0].lengths
        self.place = place
        self._tokens = torch.zeros(len(lengths), 1, dtype=torch.int64, device=lengths.device)
        self._real = torch.zeros_like(lengths)  # of the calls that are captured: they keep no token
        self._logits: Tensor | None = None

        def step() -> None:
            seen = cache.seen
            try:
                self._logits = next_logits(self._tokens, cache, self._real)
            finally:
                cache.seen = seen  # whoever replays it counts

        advice = "disable_compile: expected True for a model whose steps no CUDA graph holds"
        self._replay: Step = capture(step, lengths.device, advice=advice)

    def __call__(self, tokens: Tensor, real: Tensor | None) -> Tensor:
        """Give the logits ``(B, 1, vocab)`` of new tokens; those of rows that are not ``real (B,)`` are not kept."""
        self._tokens.copy_(tokens)
        self._real.fill_(1) if real is None else self._real.copy_(real != 0)
        self._replay()
        assert self._logits is not None
        return self._logits.clone()


class CapturedModel:
    """Calls a model as ``generate`` does; one token a row on a cache of its own is a graph, and the cache keeps it.

    Args:
        model: of transformers.
        next_logits: what gives its logits of one token a row.
    """

    def __init__(self, model: Any, next_logits: NextLogits) -> None:
        self._model, self._next_logits = model, next_logits
        self._weights = [x.data_ptr() for x in chain(model.parameters(), model.buffers())]
        self._settings = settings(model)

    def __call__(self, **inputs: Any) -> Any:
        """As of the model."""
        tokens, cache, mask = (inputs.get(name) for name in ("input_ids", "past_key_values", "attention_mask"))
        others = inputs.keys() - WITHOUT_EFFECT - {"input_ids", "past_key_values", "attention_mask"}
        asks_more = any(inputs[name] is not None and inputs[name] is not False for name in others)
        if asks_more or not _fits(tokens, cache, mask):
            return self._model(**inputs)
        assert isinstance(tokens, Tensor)
        assert isinstance(cache, FlexNSACache)
        place = self._weights, self._settings, _addresses(cache)
        if cache.captured is None or cache.captured.place != place:
            cache.captured = None  # before the new one takes memory
            cache.captured = CapturedStep(self._next_logits, cache, place)
        logits = cache.captured(tokens, None if mask is None else mask[:, -1])
        cache.seen += 1
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)


def can_capture(model: nn.Module) -> bool:
    """Tell whether a graph can stand for a model: it is on one device, and calling it is nothing but computing."""
    tensors = list(chain(model.parameters(), model.buffers()))
    if tensors[0].device.type not in DEVICES or not all(x.device == tensors[0].device and is_dense(x) for x in tensors):
        return False
    return all(has_no_hooks(module) and not looks_at_positions(module) for module in model.modules())


def settings(model: Any) -> str:
    """Spell what a model computes by that is no tensor: a graph goes on with what it was captured with."""
    own = (value for module in model.modules() for value in vars(module).values() if isinstance(value, SETTINGS))
    return repr([getattr(model.config, "flexnsa", None), *own])


def _fits(tokens: Any, cache: Any, mask: Any) -> bool:
    """Tell whether this is one token a row on a cache that holds some already, and need not grow for it."""
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.shape[1] != 1:
        return False
    if not isinstance(cache, FlexNSACache) or torch.is_autocast_enabled(tokens.device.type):
        return False
    if len(cache.kept) < len(cache.layers) or cache.seen == 0:
        return False
    if mask is not None and tuple(mask.shape) != (len(tokens), cache.seen + 1):
        return False  # the model says what is wrong with it
    return all(nsa.batch_size == len(tokens) and cache.seen < nsa.max_seq_len for nsa in cache.kept)


def _addresses(cache: FlexNSACache) -> list[int]:
    """Say where the cache lies: other rows or more room are other memory."""
    return [x.data_ptr() for nsa in cache.kept for x in (nsa.lengths, nsa.reached, *nsa.buffers.values())]
