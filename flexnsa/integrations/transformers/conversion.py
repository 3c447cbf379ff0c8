"""From a pretrained dense model to one with NSA layers, and back where nothing would be lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict
from typing import Any

import torch

from flexnsa.argument_checks import check_branches
from flexnsa.config import NSAConfig
from flexnsa.geometry import BRANCHES
from flexnsa.integrations.transformers.attention import starting_values
from flexnsa.integrations.transformers.converted import check_dense
from flexnsa.integrations.transformers.families import FAMILIES, Family
from flexnsa.validation import check_type

NOT_SHARED = ("model_type", "architectures", "transformers_version", "attn_implementation", "flexnsa")
"""What stands in the config of one model, and means something else or nothing in that of the other."""


def convert(
    model: Any,
    config: NSAConfig,
    *,
    branches: Sequence[str] = BRANCHES,
    impl: str = "auto",
    recompute: Sequence[str] = (),
) -> Any:
    """Give a copy of a pretrained model with NSA layers in the place of its dense ones.

    All branches begin with the dense layer's keys and values, blocks are compressed by their mean, and gates begin at 1
    for the selected branch and at 0.02 for the others, for every token. With ``branches=("slc",)`` there is no gate,
    and the new model is the dense one as long as all blocks are selected, for up to ``n * l'`` tokens. With all three
    it differs from that by the outputs of the other two, times 0.02 each.

    Args:
        model: a Llama, Qwen2, Qwen3 or Mistral model for causal language modelling, without dropout and windows.
        config: sizes of the branches.
        branches: any of ``cmp``, ``slc``, ``win``.
        impl: as in :func:`flexnsa.native_sparse_attention`.
        recompute: as in :func:`flexnsa.native_sparse_attention`.

    Returns:
        A model of a class of its own, frozen where the dense one is, which AutoModelForCausalLM loads once it has been
        saved.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: the model cannot be converted, or an argument is out of range; the message names it.
    """
    check_type("config", config, NSAConfig)
    family = _family(model, lambda family: family.dense)
    check_dense(model.model.layers[0].self_attn)
    branches = check_branches(branches)
    options = {**asdict(config), "branches": list(branches), "impl": impl, "recompute": list(recompute)}
    with torch.device("meta"):
        converted = family.model(family.config(**_shared(model), flexnsa=options))

    def names_of(name: str) -> list[str]:
        for kind in ("k_proj", "v_proj"):
            if f"self_attn.{kind}." in name:
                return [name.replace(kind, f"{kind}_{tag}") for tag in branches]
        return [name]

    return _finish(converted, model, names_of)


def to_dense(model: Any) -> Any:
    """Give a copy of a converted model with dense layers again, which see all tokens.

    Raises:
        ValueError: the model is no converted one, or has other branches than the selected one: they have keys, values
            and gates that a dense layer has no place for.
    """
    family = _family(model, lambda family: family.model)
    branches = model.model.layers[0].self_attn.options.branches
    if branches != ("slc",):
        raise ValueError(f"branches: expected ('slc',) of a model to make dense, got {branches}")
    with torch.device("meta"):
        dense = family.dense(family.dense.config_class(**_shared(model)))
    return _finish(dense, model, lambda name: [name.replace("_proj_slc", "_proj")])


def _family(model: Any, kind: Any) -> Family:
    """Find the family of which a model has the class that ``kind`` picks."""
    for family in FAMILIES:
        if type(model) is kind(family):
            return family
    expected = ", ".join(kind(family).__name__ for family in FAMILIES)
    raise ValueError(f"model: expected one of {expected}, got {type(model).__name__}")


def _shared(model: Any) -> dict[str, Any]:
    """Give what the configs of a dense model and of a converted one have in common."""
    return {name: value for name, value in model.config.to_dict().items() if name not in NOT_SHARED}


def _finish(new: Any, old: Any, names_of: Callable[[str], list[str]]) -> Any:
    """Bring a model on the meta device to life: with the old state, frozen as it was, and what is new as it starts."""
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
