"""A transformers cache of NSA layers: each keeps a :class:`flexnsa.NSACache`, made when its first tokens come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from flexnsa.decoding.cache import NSACache
from flexnsa.validation import describe

FIRST_TOKENS = 256
"""For which a cache has room that nobody said the length of; it grows by doubling."""
MOST_DRAFTED = 64
"""Tokens that assisted decoding can take back; each costs a slot of the window and of the tail."""

NewCache = Callable[[int, int, int], NSACache]
"""``(batch_size, max_seq_len, max_rewind)`` to an empty cache for a layer."""


class FlexNSACacheLayer(CacheLayerMixin):
    """What one layer keeps; other than transformers' layers, it is given hidden states and no keys.

    Args:
        max_cache_len: tokens of a row to make room for at once; more find room too.
        max_rewind: tokens that :meth:`crop` can take back.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, max_cache_len: int = FIRST_TOKENS, max_rewind: int = 1) -> None:
        super().__init__()
        self.max_cache_len, self.max_rewind = max_cache_len, max_rewind
        self.nsa: NSACache | None = None
        self.seen = 0
        """Tokens of each row so far, padding included."""

    @property
    def batch_size(self) -> int:
        """Rows, once there are any; transformers asks with ``hasattr``."""
        if self.nsa is None:
            raise AttributeError("batch_size")
        return self.nsa.batch_size

    def prepare(self, new_cache: NewCache, batch_size: int, num_tokens: int) -> NSACache:
        """Give the cache, with room for so many more tokens a row.

        Raises:
            ValueError: it is of another number of rows.
        """
        need = self.seen + num_tokens
        if self.nsa is None:
            self.nsa = new_cache(batch_size, max(self.max_cache_len, need), self.max_rewind)
            self.is_initialized = True
        if self.nsa.batch_size != batch_size:
            raise ValueError(f"past_key_values: expected a cache of {batch_size} rows, got {self.nsa.batch_size}")
        if need > self.nsa.max_seq_len:
            self.nsa.grow(need)
        return self.nsa

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Do nothing: see :meth:`prepare`."""

    def update(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Refuse keys and values, which layers with dense attention would put here."""
        raise TypeError("past_key_values: expected a cache of keys and values for a dense layer, got a FlexNSACache")

    def get_seq_length(self) -> int:
        """Count the tokens of a row, padding included."""
        return self.seen

    def get_max_length(self) -> int:
        """Say that there is no end."""
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 5.10

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Say of how many keys a mask tells, and where they begin."""
        return self.seen + query_length, 0

    def reset(self) -> None:
        """Forget all rows."""
        if self.nsa is not None:
            self.nsa.reset()
        self.seen = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row ``b`` by row ``beam_idx[b]``."""
        if self.nsa is not None:
            self.nsa.reorder(beam_idx.to(self.nsa.device))

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` tokens; a positive number is the length to keep, as in 5.10."""
        count = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.seen - tokens_to_remove)
        if count and self.nsa is not None:
            self.nsa.crop(self.nsa.lengths - count)
            self.seen -= count

    def activate_past_recording(self) -> None:
        """Be ready to take back drafts, if no token has come yet."""
        if self.nsa is None:
            self.max_rewind = max(self.max_rewind, MOST_DRAFTED)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if self.nsa is not None:
            self._take(self.nsa.rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        if self.nsa is not None:
            self._take(self.nsa.rows[indices])

    def _take(self, rows: Tensor) -> None:
        old = self.nsa
        assert old is not None
        sizes = {name: getattr(old, name) for name in (*NSACache.SHARED, "max_seq_len")}
        self.nsa = NSACache(len(rows), **sizes)
        self.nsa.insert(range(len(rows)), old, rows)


class FlexNSACache(Cache):
    """Decoding state of a converted model or of a :class:`FlexNSAForCausalLM`; ``generate`` makes one by itself.

    Args:
        config: of the model.
        max_cache_len: tokens of a row to make room for at once; more find room too.
        max_rewind: tokens that :meth:`crop` can take back; assisted decoding needs more than one.
    """

    def __init__(self, config: Any, max_cache_len: int = FIRST_TOKENS, *, max_rewind: int = 1) -> None:
        count = config.num_hidden_layers
        super().__init__(layers=[FlexNSACacheLayer(max_cache_len, max_rewind) for _ in range(count)])
        self.layers: list[FlexNSACacheLayer]  # pyright: ignore[reportIncompatibleVariableOverride]
        self.captured: Any = None
        """A step on this memory that ``generate`` captured on the way."""

    @property
    def seen(self) -> int:
        """Tokens of each row so far, padding included."""
        return self.layers[0].seen

    @seen.setter
    def seen(self, count: int) -> None:
        for layer in self.layers:
            layer.seen = count

    @property
    def kept(self) -> list[NSACache]:
        """What the layers keep; empty before the first tokens."""
        return [layer.nsa for layer in self.layers if layer.nsa is not None]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was captured: a copy lies elsewhere."""
        return vars(self) | {"captured": None}


def computed_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Give the dtype of what a linear map makes of numbers of this one, under autocast or not."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype


def layer_of(cache: Any, index: int) -> FlexNSACacheLayer:
    """Demand a cache of NSA layers, and give one layer's part.

    Raises:
        TypeError: it is of another kind.
    """
    layers = getattr(cache, "layers", ())
    if index >= len(layers) or not isinstance(layers[index], FlexNSACacheLayer):
        raise TypeError(f"past_key_values: expected a FlexNSACache, got {describe(cache)}")
    return layers[index]


def wanted_cache(model: Any, given: Any, use_cache: bool | None) -> Any:
    """Give the cache of a forward pass: the given one; else, unless it trains or nobody wants one, an empty one.

    Raises:
        ValueError: one is given or asked for, and what would go into it may have to be differentiated.
    """
    training = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in model.parameters())
    if training and (use_cache or given is not None):
        name = "use_cache" if given is None else "past_key_values"
        raise ValueError(f"{name}: expected torch.no_grad(), because a cache has no gradient, got training")
    wanted = not training and (model.config.use_cache if use_cache is None else use_cache)
    return FlexNSACache(model.config) if wanted and given is None else given
