"""Conversion of a pretrained model to one with NSA layers, and back where that loses nothing."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from torch import nn

from flexnsa.attention.interface import given
from flexnsa.checks.calls import check_branches
from flexnsa.config import NSAConfig
from flexnsa.layers.config import BranchOptions, leaders_of
from flexnsa.primitives import check_type, describe
from flexnsa.transformers.attention import ConvertedAttention
from flexnsa.transformers.choice import LAYERS
from flexnsa.transformers.classes import converted_class, converted_config, dense_class
from flexnsa.transformers.converted import (
    ConvertedPreTrainedModel,
    become,
    convert_layers,
    full_layers,
    rotary_of,
    take_layers,
)
from flexnsa.transformers.options import LayerOptions, selecting_sizes, write_sizes
from flexnsa.transformers.reading import TOKENS, check_cached_calls, probing, read_layers
from flexnsa.transformers.structure import fill_dense

NOT_SHARED = ("model_type", "architectures", "transformers_version", "attn_implementation", "flexnsa")
"""Config entries of one model that have no meaning, or another, in the config of the other."""


def convert(model: Any, config: NSAConfig | None = None, *, copy: bool = True, **options: Any) -> Any:
    """Return a pretrained model with NSA layers in the place of its dense ones that have full attention.

    All branches start with the dense layer's projections of keys and values, compressors as means, and an indexer as
    the mean of the selected branch's keys. Gates start at 1 for the selected branch and at 0.02 for the others, for
    every token. With ``branches=("slc",)`` there is no gate, and the new model equals the dense one as long as all
    blocks are selected, for up to ``n * l'`` tokens. With all three branches it differs from that by 0.02 times the
    outputs of the other two.

    A model of type ``minimax_m3_vl_text`` or ``qwen4_exp_text``, whose layers select blocks (MSA, QSA), keeps its sizes
    and indexers, and its other layers. It is equal at all lengths, and so is what :func:`to_dense` makes of it, which
    plain transformers loads.

    No list of models says what can be converted: layers are looked at, and run on 64 random tokens. Each with the
    selected branch alone then has to return what the dense one does. Layers with other attention stay as they are.

    Args:
        model: of transformers, for causal language modelling, without dropout.
        config: sizes of the branches; None, and no ``branches``, for a model that selects blocks itself.
        copy: convert a copy; otherwise the model itself, so that no parameter is in memory twice.
        options: ``branches``, ``impl``, ``recompute`` and ``index_rank``, the fields of
            :class:`flexnsa.layers.config.BranchOptions`; and ``share_index``, layers for each indexer: of ``k``, the
            first has it, and the others attend to the blocks that it chose. Or, for each layer, the number of the one
            whose index it reads. Both count the converted layers alone, from 0.

    Returns:
        A model of a class of its own, frozen where the dense one is. Once saved, AutoModelForCausalLM loads it.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the model cannot be converted, or an argument is out of range; the message names what does not fit.
            The model is then as it was.
    """
    check_type("copy", copy, bool)
    if isinstance(model, ConvertedPreTrainedModel):
        raise ValueError(f"model: expected a dense one, got a {type(model).__name__}")
    dense = dense_class(model)
    own = selecting_sizes(model.config)
    if own is not None:
        for name, value in {"config": config, **{x: options.get(x) for x in ("branches", "share_index")}}.items():
            if value is not None:
                raise ValueError(f"{name}: expected None for a model that selects blocks itself, got {describe(value)}")
        config, options["branches"] = own, ("slc",)
    check_type("config", config, NSAConfig)
    config = given(config)
    share = options.pop("share_index", None)
    leaders = leaders_of(1 if share is None else share, len(full_layers(model)), config)
    chosen = asdict(BranchOptions(**options))
    chosen |= {"branches": list(check_branches(chosen["branches"])), "recompute": list(chosen["recompute"])}
    chosen |= {"share_index": [*leaders] if len({*leaders}) < len(leaders) else None}
    chosen |= {field.name: getattr(config, field.name) for field in fields(config)}
    chosen |= _read(model, own)
    written = {name: value for name, value in chosen.items() if value is not None}
    if len(chosen["branches"]) > 1 or config.index_heads is not None:  # new branches start from these weights
        for name, layer in full_layers(model):
            if any(parameter.is_meta for parameter in layer.parameters()):
                raise ValueError(f"device_map: expected all weights in memory, got those of {name} offloaded")
    new_config = _config_of(converted_config(type(model.config)), model, flexnsa=written)
    model = deepcopy(model) if copy else model
    before = model.config, model.base_model, dict(full_layers(model))
    layers = convert_layers(model, LayerOptions.of(new_config))
    _become(model, converted_class(dense), new_config, layers)
    try:
        check_cached_calls(model)
    except BaseException:
        _become(model, dense, before[0], before[2])
        raise
    vars(model).pop("_weight_conversions", None)  # of a checkpoint of the dense model
    return model


def _become(model: Any, model_class: Any, config: Any, layers: Mapping[str, nn.Module]) -> None:
    """Make a dense model a converted one, or the other way round: class, config and layers by name."""
    before = model.config
    become(model, model_class)
    take_layers(model, layers)
    for module in model.modules():
        if getattr(module, "config", None) is before:
            module.config = config


def _read(model: Any, own: NSAConfig | None) -> dict[str, Any]:
    """Return the options that make NSA layers compute as dense ones do, after checking that they then do."""
    styles: dict[int, str] = {}
    caps: set[float | None] = set()
    last = getattr(model.config, "max_position_embeddings", None) or 2**15
    sizes = NSAConfig() if own is None else replace(own, num_selected_blocks=TOKENS)
    with probing(model):
        for _, layer in full_layers(model) if own is not None else ():
            layer.indexer.topk_blocks = TOKENS  # all of them, because rounding decides between scores that are close
            if hasattr(layer.indexer, "compress_ratio"):
                layer.indexer.forward = lambda x, *_: x.new_ones(1, 1, 1, 1, dtype=torch.bool)
            last = TOKENS  # its blocks are of slots, which have to be positions
        for read in read_layers(model, dict(full_layers(model)), LAYERS, last):
            read.check_arguments()
            rotary, index = rotary_of(model, read.name), read.dense.layer_idx
            styles[index] = read.rotary_style(rotary)
            caps.add(softcap := read.attentions[0][1].kwargs.get("softcap"))
            options = LayerOptions(branches=("slc",), rotary=styles[index], softcap=softcap, sizes=sizes)
            read.check_same(ConvertedAttention(read.dense, rotary, options))
    if len(caps) > 1:
        raise ValueError(f"softcap: expected the same in all layers, got {caps}")
    several = len({*styles.values()}) > 1
    each = [styles.get(index, "none") for index in range(model.config.num_hidden_layers)]
    return {"rotary": each if several else next(iter(styles.values())), "softcap": caps.pop()}


def to_dense(model: Any) -> Any:
    """Return a copy of a converted model with layers of transformers again: dense ones, or those that selected before.

    Dense ones choose no blocks and need no indexer. The others select with the sizes that the model has now.

    Raises:
        ValueError: the model is not a converted one, or has other branches than the selected one, whose keys, values
            and gates a dense layer cannot hold; or it always selects the first blocks, which MSA does not.
    """
    if not isinstance(model, ConvertedPreTrainedModel):
        raise ValueError(f"model: expected a converted one, got a {type(model).__name__}")
    branches = LayerOptions.of(model.config).branches
    if branches != ("slc",):
        raise ValueError(f"branches: expected ('slc',) of a model to make dense, got {branches}")
    dense = dense_class(model)
    config = _config_of(dense.config_class, model)
    write_sizes(config, LayerOptions.of(model.config).sizes)
    with torch.device("meta"):
        shape = dense(deepcopy(config))
    config._attn_implementation_internal = shape.config._attn_implementation
    model = deepcopy(model)
    converted = {name: layer for name, layer in model.named_modules() if isinstance(layer, ConvertedAttention)}
    layers = {name: fill_dense(shape.get_submodule(name), layer) for name, layer in converted.items()}
    _become(model, dense, config, layers)
    return model


def _config_of(config_class: Any, model: Any, **others: Any) -> Any:
    """Make a config of a class with the entries that a dense model and a converted one share."""
    entries = {name: value for name, value in model.config.to_dict().items() if name not in NOT_SHARED}
    config = config_class(**entries, **others)
    config._experts_implementation_internal = getattr(model.config, "_experts_implementation_internal", None)
    return config
