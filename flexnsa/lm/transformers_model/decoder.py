"""The library's own decoder as a model of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.generation.utils import GenerationMixin
from transformers.initialization import normal_
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple

from flexnsa.layers.compression import MLPCompressor
from flexnsa.layers.indexer import SelectionLoss, check_selection
from flexnsa.layers.projection import weight_of
from flexnsa.lm.data.tokenizer import TextTokenizer
from flexnsa.lm.model.decoder import DecoderLayer, DecoderLM, run_layer
from flexnsa.lm.training.model_file import read_model, save_model
from flexnsa.lm.transformers_model.arguments import check_inputs, check_of_tokens, check_wishes
from flexnsa.lm.transformers_model.config import FlexNSAConfig, decoder_plan
from flexnsa.packing import IGNORED
from flexnsa.primitives import describe, may_look
from flexnsa.transformers.cache import CACHE, FlexNSACache, FlexNSACacheLayer, choose_cache, layer_of, take_cache
from flexnsa.transformers.converted import CachedGeneration
from flexnsa.transformers.mask_functions import make_padding_mask
from flexnsa.transformers.padding import Rows
from flexnsa.transformers.parallel import SpreadHeads
from flexnsa.transformers.teaching import SelectionLossHook
from flexnsa.transformers.unsupported import refuse_attentions


class FlexNSAForCausalLM(SpreadHeads, CachedGeneration, PreTrainedModel, GenerationMixin):
    """A :class:`flexnsa.lm.DecoderLM` that the Auto classes, ``generate`` and Trainer know.

    With ``config.skip_logits``, training on labels takes no memory for logits, which then are not returned.
    """

    config_class = FlexNSAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["CheckpointedLayer"]  # noqa: RUF012  (its type is that of the base class)
    _skip_keys_device_placement = [CACHE]  # noqa: RUF012
    _supports_context_parallel = False
    selection_hook: SelectionLossHook | None = None
    """What passes in training teach besides; see :class:`flexnsa.transformers.TeachSelection`."""
    _tp_plan = decoder_plan()
    _fsdp_plan = {  # noqa: RUF012
        "model.embedding": "free_full_weight",
        "model.layers.*": "free_full_weight",
        "model.head": "keep_full_weight",
    }

    def __init__(self, config: FlexNSAConfig) -> None:
        super().__init__(config)
        self.model = checkpointed(DecoderLM(config.decoder_config()))
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seq_lens_q: Tensor | None = None,
        output_hidden_states: bool | None = None,
        selection: SelectionLoss | None = None,
        skip_logits: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Predict the next token at every position.

        Args:
            input_ids: int ``(B, T)``; with a cache, the tokens that follow those in it.
            attention_mask: ``(B, S)``, 0 or False for padding before or behind each row's tokens.
            position_ids: int ``(B, T)``; packed documents are told by positions that begin anew.
            cache: a :class:`FlexNSACache`.
            inputs_embeds: ``(B, T, dim)``, what the embedding gives, in place of ``input_ids``.
            labels: int ``(B, T)``, -100 where there is nothing to predict; the model shifts them.
            use_cache: whether to make a cache; by default where nothing is differentiated.
            logits_to_keep: give those of the last tokens only; 0 for all.
            cu_seq_lens_q: int ``(D + 1,)``, where the documents of a single packed row begin.
            output_hidden_states: whether to give what goes into each layer, and what predicts tokens; by default as
                the config says.
            selection: gets the losses that teach the layers' indexers, in training; the loss returned is without them.
            skip_logits: whether to give the loss of labels and no logits, of which only a chunk exists at a time; by
                default in training, if the config says so.
            kwargs: ``num_items_in_batch``, by which the loss is divided; ``shift_labels``, int ``(B, T)``, in place of
                ``labels``: what each token is to predict. (Trainer asks for all labels that are named above.)

        Raises:
            TypeError: an argument is not of its kind.
            ValueError: an argument does not fit, or is not there to be had; the message names it.
        """
        refuse_attentions(self.config, kwargs, f"of {type(self).__name__}")
        hook = self.selection_hook if selection is None and self.training and torch.is_grad_enabled() else None
        selection = selection if hook is None else hook.selection()
        if selection is not None:
            check_selection(selection, bool(self.model.indexers()))
        flags = {"use_cache": use_cache, "output_hidden_states": output_hidden_states, "skip_logits": skip_logits}
        check_wishes(logits_to_keep, **flags)
        shift_labels = kwargs.pop("shift_labels", None)
        skip_logits = self._skips_logits(skip_logits, has_labels=not (labels is None and shift_labels is None))
        tokens = check_inputs(input_ids, inputs_embeds, weight_of(self.model.embedding))
        of_tokens = {"position_ids": position_ids, "labels": labels, "shift_labels": shift_labels}
        check_of_tokens(tokens, self.config.vocab_size, **of_tokens)
        cache = choose_cache(self, tokens, take_cache(kwargs, cache), use_cache)
        layers = [] if cache is None else [layer_of(cache, index) for index in range(len(self.model.layers))]
        rows = _read_rows(tokens, attention_mask, position_ids, cu_seq_lens_q, layers)
        tokens = rows.align(tokens, dim=1)
        labels, shift_labels = (None if x is None else rows.align(x, dim=1) for x in (labels, shift_labels))
        if labels is not None and shift_labels is None:
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        options = self._options_of_layers(tokens, rows, layers, selection)
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states: list[Tensor] | None = [] if wants_states else None

        def teach(x: Tensor) -> Tensor:
            return x if hook is None or selection is None else hook.attach(x, selection)

        loss = logits = None
        if skip_logits:
            count = kwargs.get("num_items_in_batch")
            reduction = "mean" if count is None else "sum"
            loss = self.model(tokens, targets=shift_labels, reduction=reduction, states=states, **options)
            loss = teach(loss if count is None else loss / count)
        elif rows.cached and shift_labels is None and states is None and _is_last(logits_to_keep, rows.num_valid):
            logits = self.model.last_logits(tokens, **options)[:, None]
        else:
            logits = teach(self.model(tokens, states=states, **options))
            if shift_labels is not None:
                of_targets = {"labels": labels, "shift_labels": shift_labels, "vocab_size": self.config.vocab_size}
                loss = self.loss_function(logits=logits, **of_targets, **kwargs)
            logits = rows.restore(logits, dim=1)
            logits = logits[:, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep]
        for layer in layers:
            layer.seen += rows.num_tokens
        hidden_states = None if states is None else cast("Any", tuple(rows.restore(x, dim=1) for x in states))
        return CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=hidden_states, **{CACHE: cache})

    def _skips_logits(self, skip_logits: bool | None, *, has_labels: bool) -> bool:
        """Return whether to compute no logits, by the argument or else the config."""
        if skip_logits and not has_labels:
            raise ValueError("skip_logits: expected False without labels, got True")
        return self.config.skip_logits and self.training and has_labels if skip_logits is None else skip_logits

    def _options_of_layers(
        self, tokens: Tensor, rows: Rows, layers: list[FlexNSACacheLayer], selection: SelectionLoss | None
    ) -> dict[str, Any]:
        """Return what layers get besides their tokens: documents of whole sequences, or caches."""
        if not rows.cached:
            if selection is not None:  # queries are chosen here, where it is known which are padding
                selection.tokens(tokens, rows.num_tokens, rows.num_valid)
            return {"document_ids": rows.documents, "selection": selection}
        blocks = cast("list[Any]", [*self.model.layers])
        caches = [
            layer.prepare(block.attention.new_cache, *tokens.shape[:2])
            for layer, block in zip(layers, blocks, strict=True)
        ]
        rows.check_cache(caches[0].lengths)
        return {"caches": caches, "lengths": rows.num_valid}

    def next_logits(self, tokens: Tensor, cache: FlexNSACache, num_valid: Tensor) -> Tensor:
        """Give the logits of one token a row."""
        return self.model(tokens, caches=cache.kept, lengths=num_valid)

    @classmethod
    def from_run(cls, checkpoint: str | Path, **options: Any) -> Self:
        """Read the model of a run of ``flexnsa train``, a checkpoint or its folder; ``options`` are of the config.

        Raises:
            FileNotFoundError: there is no such file or folder.
            FileError: it is no checkpoint, or not a whole one.
        """
        decoder = read_model(Path(checkpoint))
        with torch.device("meta"):
            model = cls(FlexNSAConfig.of(decoder.config, **options))
        model.model = checkpointed(decoder)
        return model.eval()

    def save_run(self, path: str | Path, *, tokenizer: str | Path | None = None) -> None:
        """Write what ``flexnsa generate`` and :meth:`from_run` read; no run goes on from there.

        Args:
            path: of the file.
            tokenizer: a file of ``tokenizers``, or the folder of one that transformers saved, which is then written as
                ``tokenizer.json`` beside the file; by default each token is a byte.

        Raises:
            FileNotFoundError: there is no such tokenizer.
            FileExistsError: beside the file is another tokenizer.
            OSError: it could not be written; names the path.
            ValueError: it is no tokenizer, or one of more tokens than the model has.
        """
        read = None if tokenizer is None else TextTokenizer(Path(tokenizer))
        if read is not None and read.vocab_size > self.config.vocab_size:
            expected = f"one of {self.config.vocab_size} tokens or fewer"
            raise ValueError(f"tokenizer: expected {expected}, as the model, got one of {read.vocab_size}")
        save_model(Path(path), self.model, read)

    def get_input_embeddings(self) -> nn.Module:
        """Give the embedding of tokens."""
        return self.model.embedding

    def set_input_embeddings(self, value: Any) -> None:
        """Replace the embedding of tokens."""
        self.model.embedding = value
        self.model.config = replace(self.model.config, vocab_size=len(value.weight))

    def get_output_embeddings(self) -> nn.Module:
        """Give what predicts tokens."""
        return self.model.head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        """Replace what predicts tokens."""
        self.model.head = new_embeddings

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1
    ) -> None:
        """Have layers computed again in backward; their selections are kept."""
        asked = getattr(gradient_checkpointing_func, "func", gradient_checkpointing_func)  # of a partial
        if asked not in (None, checkpoint):
            expected = "torch.utils.checkpoint.checkpoint, without offloading"
            raise ValueError(f"gradient_checkpointing_func: expected {expected}, got {describe(asked)}")
        for index, layer in enumerate(cast("list[CheckpointedLayer]", [*self.model.layers])):
            layer.gradient_checkpointing = enable and index % every_n_layers == 0
        self.gradient_checkpointing = enable

    def initialize_weights(self) -> None:
        """Draw what is not loaded; a compressor that is to begin as the mean does, if it is not loaded whole."""
        starts = [x for x in self.model.modules() if getattr(x, "begins_as_mean", False) and not _is_initialized(x)]
        super().initialize_weights()
        for compressor in cast("list[MLPCompressor]", starts):
            compressor.begin_as_mean()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # Of code that is not its own, transformers asks for modules with parameters of their own, one by one.
        std = _standard_deviations(self.model).get(module)
        if std is not None:
            normal_(module.get_parameter("weight"), std=std)
        elif any(True for _ in module.parameters(recurse=False)):
            module.reset_parameters()  # pyright: ignore[reportCallIssue]


