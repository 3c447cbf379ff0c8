"""What a layer starts from: settings by name, and the parameters of a layer that takes the place of a dense one.

The named settings are those that learned text best, and the paper's. A layer in the place of a dense one starts so that
it computes nearly what the dense one does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypedDict

import torch
from torch import Tensor, nn

from flexnsa.config import NSAConfig
from flexnsa.layers.compression import BlockLinear
from flexnsa.layers.config import LayerConfig
from flexnsa.layers.indexer import Change
from flexnsa.layers.key_indexer import IndexNorm
from flexnsa.layers.sharding import write
from flexnsa.primitives import check_choice

LAYER_PRESETS = ("text", "paper")

GATE_LIMIT = 2.0
"""Gates are this times a sigmoid, so that one can start at 1 where the sigmoid is steepest."""
GATE_STARTS = {"cmp": 0.02, "slc": 1.0, "win": 0.02}
"""The selected branch alone is what the dense layer was; the others start alive, but of no weight."""


class Settings(TypedDict):
    """The fields of :class:`LayerConfig` that a preset sets."""

    nsa: NSAConfig
    compression: str
    gate: str
    rope_base: float
    shared_keys: bool
    begin_as_mean: bool
    index_rank: int | None


PAPER: Settings = {
    "nsa": NSAConfig(),
    "compression": "mlp",
    "gate": "sigmoid",
    "rope_base": 10_000.0,
    "shared_keys": False,
    "begin_as_mean": False,
    "index_rank": None,
}
"""The paper's settings, and what it leaves open."""


def text(num_heads: int, num_kv_heads: int, **sizes: int) -> Settings:
    """Return the settings that learned text best (docs/learning.md), with other ``sizes`` of its ``nsa``."""
    nsa = NSAConfig.for_text(num_heads, num_kv_heads, **sizes)
    return {**PAPER, "nsa": nsa, "gate": "residual", "rope_base": 1e8, "shared_keys": True, "begin_as_mean": True}


def describe_layer(
    preset: str | None,
    dim: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    branches: tuple[str, ...],
    options: Mapping[str, object],
) -> LayerConfig:
    """Describe a layer by a preset and the options that are not None; what its branches give no meaning is off.

    The default preset is ``text``, or ``paper`` where ``options`` have ``nsa``.

    Raises:
        TypeError: an option is not of its kind.
        ValueError: there is no such preset, or an option does not fit the others.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    name = preset or ("paper" if "nsa" in chosen else "text")
    check_choice("preset", name, LAYER_PRESETS)
    settings = PAPER if name == "paper" else text(num_heads, num_kv_heads)
    sizes = LayerConfig(dim=dim, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, **settings)
    return replace(sizes.with_branches(branches), **chosen)


class StartingGate(nn.Linear):
    """Map hidden states to a gate for each head and branch, which starts the same for all tokens."""

    def __init__(self, dim: int, num_heads: int, branches: tuple[str, ...]) -> None:
        self.branches = branches
        super().__init__(dim, num_heads * len(branches))  # pyright: ignore[reportUnknownMemberType]

    def reset_parameters(self) -> None:
        """Start at :data:`GATE_STARTS`."""
        start(self)


@torch.no_grad()
def start(module: nn.Module) -> None:
    """Give the parameters of a module, and of those within it, the values that they start with."""
    for part in module.modules():
        for name, value in starting_values(part).items():
            write(part.get_parameter(name), value)


def starting_values(module: nn.Module) -> dict[str, Tensor]:
    """Return the initial parameters, by name, of a module that a dense layer has not; of other modules, none."""
    if isinstance(module, StartingGate):
        starts = torch.tensor([GATE_STARTS[tag] / GATE_LIMIT for tag in module.branches])
        bias = starts.logit().repeat(module.out_features // len(module.branches))
        return {"weight": torch.zeros(module.weight.shape), "bias": bias}
    if isinstance(module, BlockLinear):
        return {"position": torch.zeros(module.position.shape), "weight": module.mean_weight()}
    if isinstance(module, IndexNorm):
        return {"weight": torch.zeros(module.weight.shape)}
    if isinstance(module, Change):
        rank = None if module.down is None else module.down.out_features
        fresh = Change(module.first.in_features, module.up.out_features, rank)
        return {name: parameter.detach() for name, parameter in fresh.named_parameters()}
    return {}
