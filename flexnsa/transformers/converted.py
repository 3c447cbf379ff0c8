"""Base classes of all converted models: NSA layers, and a cache for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.initialization import copy_, zeros_
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from flexnsa.layers.config import leaders_of
from flexnsa.layers.indexer import Change, PassedIndex, SelectionLoss, check_selection
from flexnsa.layers.presets import starting_values
from flexnsa.transformers.attention import ConvertedAttention
from flexnsa.transformers.cache import CACHE, MOST_DRAFTED, FlexNSACache, choose_cache, take_cache
from flexnsa.transformers.choice import LAYERS
from flexnsa.transformers.cuda_graphs import CapturedModel, can_capture
from flexnsa.transformers.dropin import attend_in_rows
from flexnsa.transformers.local_layers import LOCAL, SELECTING, attend_locally, layer_type, layer_types, nsa_types
from flexnsa.transformers.options import DropInOptions, LayerOptions
from flexnsa.transformers.padding import Rows, count_valid
from flexnsa.transformers.parallel import SpreadHeads
from flexnsa.transformers.reading import Reading
from flexnsa.transformers.softmax import Softmax
from flexnsa.transformers.teaching import SelectionLossHook
from flexnsa.transformers.unsupported import asks_for_attention, refuse_attentions

OF_NSA = ("given_positions", "new_lengths", "selection", "shared_index")
"""Arguments that the model hands to all of its layers for those that are NSA."""


class ConvertedConfig:
    """Mixin of a config, which records in config.json that the layers are NSA.

    The dense classes then raise for such a checkpoint. Without the entry they would drop its gates with only a warning.
    """

    has_nsa_layers = True
    mixed_tp_plan: ClassVar[dict[str, str]]
    """Which parameters tensor parallelism shards in a model that has other layers with attention too."""

    def __post_init__(self, **kwargs: Any) -> None:
        chosen = kwargs.pop("attn_implementation", None)
        super().__post_init__(**kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        self._attn_implementation = LAYERS if chosen is None else chosen
        self.attn_implementation = LAYERS
        if {*layer_types(self)} & {*LOCAL}:
            self.base_model_tp_plan = self.mixed_tp_plan


class ConvertedPreTrainedModel(SpreadHeads, PreTrainedModel):
    """Mixin of all converted models."""

    dense_class: ClassVar[Any]
    """The class of the dense model."""
    _can_compile_fullgraph = False
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_sdpa = False
    _supports_context_parallel = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        take_layers(self, convert_layers(self, LayerOptions.of(config)))
        self.post_init()

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:  # noqa: ARG002
        """Check that no other attention is asked for."""
        if requested_attention not in (None, LAYERS):
            expected = "none for a model whose layers are NSA"
            raise ValueError(f"attn_implementation: expected {expected}, got {requested_attention!r}")
        return LAYERS

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save as transformers does; ``share_index`` is that of the layers that are there, where others were cut.

        Raises:
            ValueError: a layer reads the index of one that is gone.
        """
        options, layers = self.config.flexnsa, layers_of(self)
        if options and "share_index" in options:
            places = {layer.layer_idx: place for place, layer in enumerate(layers)}
            for layer in layers:
                if layer.leader not in places:
                    expected = f"layer {layer.leader} in a model to save, as layer {layer.layer_idx} reads its index"
                    raise ValueError(f"share_index: expected {expected}, got layers {[*places]}")
            self.config.flexnsa = {**options, "share_index": [places[layer.leader] for layer in layers]}
        try:
            return super().save_pretrained(*args, **kwargs)
        finally:
            self.config.flexnsa = options

    def _init_weights(self, module: nn.Module) -> None:
        # Of code that is not its own, transformers asks for modules with parameters of their own, one by one.
        if any(module is change.up for change in self.modules() if isinstance(change, Change)):
            zeros_(cast("nn.Linear", module).weight)
            return
        if isinstance(module, ConvertedAttention) and module.sinks is not None:
            zeros_(module.sinks)
        starts = starting_values(module)
        for name, value in starts.items():
            copy_(module.get_parameter(name), value)
        if not starts:
            super()._init_weights(module)