class CheckpointedLayer(GradientCheckpointingLayer, DecoderLayer):
    """A layer of the decoder that transformers checkpoints as those of its own models."""

    def _gradient_checkpointing_func(self, forward: Callable[[Tensor], Any], x: Tensor) -> Any:
        return run_layer(forward, x, checkpointed=True)


def checkpointed(decoder: DecoderLM) -> DecoderLM:
    """Let transformers checkpoint the layers of a decoder, which then does not do so itself."""
    decoder.config = replace(decoder.config, checkpointing=False)
    for layer in decoder.layers:
        layer.__class__ = CheckpointedLayer
    return decoder


def _is_initialized(module: nn.Module) -> bool:
    """Tell whether transformers has drawn the module before, or loaded all of its parameters."""
    drawn, *loaded = (getattr(x, "_is_hf_initialized", False) for x in (module, *module.parameters()))
    return drawn or all(loaded)


def _standard_deviations(model: DecoderLM) -> dict[nn.Module, float]:
    """Give those of the weights that start by the model's own plan; see :meth:`DecoderLM.reset_parameters`."""
    stds: dict[nn.Module, float] = {model.embedding: 1.0, model.head: 1 / model.config.dim}
    for layer in cast("list[DecoderLayer]", [*model.layers]):
        attention = cast("Any", layer.attention)
        stds[attention.gate.linear] = 0.02
        stds[layer.mlp.up] = layer.mlp.up.in_features**-0.5
        for linear in (attention.w_o, layer.mlp.down):
            stds[linear] = layer.residual_scale * linear.in_features**-0.5
    for indexer in model.indexers():
        stds |= {indexer.change_q.up: 0.0, indexer.change_k.up: 0.0}
    return stds


def _read_rows(
    tokens: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    layers: list[FlexNSACacheLayer],
) -> Rows:
    """Read padding and documents; without a mask and a cache a gap in positions starts one, as in transformers."""
    batch_size, num_tokens = tokens.shape[:2]
    seen = layers[0].seen if layers else 0
    shape = batch_size, num_tokens, seen + num_tokens
    mask = None
    if attention_mask is not None:
        if tuple(getattr(attention_mask, "shape", ())) != shape[::2]:
            raise ValueError(f"attention_mask: expected {shape[::2]}, got {describe(attention_mask)}")
        mask = make_padding_mask(*shape, seen, attention_mask=attention_mask.to(torch.bool), device=tokens.device)
    gaps = "refuse" if layers or attention_mask is not None else "cut"
    return Rows.of(mask, position_ids, cu_seqlens, shape, cached=bool(layers), gaps=gaps)


def _is_last(logits_to_keep: int | Tensor, num_valid: Tensor | None) -> bool:
    """Tell whether the logits of each row's last token are wanted, and none is known to have only padding."""
    has_none = num_valid is not None and may_look(num_valid) and bool((num_valid == 0).any())
    return isinstance(logits_to_keep, int) and logits_to_keep == 1 and not has_none
