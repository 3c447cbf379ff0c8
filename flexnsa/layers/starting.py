"""Where parameters start that a dense layer has not: so that the layers compute nearly what the dense ones do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flexnsa.layers.compression import BlockLinear
from flexnsa.layers.indexer import Change
from flexnsa.layers.sharding import write

GATE_LIMIT = 2.0
"""Gates are this times a sigmoid, so that one can start at 1 where the sigmoid is steepest."""
GATE_STARTS = {"cmp": 0.02, "slc": 1.0, "win": 0.02}
"""The selected branch alone is what the dense layer was; the others start alive, but of no weight."""


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
    if isinstance(module, Change):
        rank = None if module.down is None else module.down.out_features
        fresh = Change(module.first.in_features, module.up.out_features, rank)
        return {name: parameter.detach() for name, parameter in fresh.named_parameters()}
    return {}