class ConvertedModel(ConvertedPreTrainedModel):
    """Mixin of models without their head."""

    nsa_layers: list[ConvertedAttention]
    """The NSA layers, in order."""
    selection_hook: SelectionLossHook | None = None
    """What passes in training teach besides; see :class:`flexnsa.transformers.TeachSelection`."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        selection: SelectionLoss | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model with the current options of ``config.flexnsa``; arguments as of the dense model.

        In training, ``selection`` gets the losses that teach the layers' indexers; see :class:`flexnsa.SelectionLoss`.

        Raises:
            TypeError: an argument or an option has the wrong type.
            ValueError: an argument or an option does not fit; the message names it.
        """
        refuse_attentions(self.config, kwargs, "of a model with NSA layers")
        x = inputs_embeds if input_ids is None else input_ids
        cache, options = choose_cache(self, x, take_cache(kwargs, cache), use_cache), LayerOptions.of(self.config)
        layers = self.nsa_layers
        for layer in layers:
            layer.follow(options)
        hook = self.selection_hook if selection is None and self.training and torch.is_grad_enabled() else None
        selection = selection if hook is None else hook.selection()
        taught = None
        if selection is not None:
            check_selection(selection, any(layer.indexer for layer in layers))
            taught = None if x is None else selection.of_rows(x, count_valid(attention_mask, x.shape[0]))
        out = super().forward(  # pyright: ignore
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=cache is not None,
            given_positions=position_ids,  # those that the model counts itself never restart
            selection=taught,
            shared_index={layer.leader: PassedIndex() for layer in layers if layer.follows},
            **{CACHE: cache} | kwargs,
        )
        if selection is not None and taught is not None:
            count = sum(layer.training for layer in layers_of(self)) if cache is None and torch.is_grad_enabled() else 0
            if len(taught.sums) < count:  # run without a gradient where the model is, and then again in backward
                expected = "{'use_reentrant': False} of a model that is taught to select"
                got = f"a checkpoint in which {count - len(taught.sums)} of {count} layers in training add no loss"
                raise ValueError(f"gradient_checkpointing_kwargs: expected {expected}, got {got}")
            selection.include(taught)
        if hook is not None and selection is not None:
            attached = hook.attach(out[0], selection)
            if isinstance(out, tuple):
                return attached, *out[1:]
            out.last_hidden_state = attached
        return out


class CachedGeneration:
    """Mixin of models with NSA layers that generate: ``generate`` creates a cache for them."""

    config: Any

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic", "static"):
            raise ValueError(f"cache_implementation: expected None for NSA layers, got {kind!r}")
        early = generation_config.assistant_early_exit
        if early is not None and not isinstance(cast("Any", self).base_model, PreTrainedModel):
            raise ValueError(f"assistant_early_exit: expected None of a {type(self).__name__}, got {early}")
        if generation_config.use_cache is False or model_kwargs.get(CACHE) is not None:
            return super()._prepare_cache_for_generation(  # pyright: ignore[reportAttributeAccessIssue]
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        drafts = generation_mode == GenerationMode.ASSISTED_GENERATION or generation_config.is_assistant
        rewind = max(MOST_DRAFTED, generation_config.prompt_lookup_num_tokens or 0) if drafts else 1
        cache = FlexNSACache(self.config, max_cache_length, max_rewind=rewind)
        if generation_config.is_assistant:
            cache.activate_past_recording()  # sliding layers are cropped where a draft is rejected
        model_kwargs[CACHE] = cache
        return None

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        """Refuse pages, which keep one key and value for each token."""
        expected = "a model whose layers keep one key and value for each token, as the pages of transformers' cache do"
        got = f"a {type(self).__name__}; generate takes a batch of it"
        raise ValueError(f"generate_batch: expected {expected}, got {got}")

    def next_logits(self, tokens: Tensor, cache: FlexNSACache, num_valid: Tensor) -> Tensor:
        """Return the logits ``(B, 1, vocab)`` of one token a row, which is cached where ``num_valid (B,)`` is 1."""
        raise NotImplementedError

    def _valid_auto_compile_criteria(self, model_kwargs: dict[str, Any], generation_config: GenerationConfig) -> bool:
        """Return whether to capture a step, where transformers would compile for a static cache."""
        is_set = generation_config.disable_compile or generation_config.compile_config is not None
        if is_set or not isinstance(model_kwargs.get(CACHE), FlexNSACache):
            return super()._valid_auto_compile_criteria(model_kwargs, generation_config)  # pyright: ignore
        return can_capture(cast("nn.Module", self))

    def get_compiled_call(self, compile_config: Any = None) -> Any:
        """Return the callable that ``generate`` uses as the model; see :mod:`flexnsa.transformers.cuda_graphs`."""
        if compile_config is not None:
            return super().get_compiled_call(compile_config)  # pyright: ignore[reportAttributeAccessIssue]
        return CapturedModel(self, self.next_logits)


class ConvertedForCausalLM(CachedGeneration, ConvertedPreTrainedModel):
    """Mixin of models with a language modelling head."""

    base_class: ClassVar[type]
    """The class of the model without its head."""

    def next_logits(self, tokens: Tensor, cache: FlexNSACache, num_valid: Tensor) -> Tensor:
        """Return the logits of one token per sequence."""
        return self(input_ids=tokens, use_cache=True, new_lengths=num_valid, **{CACHE: cache}).logits


def convert_layers(model: Any, options: LayerOptions) -> dict[str, ConvertedAttention]:
    """Make an NSA layer of each dense layer with full attention; return them by the names of the dense ones.

    Raises:
        ValueError: a layer cannot be converted; the message names what does not fit.
    """
    layers, made = full_layers(model), dict[str, ConvertedAttention]()
    for (name, dense), leader in zip(layers, leaders_of(options.share_index, len(layers), options.sizes), strict=True):
        made[name] = ConvertedAttention(dense, rotary_of(model, name), options, layers[leader][1].layer_idx)
    return made


def take_layers(model: Any, layers: Mapping[str, nn.Module]) -> None:
    """Replace layers of a model, by their names, and make its part without the head of the class that belongs to it."""
    for name, layer in layers.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer)
    base = model.base_model
    if base is not model:
        become(base, getattr(type(model), "base_class", None) or type(base).dense_class)
    base.nsa_layers = layers_of(base)


