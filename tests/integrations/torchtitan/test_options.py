"""Which layers become NSA, beside what and at which rates; what is wrong is refused before anything is built."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import derive
from torchtitan.config.override import apply_overrides
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.attention import FlexAttention, GQAttention, ScaledDotProductAttention, VarlenAttention

from flexnsa import NSAConfig
from flexnsa.optim import COMPRESSOR_LR, INDEXER_LR, parameter_groups
from flexnsa.torchtitan.attention import NSAttention
from flexnsa.torchtitan.checkpointing import KeepingSelection
from tests.integrations.torchtitan.models import adapted
from tests.integrations.torchtitan.others import Counting, Halved, LowBits, Scaled
from tests.integrations.torchtitan.runs import FEW, INDEXER, config_of, override

OTHERS = "tests.integrations.torchtitan.others"


def kinds(config: Any) -> list[type]:
    return [type(layer.attention) for layer in config.model_spec.model.layers]


@pytest.mark.parametrize(
    ("layers", "replaced"),
    [
        ("all", [0, 1, 2, 3]),
        ("*", [0, 1, 2, 3]),
        ("layers.[1-2].attention", [1, 2]),
        (["layers.0.*", "*.3.*"], [0, 3]),
        (["layers.0.*", "layers.0.attention"], [0]),
    ],
)
def test_the_layers_of_that_name_are_replaced(layers: Any, replaced: list[int]) -> None:
    chosen = kinds(adapted("llama", **FEW, layers=layers))
    assert chosen == [NSAttention.Config if index in replaced else GQAttention.Config for index in range(4)]


def test_masks_are_made_for_dense_layers_alone() -> None:
    """Of the first layer torchtitan asks whether all have a mask, which it then makes of every two tokens."""

    def first(**options: Any) -> Any:
        config = config_of("llama", Path(), override(**FEW, **options))
        model: Any = config.model_spec
        for layer in model.model.layers:
            layer.attention.inner_attention = FlexAttention.Config()
        apply_overrides(config.override, config)
        return type(model.model.first_attention.inner_attention)

    assert first() is ScaledDotProductAttention.Config
    assert first(layers="layers.0.*") is FlexAttention.Config


def test_another_override_replaces_other_nodes() -> None:
    config = config_of("llama", Path(), override(**FEW, layers="layers.0.*"))
    config.override.imports.append(f"{OTHERS}.halve")
    apply_overrides(config.override, config)
    assert kinds(config)[:2] == [NSAttention.Config, GQAttention.Config]
    model: Any = config.model_spec
    assert all(type(layer.feed_forward) is Halved.Config for layer in model.model.layers)


def test_another_override_of_the_same_node_is_refused_and_leaves_nothing_behind() -> None:
    config = config_of("llama", Path(), override(**FEW))
    config.override.imports.append(f"{OTHERS}.scale")
    with pytest.raises(ValueError, match=r"both claim node 'model_spec\.model\.layers\.0\.attention'"):
        apply_overrides(config.override, config)
    chosen = kinds(adapted("llama", **FEW, layers="layers.1.*"))
    assert chosen == [GQAttention.Config, NSAttention.Config, GQAttention.Config, GQAttention.Config]


def test_selective_checkpointing_keeps_the_selection_and_other_kinds_stay() -> None:
    for name, kind in (("selective", KeepingSelection), ("full", FullAC)):
        config = adapted("llama", f"activation-checkpoint:{name}", **FEW)
        assert type(config.activation_checkpoint) is kind.Config
    assert adapted("llama", **FEW).activation_checkpoint is None


def test_a_config_is_adapted_once() -> None:
    config = adapted("llama", **FEW)
    with pytest.raises(ValueError, match=r"^layers\.0\.attention: expected GQAttention\.Config, got NSAttention\.Con"):
        apply_overrides(config.override, config)


PATTERNS = "layers: expected 'all' or patterns of layers.0.attention .. layers.3.attention, got"
WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"num_blocks": 4}, "options: expected some of branches, compress_block_size, "),
    ({"sizes": {}}, "options: expected some of "),
    (asdict(NSAConfig.msa()), "index_score: expected None of layers in torchtitan"),
    ({"head_dim": 16}, "head_dim: expected none of a layer that starts as a dense one, got 16"),
    ({"rope_base": 1e6}, "rope_base: expected none of a layer that starts as a dense one"),
    ({"gate": "softmax"}, "gate: expected none of a layer that starts as a dense one, got 'softmax'"),
    ({"begin_as_mean": False}, "begin_as_mean: expected none of a layer that starts as a dense one"),
    ({"branches": ["cmp", "win"]}, "branches: expected slc among them"),
    ({"branches": ["slc"], "shared_keys": True}, "shared_keys: expected False without the branches cmp and slc"),
    ({"index_heads": 3}, "index_heads: expected a divisor of the 2 query heads of a key head, got 3"),
    ({"layers": "layers.4.*"}, f"{PATTERNS} 'layers.4.*'"),
    ({"layers": ["layers.0.*", "layers.7.*"]}, f"{PATTERNS} 'layers.7.*'"),
    ({"share_index": 2}, "share_index: expected 1 without an indexer (index_heads), got 2"),
    ({**INDEXER, "share_index": [0]}, "share_index: expected a number for each of 4 layers, got 1"),
    ({"layers": [0]}, "layers: expected str, got 0"),
    ({"layers": 3}, "layers: expected Sequence, got 3"),
    ({"packed": 1}, "packed: expected bool, got 1"),
    ({"warmup": 1}, "warmup: expected bool, got 1"),
    ({"warmup": True}, "warmup: expected False without indexers that learn, got True"),
    ({"selection_loss_weight": -1}, "selection_loss_weight: expected at least 0, got -1"),
    ({"compressor_lr": "0.1"}, "compressor_lr: expected a number, got '0.1'"),
    ({"indexer_lr": float("inf")}, "indexer_lr: expected a finite number, got inf"),
    ({"num_queries": 0}, "num_queries: expected at least 1, got 0"),
    ({"seed": 0.5}, "seed: expected an int, got 0.5"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS, ids=[str(options) for options, _ in WRONG_OPTIONS])
def test_a_wrong_option_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        adapted("llama", **{**FEW, **options})


def to(kind: type) -> Callable[[Any], Any]:
    """Give what makes a part one of another kind."""
    return lambda part: derive(part, kind)


LAYER = "model_spec.model.layers.1.attention"
WRONG_PARTS: list[tuple[str, Callable[[Any], Any], str]] = [
    (
        f"{LAYER}.qkv_linear.wqkv",
        to(LowBits.Config),
        "layers.1.attention.qkv_linear.wqkv: expected Linear.Config, got LowBits.Config",
    ),
    (f"{LAYER}.wo", to(LowBits.Config), "layers.1.attention.wo: expected Linear.Config, got LowBits.Config"),
    (LAYER, to(Scaled.Config), "layers.1.attention: expected GQAttention.Config, got Scaled.Config"),
    (
        f"{LAYER}.inner_attention",
        lambda _: VarlenAttention.Config(window_size=(127, 0)),
        "layers.1.attention.inner_attention.window_size: expected (-1, 0), all tokens before, got (127, 0)",
    ),
    ("metrics", to(Counting.Config), "metrics: expected MetricsProcessor.Config, got Counting.Config"),
    (
        "optimizer.param_groups",
        lambda groups: [replace(groups[0], optimizer_kwargs={})],
        "optimizer.param_groups: expected an lr in that of '.*', got none",
    ),
    (
        "optimizer.param_groups",
        lambda groups: [replace(groups[0], pattern="wo")],
        "optimizer.param_groups: expected a group for layers.0.attention.compress_k.project.weight, got none",
    ),
    ("model_spec.model.layers", lambda _: [], "model_spec: expected a model with layers of GQAttention, got none"),
]


@pytest.mark.parametrize(("path", "make", "message"), WRONG_PARTS, ids=[message for *_, message in WRONG_PARTS])
def test_a_part_that_cannot_be_adapted_is_refused_by_name(path: str, make: Callable[[Any], Any], message: str) -> None:
    part: Any = config_of("llama", Path(), override(**FEW))
    config, (*parents, name) = part, path.split(".")
    for parent in parents:
        part = part[int(parent)] if parent.isdigit() else getattr(part, parent)
    setattr(part, name, make(getattr(part, name)))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        apply_overrides(config.override, config)


TYPES, CONTEXT = "--parallelism.spmd_backend=spmd_types", "--parallelism.context_parallel_degree=2"
STAGES, SCHEDULE = "--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule"
HELD = "--checkpoint.last_save_model_only --checkpoint.last_save_in_hf"
WRONG_SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("--parallelism.spmd_backend=full_dtensor", {}, "expected 'partial_dtensor' or 'spmd_types', got 'full_dtensor'"),
    (f"{CONTEXT} {TYPES}", {}, "expected 'partial_dtensor', got 'spmd_types'"),
    (f"{TYPES} --debug.spmd_typechecking", {}, "expected False, as NSA's operators have no such types, got True"),
    (f"{CONTEXT} --parallelism.context_parallel_load_balancer=ptrr", {}, "expected 'headtail', got 'ptrr'"),
    (CONTEXT, {"warmup": True}, "warmup: expected False where ranks share tokens, which attend to chosen blocks, got"),
    (STAGES, {"share_index": 2}, "share_index: expected 1 with pipeline stages, which hand on no index, got 2"),
    (f"{STAGES} {SCHEDULE}=ZBVZeroBubble", {}, "expected one that runs backward at once, got 'ZBVZeroBubble'"),
    (HELD, {}, "expected False, because the dense model's format has no place for new parameters"),
]
"""Arguments, of which the last has a wrong value, or options of the override."""


@pytest.mark.parametrize(("arguments", "options", "message"), WRONG_SETTINGS)
def test_a_setting_that_does_not_fit_is_refused_by_name(arguments: str, options: dict[str, Any], message: str) -> None:
    *_, (name, *_) = (each.removeprefix("--").split("=") for each in arguments.split())
    with pytest.raises(ValueError, match="^" + re.escape(message if options else f"{name}: {message}")):
        adapted("llama", *arguments.split(), **INDEXER, **options)


def test_the_dense_format_holds_what_has_no_new_parameters() -> None:
    adapted("llama", *HELD.split(), **FEW, branches=["slc"])


LR = 3e-3


def rates(*arguments: str, **options: Any) -> tuple[dict[str, float], Any]:
    """Give the learning rate of each parameter of a model by its name, and the model."""
    config = adapted("llama", *arguments, **options)
    spec: Any = config.model_spec
    model = spec.model.build()
    optimizers = config.optimizer.build(model_parts=[model])
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return {name: group["lr"] for group in groups for name in group["param_names"]}, model


@pytest.mark.parametrize("options", [FEW, INDEXER, INDEXER | {"compression": "mlp", "index_rank": 4}])
@pytest.mark.parametrize("own", [{}, {"compressor_lr": 0.5, "indexer_lr": 0.2}])
def test_rates_are_those_of_the_library(options: dict[str, Any], own: dict[str, float]) -> None:
    found, model = rates(**options, **own)
    relative = {"compressor_lr": COMPRESSOR_LR, "indexer_lr": INDEXER_LR, **own}
    expected = {
        parameter: group["lr"] for group in parameter_groups(model, lr=LR, **relative) for parameter in group["params"]
    }
    assert found == pytest.approx({name: expected[parameter] for name, parameter in model.named_parameters()})
    assert len({*found.values()}) > 1


def test_there_is_no_group_without_a_rate_of_its_own() -> None:
    config = adapted("llama", **INDEXER, compressor_lr=1.0)
    assert type(config.optimizer) is OptimizersContainer.Config
    assert len(config.optimizer.param_groups) == 1


def test_a_group_is_like_the_one_that_its_parameters_were_in() -> None:
    config = adapted("llama", **INDEXER, indexer_lr=0.5)
    compressors, indexers, every = config.optimizer.param_groups
    assert compressors == replace(every, pattern=compressors.pattern, optimizer_kwargs=compressors.optimizer_kwargs)
    kept = {**every.optimizer_kwargs, "lr": 0}
    assert {**compressors.optimizer_kwargs, "lr": 0} == kept == {**indexers.optimizer_kwargs, "lr": 0}
