"""What a run's config becomes: attention layers, and the settings that have to know of them or to fit them."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import singledispatch
from typing import Any

from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import Configurable, ParallelismConfig, derive
from torchtitan.config.configs import DebugConfig
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import FusedQKVLinear, GQAttention, QKVLinear, ScaledDotProductAttention
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE

from flexnsa.layers.config import LayerConfig, leaders_of
from flexnsa.primitives import describe
from flexnsa.torchtitan.attention import NSAttention
from flexnsa.torchtitan.checkpointing import KeepingSelection
from flexnsa.torchtitan.metrics import NSAMetrics
from flexnsa.torchtitan.options import Options
from flexnsa.torchtitan.rates import NSAOptimizers, groups_of

MODEL = "model_spec.model."
"""What torchtitan puts before the names of a model's modules."""

SPLIT_BACKWARD = ("zbvzerobubble", "interleavedzerobubble", "dualpipev")
"""Schedules that differentiate inputs and weights apart, in two passes over a graph that the first one has freed."""


class Part(Configurable.Config, metaclass=ABCMeta):
    """Any part of a config that the override reads: the classes registered below, which have no other in common."""


for _kind in (
    GQAttention.Config,
    MetricsProcessor.Config,
    OptimizersContainer.Config,
    ParallelismConfig,
    DebugConfig,
    BaseCheckpointManager.Config,
    SelectiveAC.Config,
):
    Part.register(_kind)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the override does to a config.

    Args:
        options: of the layers.
        replaced: names of the layers that become NSA.
        dense: names of the others.
    """

    options: Options
    replaced: tuple[str, ...]
    dense: tuple[str, ...]

    @classmethod
    def of(cls, options: Options, names: Sequence[str]) -> Plan:
        """Choose among the layers that are in ``names``, those of all parts.

        Raises:
            ValueError: the model has no such layer, or a pattern matches none.
        """
        layers = [name.removeprefix(MODEL) for name in names if name.startswith(MODEL)]
        if not layers:
            raise ValueError("model_spec: expected a model with layers of GQAttention, got none")
        patterns = ("*",) if options.layers == "all" else options.layers
        patterns = (patterns,) if isinstance(patterns, str) else patterns
        for pattern in patterns:
            if not any(fnmatch(name, pattern) for name in layers):
                names_of = f"{layers[0]} .. {layers[-1]}"
                raise ValueError(f"layers: expected 'all' or patterns of {names_of}, got {describe(pattern)}")
        chosen = [name for name in layers if any(fnmatch(name, pattern) for pattern in patterns)]
        return cls(options, tuple(chosen), tuple(name for name in layers if name not in chosen))


@singledispatch
def adapted(part: Any, name: str, _plan: Plan) -> Any:
    """Return what the part of that name becomes.

    Raises:
        ValueError: it cannot become that, or does not fit; the message names it.
    """
    raise TypeError(f"{name}: expected a part that the override reads, got {describe(part)}")


@adapted.register
def _(part: GQAttention.Config, name: str, plan: Plan) -> GQAttention.Config:
    name = name.removeprefix(MODEL)
    if name in plan.dense:
        return part
    _check_dense(name, part)
    LayerConfig(  # the options have to fit the layer as they have to fit one of the library
        dim=part.dim,
        num_heads=part.n_heads,
        num_kv_heads=part.n_kv_heads or part.n_heads,
        head_dim=part.head_dim or part.dim // part.n_heads,
        nsa=plan.options.sizes,
        branches=plan.options.branches,
        index_rank=plan.options.index_rank,
    )
    # torchtitan makes a mask of all tokens if the first layer's attention asks for one. NSA does not read it.
    inner = part.inner_attention if plan.dense else ScaledDotProductAttention.Config()
    leader = leaders_of(plan.options.share_index, len(plan.replaced), plan.options.sizes)[plan.replaced.index(name)]
    leader = None if plan.replaced[leader] == name else leader
    return derive(part, NSAttention.Config, options=plan.options, leader=leader, inner_attention=inner)


@adapted.register
def _(part: MetricsProcessor.Config, name: str, plan: Plan) -> MetricsProcessor.Config:
    _check_kind(name, part, MetricsProcessor.Config)
    return derive(part, NSAMetrics.Config, options=plan.options)


@adapted.register
def _(part: OptimizersContainer.Config, name: str, plan: Plan) -> OptimizersContainer.Config:
    groups = groups_of(part, plan.options, plan.replaced[0])
    if len(groups) == len(part.param_groups):
        return part
    _check_kind(name, part, OptimizersContainer.Config)
    return derive(part, NSAOptimizers.Config, param_groups=groups)


@adapted.register
def _(part: SelectiveAC.Config, name: str, plan: Plan) -> SelectiveAC.Config:  # noqa: ARG001
    return derive(part, KeepingSelection.Config) if type(part) is SelectiveAC.Config else part


@adapted.register
def _(part: BaseCheckpointManager.Config, name: str, plan: Plan) -> BaseCheckpointManager.Config:
    if part.last_save_in_hf and (plan.options.has_indexer or len(plan.options.branches) > 1):
        reason = "the dense model's format has no place for new parameters (flexnsa.torchtitan.export has)"
        raise ValueError(f"{name}.last_save_in_hf: expected False, because {reason}, got True")
    return part


@adapted.register
def _(part: ParallelismConfig, name: str, plan: Plan) -> ParallelismConfig:
    shares_tokens = part.context_parallel_degree > 1
    backends = ("partial_dtensor",) if shares_tokens else ("partial_dtensor", "spmd_types")
    if part.spmd_backend not in backends:
        raise ValueError(f"{name}.spmd_backend: expected {' or '.join(map(repr, backends))}, got {part.spmd_backend!r}")
    if part.pipeline_parallel_degree > 1 and part.pipeline_parallel_schedule.lower() in SPLIT_BACKWARD:
        got = repr(part.pipeline_parallel_schedule)
        raise ValueError(f"{name}.pipeline_parallel_schedule: expected one that runs backward at once, got {got}")
    if part.pipeline_parallel_degree > 1 and plan.options.share_index != 1:
        got = plan.options.share_index
        raise ValueError(f"share_index: expected 1 with pipeline stages, which hand on no index, got {got}")
    if shares_tokens and plan.options.warmup:
        raise ValueError("warmup: expected False where ranks share tokens, which attend to chosen blocks, got True")
    if shares_tokens and part.context_parallel_load_balancer != "headtail":
        got = repr(part.context_parallel_load_balancer)
        raise ValueError(f"{name}.context_parallel_load_balancer: expected 'headtail', got {got}")
    return part


@adapted.register
def _(part: DebugConfig, name: str, plan: Plan) -> DebugConfig:  # noqa: ARG001
    if part.spmd_typechecking:
        raise ValueError(f"{name}.spmd_typechecking: expected False, as NSA's operators have no such types, got True")
    return part


def _check_dense(name: str, part: GQAttention.Config) -> None:
    """Check that NSA can take the place of a layer: that it is an ordinary one, of parts that are known here."""
    _check_kind(name, part, GQAttention.Config)
    qkv = part.qkv_linear
    _check_kind(f"{name}.qkv_linear", qkv, FusedQKVLinear.Config, QKVLinear.Config)
    maps = ("wqkv",) if isinstance(qkv, FusedQKVLinear.Config) else ("wq", "wkv")
    for key in maps:
        _check_kind(f"{name}.qkv_linear.{key}", getattr(qkv, key), Linear.Config)
    _check_kind(f"{name}.wo", part.wo, Linear.Config)
    _check_kind(f"{name}.rope", part.rope, ComplexRoPE.Config, CosSinRoPE.Config)
    window = getattr(part.inner_attention, "window_size", (-1, 0))
    if tuple(window) != (-1, 0):
        raise ValueError(f"{name}.inner_attention.window_size: expected (-1, 0), all tokens before, got {window}")


def _check_kind(name: str, part: object, *kinds: type) -> None:
    """Check that a part is of one of some classes, and of none derived from them, which may do something else."""
    if type(part) not in kinds:
        expected = " or ".join(kind.__qualname__ for kind in kinds)
        raise ValueError(f"{name}: expected {expected}, got {type(part).__qualname__}")
