"""A transformers cache for NSA layers; each layer creates its :class:`flexnsa.NSACache` with its first tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.generation.utils import ALL_CACHE_NAMES
from transformers.utils import logging

from flexnsa.cache.cache import NSACache
from flexnsa.primitives import check_type, describe
from flexnsa.transformers.local_layers import layer_types, nsa_types

CACHE = ALL_CACHE_NAMES[0]
"""The name by which transformers passes a cache: ``cache``, before 5.24 ``past_key_values``."""
FIRST_TOKENS = 256
"""Initial capacity of a cache whose length the caller did not specify; it grows by doubling."""
MOST_DRAFTED = 64
"""Tokens that assisted decoding can take back; each needs a slot of the window and of the tail."""


class FlexNSACacheLayer(CacheLayerMixin):
    """The cache of one layer; it is filled from hidden states, while transformers' own take keys and values.

    Args:
        max_cache_len: initial capacity, in tokens per sequence; it grows when needed.
        max_rewind: tokens that :meth:`crop` can take back.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False
    indexer_position_ids = property(lambda _: None, lambda *_: None)
    """Where ``qwen4_exp`` keeps positions, which NSA layers count themselves."""

    def __init__(self, max_cache_len: int = FIRST_TOKENS, max_rewind: int = 1) -> None:
        super().__init__()
        self.max_cache_len, self.max_rewind = max_cache_len, max_rewind
        self.nsa: NSACache | None = None
        self.seen = 0
        """Tokens of each sequence so far, padding included."""

    @property
    def batch_size(self) -> int:
        """Number of sequences, once there are any; transformers asks with ``hasattr``."""
        if self.nsa is None:
            raise AttributeError("batch_size")
        return self.nsa.batch_size

    def prepare(self, new_cache: Callable[..., NSACache], batch_size: int, num_tokens: int) -> NSACache:
        """Return the cache, with capacity for ``num_tokens`` more tokens in each sequence; ``new_cache`` makes one.

        Raises:
            ValueError: it has another batch size.
        """
        need = self.seen + num_tokens
        if self.nsa is None or (self.seen == 0 and self.nsa.batch_size != batch_size):  # an empty one may be replaced
            self.nsa = new_cache(batch_size, max(self.max_cache_len, need), max_rewind=self.max_rewind)
            self.is_initialized = True
        if self.nsa.batch_size != batch_size:
            raise ValueError(f"{CACHE}: expected a cache of {batch_size} rows, got {self.nsa.batch_size}")
        if need > self.nsa.max_seq_len:
            self.nsa.grow(need)
        return self.nsa

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Do nothing: see :meth:`prepare`."""

    def update(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Raise: layers with dense attention would store keys and values here."""
        raise TypeError(f"{CACHE}: expected a cache of keys and values for a dense layer, got a FlexNSACache")

    def get_seq_length(self) -> int:
        """Return the tokens of each sequence so far, padding included."""
        return self.seen

    def get_max_length(self) -> int:
        """Return -1: there is no maximum."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that a mask covers, and the first of them."""
        return self.seen + query_length, 0

    def reset(self) -> None:
        """Remove all tokens."""
        if self.nsa is not None:
            self.nsa.reset()
        self.seen = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace sequence ``b`` by sequence ``beam_idx[b]``."""
        if self.nsa is not None:
            self.nsa.reorder(beam_idx.to(self.nsa.device))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: expected 0 or a negative number, got {tokens_to_remove}")
        if tokens_to_remove and self.nsa is not None:
            self.nsa.crop(self.nsa.lengths + tokens_to_remove)
            self.seen += tokens_to_remove

    def activate_past_recording(self) -> None:
        """Prepare to take back drafts, if the cache is still empty."""
        if self.nsa is None:
            self.max_rewind = max(self.max_rewind, MOST_DRAFTED)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        if self.nsa is not None:
            self._take(self.nsa.rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences."""
        if self.nsa is not None:
            self._take(self.nsa.rows[indices])

    def _take(self, rows: Tensor) -> None:
        old = self.nsa
        assert old is not None
        sizes = {name: getattr(old, name) for name in (*NSACache.SHARED, "max_seq_len")}
        self.nsa = NSACache(len(rows), **sizes)
        self.nsa.insert(range(len(rows)), old, rows)


