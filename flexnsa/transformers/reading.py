"""How a dense attention layer computes, read from one run of it on random tokens; and whether an NSA layer does too.

A module does not say which channels it rotates together, or whether it caps its scores. So its queries and keys are
compared with what its projections, norms and the model's angles give, and the whole layer with the selected branch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from flexnsa.layers.projection import is_dense
from flexnsa.layers.rope import apply_rope
from flexnsa.primitives import describe
from flexnsa.transformers.cache import CACHE, FlexNSACache
from flexnsa.transformers.local_layers import layer_type
from flexnsa.transformers.rotary import STYLES, Rotary
from flexnsa.transformers.structure import Parts, normed_heads

TOKENS = 64
TOLERANCE = 1e-4
"""In float32, of the largest number that is compared; of narrower dtypes more, as their steps are wider."""

QUANTISED = 500.0
"""Times as much, of layers with quantised weights: their products of one token and of many are rounded differently."""


@dataclass(slots=True)
class Reading:
    """Takes the place of a mask, and keeps what a layer hands to its attention."""

    heads: dict[str, Tensor] = field(default_factory=dict)
    kwargs: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bool

    def __and__(self, chosen: Tensor) -> Reading:
        """Stay what it is where a layer would hide what it has not chosen."""
        return self

    def take(self, query: Tensor, key: Tensor, value: Tensor, kwargs: Mapping[str, Any]) -> tuple[Tensor, None]:
        """Keep the arguments, and return zeros as the heads' outputs."""
        self.heads, self.kwargs = {"q": query, "k": key, "v": value}, dict(kwargs)
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


@contextmanager
def probing(model: Any) -> Iterator[Any]:
    """Evaluate a model, and leave its modules as they were: some remember the largest position that they have seen."""
    states = [(module, vars(module).copy(), module._buffers.copy()) for module in model.modules()]
    devices = {x.device.index for x in model.parameters() if x.device.type == "cuda"}
    try:
        with torch.random.fork_rng([*devices]), torch.no_grad():
            yield model.eval()
    finally:
        for module, attributes, buffers in states:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def read_layers(model: Any, layers: Mapping[str, Any], attention: str, last: int) -> Iterator[Read]:
    """Run a dense model on random tokens, and each of its layers of full attention again to read it.

    Args:
        model: with a head for causal language modelling.
        layers: by name.
        attention: whose attention function calls :meth:`Reading.take`.
        last: a position; the layers are also read close to it, because some change what they do far away.

    Raises:
        ValueError: a layer is called in a way that an NSA layer does not know.
    """
    near = _run(model, layers, torch.arange(TOKENS))
    far = _run(model, layers, torch.arange(TOKENS) + max(0, last - TOKENS))
    for name, dense in layers.items():
        if name not in near or name not in far:
            raise ValueError(f"{name}: expected attention that runs once in each pass of the model, got none")
        with probing(dense):  # which then has its own config again
            dense.config = copy(dense.config)
            dense.config._attn_implementation_internal = attention
            attentions = [_take(dense, call) for call in (near[name], far[name])]
        yield Read(name, dense, near[name], attentions)


@dataclass(frozen=True, slots=True)
class Call:
    """What a layer was called with, and what it returned."""

    kwargs: dict[str, Any]
    out: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class Read:
    """A layer, a call of it, and what it hands to its attention near and far."""

    name: str
    dense: Any
    call: Call
    attentions: list[tuple[Call, Reading]]

    def check_arguments(self) -> None:
        """Check that the layer asks its attention for nothing that NSA has not."""
        dropout = getattr(self.dense, "attention_dropout", None) or getattr(self.dense.config, "attention_dropout", 0)
        if isinstance(dropout, int | float) and dropout:
            raise ValueError(f"attention_dropout: expected 0.0 of a model to convert, got {dropout}")
        parts, kwargs = Parts.of(self.dense), self.attentions[0][1].kwargs
        for name, expected in {"sliding_window": None, "position_bias": None, "s_aux": parts.sinks}.items():
            if kwargs.get(name) is not expected:
                value = "that of attribute sinks" if name == "s_aux" else None
                raise ValueError(f"{name}: expected {value} of a model to convert, got {describe(kwargs[name])}")
        if (scale := kwargs.get("scaling")) != parts.scale:
            raise ValueError(f"scaling: expected that of the layer, {parts.scale}, got {describe(scale)}")
        source = inspect.getsource(inspect.unwrap(type(self.dense).forward))
        if "get_seq_length(" in source:  # its queries or keys depend on the length of its cache
            expected = "attention that does not look at the length of its cache"
            raise ValueError(f"{self.name}: expected {expected}, got a {type(self.dense).__name__}")

    def rotary_style(self, rotary: nn.Module | None) -> str:
        """Return which channels the layer rotates together, one of :data:`flexnsa.transformers.rotary.STYLES`.

        Raises:
            ValueError: its queries, keys or values are not those of its projections, norms and any such rotation.
        """
        for style in STYLES:
            try:
                guess = Rotary(rotary, style, layer_type(self.dense), Parts.of(self.dense).head_dim)
            except ValueError:  # no such rotation
                continue
            if all(_rotates(guess, self.dense, *attention) for attention in self.attentions):
                return style
        expected = "queries, keys and values that q_proj, k_proj, v_proj, norms and rotary_emb give"
        raise ValueError(f"{self.name}: expected {expected}, got others from a {type(self.dense).__name__}")

    def check_same(self, layer: nn.Module) -> None:
        """Check that a layer with the selected branch alone returns what the dense one did, whole and in steps."""
        kwargs = self.call.kwargs | {"attention_mask": None}
        whole, _ = layer(**kwargs)
        x, cache = cast("Tensor", kwargs["hidden_states"]), FlexNSACache(self.dense.config)
        parts = (x[:, :-1], x[:, -1:])
        steps = [layer(**kwargs | {"hidden_states": part, CACHE: cache})[0] for part in parts]
        rounding = 1.0 if is_dense(Parts.of(self.dense).q_proj.weight) else QUANTISED
        for out in (whole, torch.cat(steps, 1)):
            if not _close(out, self.call.out, rounding):
                off = float((out - self.call.out).abs().max())
                expected = f"the output of o_proj alone, of a {type(self.dense).__name__}"
                raise ValueError(f"{self.name}: expected {expected}, got one that differs by {off:.1e}")


