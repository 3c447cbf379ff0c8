"""Conversion of a pretrained dense model to one with NSA layers, and back where that loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, fields
from typing import Any

import torch

from flexnsa.checks.calls import check_branches
from flexnsa.checks.primitives import check_type
from flexnsa.config import NSAConfig
from flexnsa.layers.config import BranchOptions
from flexnsa.layers.starting import starting_values
from flexnsa.transformers.converted import check_dense
from flexnsa.transformers.families import FAMILIES, Family

NOT_SHARED = ("model_type", "architectures", "transformers_version", "attn_implementation", "flexnsa")
"""Config entries of one model that have no meaning, or another, in the config of the other."""


def convert(model: Any, config: NSAConfig, **options: Any) -> Any:
    """Give a copy of a pretrained model with NSA layers in the place of its dense ones.

    All branches start with the dense layer's projections of keys and values, compressors as means, and an indexer as
    the mean of the selected branch's keys. Gates start at 1 for the selected branch and at 0.02 for the others, for
    every token. With ``branches=("slc",)`` there is no gate, and the new model equals the dense one as long as all
    blocks are selected, for up to ``n * l'`` tokens. With all three branches it differs from that by 0.02 times the
    outputs of the other two.

    Args:
        model: a Llama, Qwen2, Qwen3 or Mistral model for causal language modelling, without dropout and windows.
        config: sizes of the branches.
        options: ``branches``, ``impl``, ``recompute`` and ``index_rank``, the fields of
            :class:`flexnsa.layers.config.BranchOptions`.

    Returns:
        A model of its own class, frozen where the dense one is. Once saved, AutoModelForCausalLM loads it.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the model cannot be converted, or an argument is out of range; the message names it.
    """
    check_type("config", config, NSAConfig)
    family = _family(model, lambda family: family.dense)
    check_dense(model.model.layers[0].self_attn)
    chosen = asdict(BranchOptions(**options))
    branches = check_branches(chosen["branches"])
    chosen |= {"branches": list(branches), "recompute": list(chosen["recompute"])}
    chosen |= {field.name: getattr(config, field.name) for field in fields(config)}
    written = {name: value for name, value in chosen.items() if value is not None}
    with torch.device("meta"):
        converted = family.model(family.config(**_shared(model), flexnsa=written))

    def names_of(name: str) -> list[str]:
        for kind in ("k_proj", "v_proj"):
            if f"self_attn.{kind}." in name:
                return [name.replace(kind, f"{kind}_{tag}") for tag in branches]
        return [name]

    return _finish(converted, model, names_of)


def to_dense(model: Any) -> Any:
    """Return a copy of a converted model with dense layers again, which choose no blocks and need no indexer.

    Raises:
        ValueError: the model is not a converted one, or has other branches than the selected one, whose keys, values
            and gates a dense layer cannot hold.
    """
    family = _family(model, lambda family: family.model)
    branches = model.model.layers[0].self_attn.options.branches
    if branches != ("slc",):
        raise ValueError(f"branches: expected ('slc',) of a model to make dense, got {branches}")
    with torch.device("meta"):
        dense = family.dense(family.dense.config_class(**_shared(model)))
    return _finish(dense, model, lambda name: [] if ".indexer." in name else [name.replace("_proj_slc", "_proj")])


def _family(model: Any, kind: Any) -> Family:
    """Return the family in which ``kind`` picks the class of a model."""
    for family in FAMILIES:
        if type(model) is kind(family):
            return family
    expected = ", ".join(kind(family).__name__ for family in FAMILIES)
    raise ValueError(f"model: expected one of {expected}, got {type(model).__name__}")


def _shared(model: Any) -> dict[str, Any]:
    """Return the config entries that a dense model and a converted one share."""
    return {name: value for name, value in model.config.to_dict().items() if name not in NOT_SHARED}


def _finish(new: Any, old: Any, names_of: Callable[[str], list[str]]) -> Any:
    """Fill a model on the meta device with the old state and initial values of new parameters, frozen as the old."""
    state = {name: tensor.clone() for old_name, tensor in old.state_dict().items() for name in names_of(old_name)}
    for index, layer in enumerate(new.model.layers):
        like = state[f"model.layers.{index}.self_attn.q_proj.weight"]
        for name, module in layer.self_attn.named_modules():
            for parameter, tensor in starting_values(module).items():
                state[f"model.layers.{index}.self_attn.{name}.{parameter}"] = tensor.to(like)
        if hasattr(layer.self_attn, "rotary_emb"):
            layer.self_attn.rotary_emb = deepcopy(old.model.rotary_emb)
    new.model.rotary_emb = deepcopy(old.model.rotary_emb)
    new.load_state_dict(state, assign=True)
    new.tie_weights()
    for old_name, parameter in old.named_parameters():
        for name in names_of(old_name):
            new.get_parameter(name).requires_grad_(parameter.requires_grad)
    new.generation_config = deepcopy(old.generation_config)
    return new.train(old.training)
