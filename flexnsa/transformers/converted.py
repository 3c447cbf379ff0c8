"""Base classes of converted models of all families: NSA layers, and a cache for them."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.initialization import copy_, zeros_
from transformers.modeling_utils import PreTrainedModel

from flexnsa.checks.primitives import describe
from flexnsa.layers.indexer import Change, SelectionLoss, check_selection
from flexnsa.layers.starting import starting_values
from flexnsa.transformers.attention import ConvertedAttention
from flexnsa.transformers.cache import MOST_DRAFTED, FlexNSACache, wanted_cache
from flexnsa.transformers.captured import CapturedModel, can_capture
from flexnsa.transformers.marks import count_real
from flexnsa.transformers.options import LayerOptions
from flexnsa.transformers.parallel import SpreadHeads

LAYERS = "flexnsa_layers"
"""The ``attn_implementation`` of models whose layers are NSA; these have no other, and no other models have it."""


class ConvertedConfig:
    """Mixin of a family's config, which records in config.json that the layers are NSA.

    The dense classes of the family then raise for such a checkpoint. Without the entry they would drop its gates with
    only a warning.
    """

    def __post_init__(self, **kwargs: Any) -> None:
        chosen = kwargs.pop("attn_implementation", None)
        super().__post_init__(**kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        self._attn_implementation = LAYERS if chosen is None else chosen
        self.attn_implementation = LAYERS


class ConvertedPreTrainedModel(SpreadHeads, PreTrainedModel):
    """Mixin of all models of a family."""

    _can_compile_fullgraph = False
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_sdpa = False
    _supports_context_parallel = False

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:  # noqa: ARG002
        """Check that no other attention is asked for."""
        if requested_attention not in (None, LAYERS):
            raise ValueError(
                f"attn_implementation: expected none for a model whose layers are NSA, got {requested_attention!r}"
            )
        return LAYERS

    def _init_weights(self, module: nn.Module) -> None:
        # Of code that is not its own, transformers asks for modules with parameters of their own, one by one.
        if any(module is change.up for change in self.modules() if isinstance(change, Change)):
            zeros_(cast("nn.Linear", module).weight)
            return
        starts = starting_values(module)
        for name, value in starts.items():
            copy_(module.get_parameter(name), value)
        if not starts:
            super()._init_weights(module)


class ConvertedModel(ConvertedPreTrainedModel):
    """Mixin of a family's model without its head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        options = LayerOptions.of(config)
        for layer in cast("Any", self.layers):
            check_dense(layer.self_attn)
            layer.self_attn = ConvertedAttention(layer.self_attn, cast("nn.Module", self.rotary_emb), options)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
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
        cache, options = wanted_cache(self, past_key_values, use_cache), LayerOptions.of(self.config)
        layers = [layer.self_attn for layer in cast("Any", self.layers)]
        for layer in layers:
            layer.follow(options)
        x, taught = inputs_embeds if input_ids is None else input_ids, None
        if selection is not None:
            check_selection(selection, [layer.indexer for layer in layers])
            taught = None if x is None else selection.of_rows(x, count_real(attention_mask, len(x)))
        out = super().forward(  # pyright: ignore
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            inputs_embeds=inputs_embeds,
            use_cache=cache is not None,
            tells_of_packs=position_ids is not None,  # positions that the model counts itself never restart
            selection=taught,
            **kwargs,
        )
        if selection is not None and taught is not None:
            self._check_taught(taught, len(layers) if cache is None else 0)
            selection.include(taught)
        return out

    def _check_taught(self, taught: SelectionLoss, count: int) -> None:
        """Check that layers were not run without a gradient where the model is, and then again in backward."""
        if self.training and torch.is_grad_enabled() and len(taught.sums) < count:
            raise ValueError(
                "gradient_checkpointing_kwargs: expected {'use_reentrant': False} of a model that is taught to select, "
                f"got a checkpoint in which {count - len(taught.sums)} of {count} layers add no loss"
            )


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
        wanted = generation_config.cache_implementation
        if wanted not in (None, "dynamic", "dynamic_full", "static"):  # 5.10 sets dynamic_full in assisted decoding
            raise ValueError(f"cache_implementation: expected None for NSA layers, got {wanted!r}")
        given = model_kwargs.get("past_key_values")
        if generation_config.use_cache is False or given is not None:
            return super()._prepare_cache_for_generation(  # pyright: ignore[reportAttributeAccessIssue]
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        drafts = generation_mode == GenerationMode.ASSISTED_GENERATION or generation_config.is_assistant
        rewind = max(MOST_DRAFTED, generation_config.prompt_lookup_num_tokens or 0) if drafts else 1
        model_kwargs["past_key_values"] = FlexNSACache(self.config, max_cache_length, max_rewind=rewind)
        return None

    def next_logits(self, tokens: Tensor, cache: FlexNSACache, real: Tensor) -> Tensor:
        """Return the logits ``(B, 1, vocab)`` of one token per sequence; those that are ``real (B,)`` are cached."""
        raise NotImplementedError

    def _valid_auto_compile_criteria(self, model_kwargs: dict[str, Any], generation_config: GenerationConfig) -> bool:
        """Return whether to capture a step, where transformers would compile for a static cache."""
        told = generation_config.disable_compile or generation_config.compile_config is not None
        if told or not isinstance(model_kwargs.get("past_key_values"), FlexNSACache):
            return super()._valid_auto_compile_criteria(model_kwargs, generation_config)  # pyright: ignore
        return can_capture(cast("nn.Module", self))

    def get_compiled_call(self, compile_config: Any = None) -> Any:
        """Return the callable that ``generate`` uses as the model; see :mod:`flexnsa.transformers.captured`."""
        if compile_config is not None:
            return super().get_compiled_call(compile_config)  # pyright: ignore[reportAttributeAccessIssue]
        return CapturedModel(self, self.next_logits)


class ConvertedForCausalLM(CachedGeneration, ConvertedPreTrainedModel):
    """Mixin of a family's model with a language modelling head."""

    model_class: ClassVar[type]
    """The class of the model without its head."""

    def __init__(self, config: Any) -> None:
        PreTrainedModel.__init__(self, config)  # the dense class's would build dense layers first
        self.model = self.model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def next_logits(self, tokens: Tensor, cache: FlexNSACache, real: Tensor) -> Tensor:
        """Return the logits of one token per sequence."""
        out = self.model(input_ids=tokens, past_key_values=cache, use_cache=True, new_lengths=real)
        return self.lm_head(out.last_hidden_state)


def check_dense(attention: Any) -> None:
    """Check that NSA can replace a dense layer.

    Raises:
        ValueError: the layer has dropout or a window, or the model has layers of another type.
    """
    config = attention.config
    expected: dict[str, Any] = {"attention_dropout": 0.0, "sliding_window": None}
    found = {"attention_dropout": config.attention_dropout, "sliding_window": getattr(config, "sliding_window", None)}
    if hasattr(config, "use_sliding_window") and not config.use_sliding_window:
        found["sliding_window"] = None
    for name, value in expected.items():
        if found[name] and found[name] != value:
            raise ValueError(f"{name}: expected {value} of a model to convert, got {describe(found[name])}")
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and {*kinds} != {"full_attention"}:
        raise ValueError(f"layer_types: expected 'full_attention' of a model to convert, got {describe(kinds)}")