def layers_of(model: nn.Module) -> list[ConvertedAttention]:
    """Return the NSA layers that a model has now, in order."""
    return [module for module in model.modules() if isinstance(module, ConvertedAttention)]


def become(model: Any, model_class: Any) -> None:
    """Change the class of a model, as if it had been made by that."""
    model.__class__ = model_class
    _CAN_RECORD_REGISTRY[model] = model._can_record_outputs


def full_layers(model: Any) -> list[tuple[str, Any]]:
    """Return the attention modules that become NSA, those with full causal attention or an MSA, by name.

    Raises:
        ValueError: there is none.
    """
    if "hybrid" in layer_types(model.config):
        raise ValueError("layer_types: expected layers with attention or a recurrence to convert, got 'hybrid' ones")
    types = nsa_types(model.config)
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if asks_for_attention(type(module)) and layer_type(module) in types and getattr(module, "is_causal", True)
    ]
    if not layers:
        expected = f"layers of full causal attention, or {', '.join(SELECTING)}, that use transformers' interface"
        raise ValueError(f"model: expected {expected}, got a {type(model).__name__} without")
    return layers


def rotary_of(model: Any, name: str) -> nn.Module | None:
    """Return the rotary embedding nearest to a module: its own, or that of a module around it."""
    parts = name.split(".")
    for length in range(len(parts), -1, -1):
        rotary = getattr(model.get_submodule(".".join(parts[:length])), "rotary_emb", None)
        if rotary is not None:
            return rotary
    return None


def attend_in_dense_layers(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Compute the attention of those layers of a converted model that are not NSA, as without conversion.

    Raises:
        ValueError: the layer has full attention: it was not converted.
    """
    if isinstance(attention_mask, Reading):
        return attention_mask.take(query, key, value, kwargs)
    if layer_type(module) in nsa_types(module.config):
        raise ValueError(f"attn_implementation: expected {LAYERS!r} of NSA layers, got a {type(module).__name__}")
    if layer_type(module) not in LOCAL:
        shape = key.shape[0], query.shape[2], key.shape[2]
        rows = Rows.of(attention_mask, kwargs.get("given_positions"), kwargs.get("cu_seq_lens_q"), shape)
        options, softmax = LayerOptions.of(module.config), Softmax(kwargs.get("scaling"), dense=True)
        return attend_in_rows(query, key, value, rows, softmax, DropInOptions(impl=options.impl)), None
    kwargs = {name: value for name, value in kwargs.items() if name not in OF_NSA}
    return attend_locally(module, query, key, value, attention_mask, **kwargs)