class FlexNSACache(Cache):
    """Decoding state of a converted model or of a :class:`FlexNSAForCausalLM`; ``generate`` creates one itself.

    Layers that are not NSA have the parts that they have in a cache of transformers.

    Args:
        config: of the model.
        max_cache_len: initial capacity, in tokens per sequence; it grows when needed.
        max_rewind: tokens that :meth:`crop` can take back; assisted decoding needs more than one.
    """

    def __init__(self, config: Any, max_cache_len: int = FIRST_TOKENS, *, max_rewind: int = 1) -> None:
        types, replaced = layer_types(config), nsa_types(config)
        others: list[Any] = DynamicCache(config=config).layers if {*types} - {*replaced} else []
        layers: list[Any] = [
            others[index] if others and types[index] not in replaced else FlexNSACacheLayer(max_cache_len, max_rewind)
            for index in range(config.num_hidden_layers)
        ]
        super().__init__(layers=layers)
        self.layers: list[Any]  # pyright: ignore[reportIncompatibleVariableOverride]
        self.captured: Any = None
        """The decoding step that ``generate`` captured on this cache's memory."""

    @property
    def nsa_layers(self) -> list[FlexNSACacheLayer]:
        """The parts of NSA layers."""
        return [layer for layer in self.layers if isinstance(layer, FlexNSACacheLayer)]

    @property
    def seen(self) -> int:
        """Tokens of each sequence so far, padding included."""
        return self.nsa_layers[0].seen

    @seen.setter
    def seen(self, count: int) -> None:
        for layer in self.nsa_layers:
            layer.seen = count

    @property
    def kept(self) -> list[NSACache]:
        """The caches of the NSA layers; empty before the first tokens."""
        return [layer.nsa for layer in self.nsa_layers if layer.nsa is not None]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the captured step: a copy of the cache has other memory."""
        return vars(self) | {"captured": None}


def take_cache(kwargs: dict[str, Any], cache: Any) -> Any:
    """Return the cache, which a caller may also pass by its former name, ``past_key_values``, in ``kwargs``."""
    former = kwargs.pop("past_key_values", None)
    if former is not None and cache is not None:
        raise ValueError(f"past_key_values: expected None beside a cache, got {describe(former)}")
    return former if cache is None else cache


def layer_of(cache: Any, index: int) -> FlexNSACacheLayer:
    """Check that a cache is one of NSA layers, and return the part of one layer.

    Raises:
        TypeError: it is another kind of cache.
    """
    layers = getattr(cache, "layers", ())
    if index >= len(layers) or not isinstance(layers[index], FlexNSACacheLayer):
        raise TypeError(f"{CACHE}: expected a FlexNSACache, got {describe(cache)}")
    return layers[index]


def choose_cache(model: Any, tokens: Any, cache: Any, use_cache: bool | None) -> Any:
    """Return the cache of a forward pass: the given one, or a new one if it is asked for outside of training.

    Training is a pass that has weights or embeddings of ``tokens`` to differentiate. Configs want a cache by default.
    In training there is none then, and a warning says so once.

    Raises:
        TypeError: what is given is no cache.
        ValueError: a cache is given or asked for explicitly in training; or two layers share one part of it.
    """
    if cache is not None:
        check_type(CACHE, cache, Cache)
    layers = getattr(cache, "layers", ())
    if any(layer is other for index, layer in enumerate(layers) for other in layers[:index]):
        raise ValueError(f"{CACHE}: expected a part of its own for each layer, got one of them twice")
    training = torch.is_grad_enabled() and _is_differentiated(model, tokens)
    if training and (use_cache or cache is not None):
        name = "use_cache" if cache is None else CACHE
        raise ValueError(f"{name}: expected torch.no_grad(), because a cache has no gradient, got training")
    use_cache = model.config.use_cache if use_cache is None else use_cache
    if training and use_cache and model.training:
        _warn_of_training()
    return FlexNSACache(model.config) if use_cache and not training and cache is None else cache


def _is_differentiated(model: Any, tokens: Any) -> bool:
    """Tell whether weights require a gradient, or the embeddings of tokens, also by a hook alone."""
    if any(parameter.requires_grad for parameter in model.parameters()):
        return True
    if isinstance(tokens, Tensor) and not tokens.is_floating_point():
        tokens = model.get_input_embeddings()(tokens.new_zeros(1, 1))
    return isinstance(tokens, Tensor) and tokens.requires_grad


@torch.compiler.assume_constant_result  # called while compiling, and not compiled
def _warn_of_training() -> None:
    logger: Any = logging.get_logger()  # transformers' own, so that its verbosity applies
    logger.warning_once(
        "config.use_cache: expected False in training, because a cache has no gradient, got True. No cache is made. "
        "Pass use_cache=False, or set it in the config, to train without this warning."
    )