def check_cached_calls(model: Any) -> None:
    """Check that a converted model hands its cache to its NSA layers.

    Raises:
        ValueError: it does not, or takes another cache only.
    """
    tokens = _tokens(model)
    try:
        with probing(model):
            cache = model(tokens[:, :-1], use_cache=True)[CACHE]
            model(tokens[:, -1:], **{CACHE: cache})
        seen = {layer.seen for layer in cache.nsa_layers}
    except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError) as error:
        raise ValueError(f"{CACHE}: expected a model that takes any cache, got {error!r}") from error
    if seen != {TOKENS}:
        raise ValueError(f"{CACHE}: expected {TOKENS} tokens in the caches of all layers, got {sorted(seen)}")


def _tokens(model: Any) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (1, TOKENS), generator=draw).to(model.device)


def _run(model: Any, layers: Mapping[str, Any], positions: Tensor) -> dict[str, Call]:
    """Run a model in evaluation, with its own plain attention, and keep the calls of layers."""
    calls: dict[str, Call] = {}

    def keep(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            kwargs = dict(zip(("hidden_states", "position_embeddings"), args, strict=False)) | kwargs
            known = len(args) in (0, 2) and isinstance(out, tuple) and len(out) == 2 and "new_lengths" in kwargs
            if not known or name in calls:
                expected = "attention that is called once, with the arguments of the model by name, and returns two"
                raise ValueError(f"{name}: expected {expected}, got a call of another kind")
            calls[name] = Call(kwargs, out[0], positions[0])

        return hook

    positions = positions[None].to(model.device)
    hooks = [layer.register_forward_hook(keep(name), with_kwargs=True) for name, layer in layers.items()]
    config = model.config
    attention = config._attn_implementation
    try:
        config._attn_implementation_internal = "eager"
        with probing(model):
            model(input_ids=_tokens(model), position_ids=positions, use_cache=False, new_lengths=None)
    finally:
        config._attn_implementation_internal = attention
        for hook in hooks:
            hook.remove()
    return calls


def _take(dense: Any, call: Call) -> tuple[Call, Reading]:
    reading = Reading()
    try:
        dense(**call.kwargs | {"attention_mask": reading})
    except (AttributeError, TypeError) as error:
        expected = "attention that computes nothing from its mask"
        raise ValueError(f"attention_mask: expected {expected}, got a {type(dense).__name__}") from error
    return call, reading


def _rotates(rotary: Rotary, dense: Any, call: Call, reading: Reading) -> bool:
    """Return whether the heads that a layer handed to its attention are its projections, rotated so."""
    parts, x = Parts.of(dense), call.kwargs["hidden_states"]
    q = normed_heads(parts.q_norm, parts.q_proj(x), parts.num_heads)
    k = normed_heads(parts.k_norm, parts.k_proj(x), parts.num_kv_heads)
    v = normed_heads(None, parts.v_proj(x), parts.num_kv_heads)
    (tables,) = rotary(x, call.positions.to(x.device))
    got = reading.heads
    turned = ((apply_rope(rotary.order(raw), tables), rotary.order(got[name])) for name, raw in (("q", q), ("k", k)))
    return _close(v, got["v"]) and all(_close(*pair) for pair in turned)


def _close(got: Tensor, want: Tensor, rounding: float = 1.0) -> bool:
    if got.shape != want.shape:
        return False
    step, finest = (torch.finfo(dtype).eps for dtype in (want.dtype, torch.float32))
    tolerance = rounding * TOLERANCE * max(1.0, step / finest) ** 0.5
    return bool((got - want).abs().max() <= tolerance * want.abs().max())
