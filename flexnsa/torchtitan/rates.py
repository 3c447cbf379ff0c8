"""Learning rates of compressors and indexers, as parameter groups of torchtitan's optimizers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from flexnsa.torchtitan.options import Options

COMPRESSORS = r"\.attention\.compress_[kv]\."
"""Pattern of the names of all parameters that compress keys and values."""
INDEXERS = r"\.attention\.indexer\."
"""Pattern of the names of all parameters of indexers."""


class NSAOptimizers(OptimizersContainer):
    """As :class:`OptimizersContainer`; a part of the model may lack compressors or indexers."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """As of :class:`OptimizersContainer`."""

    @staticmethod
    def _build_param_groups(
        model: nn.Module, param_group_configs: list[ParamGroupConfig], impl_kwargs: dict[str, Any]
    ) -> Any:
        names = [name for name, _ in model.named_parameters()]
        kept = [
            group
            for group in param_group_configs
            if group.pattern not in (COMPRESSORS, INDEXERS) or any(re.search(group.pattern, name) for name in names)
        ]
        return OptimizersContainer._build_param_groups(model, kept, impl_kwargs)


def groups_of(config: OptimizersContainer.Config, options: Options, layer: str) -> list[ParamGroupConfig]:
    """Return the groups of ``config``, behind one for compressors, and one for indexers, with rates of their own.

    Each is like the group that the parameters of that ``layer`` are in by ``config``, at a fraction of its rate; see
    :func:`flexnsa.optim.parameter_groups`. In a warm-up of indexers all others have rate 0, which keeps their bits.

    Raises:
        ValueError: they are in no group, or in one without a learning rate.
    """
    groups, others = list[ParamGroupConfig](), config.param_groups
    learns_compression = "cmp" in options.branches and options.compression != "mean"
    if learns_compression and options.compressor_lr != 1 and not options.warmup:
        groups.append(_scaled(config, COMPRESSORS, f"{layer}.compress_k.project.weight", options.compressor_lr))
    if options.has_indexer and (options.indexer_lr != 1 or options.warmup):
        groups.append(_scaled(config, INDEXERS, f"{layer}.indexer.change_q.up.weight", options.indexer_lr))
    if options.warmup:
        others = [replace(group, optimizer_kwargs=group.optimizer_kwargs | {"lr": 0.0}) for group in others]
    return [*groups, *others]


def _scaled(config: OptimizersContainer.Config, pattern: str, name: str, rate: float) -> ParamGroupConfig:
    """Return the group of the parameter ``name``, for those that match ``pattern``, at ``rate`` times its rate."""
    group = next((group for group in config.param_groups if re.search(group.pattern, name)), None)
    if group is None:
        raise ValueError(f"optimizer.param_groups: expected a group for {name}, got none")
    if "lr" not in group.optimizer_kwargs:
        raise ValueError(f"optimizer.param_groups: expected an lr in that of {group.pattern!r}, got none")
    options = group.optimizer_kwargs | {"lr": rate * group.optimizer_kwargs["lr"]}
    return replace(group, pattern=pattern, optimizer_kwargs=options)
