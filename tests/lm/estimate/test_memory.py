"""The memory estimate against what a model really allocates, and the closed forms against counts by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness.memory import AllocatorProbe, saved_for_backward
from flexnsa import NSAConfig, SelectionLoss
from flexnsa.attention.flex.footprint import FOOTPRINT as FLEX
from flexnsa.attention.footprint import AttentionSizes
from flexnsa.attention.triton.footprint import FOOTPRINT as TRITON
from flexnsa.lm import PRESETS, DecoderConfig, DecoderLM, preset
from flexnsa.lm.estimate import estimate_decoding, estimate_training, parameter_count
from flexnsa.lm.estimate.training import Precision
from flexnsa.lm.estimate.work import Work
from tests.support.inputs import SMALL

TINY = DecoderConfig(dim=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, nsa=SMALL)
INDEXED = replace(SMALL, index_heads=2, index_block_size=4, index_stride=4)
MODELS = {
    "tiny": (TINY, 256),
    "tiny, dense": (replace(TINY, attention="dense"), 256),
    "tiny, checkpointed": (replace(TINY, checkpointing=True), 256),
    "tiny, the last layers checkpointed": (replace(TINY, num_layers=12, checkpointing="4:12"), 64),
    "tiny, mean of blocks, no window": (replace(TINY, compression="mean", branches=("cmp", "slc")), 256),
    "tiny, one key head, narrow values": (replace(TINY, num_kv_heads=1, v_head_dim=8), 256),
    "tiny, shared keys": (replace(TINY, shared_keys=True, v_head_dim=24), 256),
    "tiny, wide head": (replace(TINY, num_layers=1, vocab_size=8192), 256),
    "tiny, branches run again": (replace(TINY, compression="mean", recompute=("cmp", "slc", "win")), 256),
    "tiny, checkpointed and run again": (replace(TINY, checkpointing=True, recompute=("win",)), 256),
    "tiny, an indexer": (replace(TINY, nsa=INDEXED), 256),
    "tiny, an indexer of low rank, linear": (replace(TINY, nsa=INDEXED, index_rank=4, compression="linear"), 512),
    "tiny, a shared index": (replace(TINY, nsa=INDEXED, share_index=2), 256),
    "tiny, a shared index, checkpointed": (replace(TINY, nsa=INDEXED, share_index=3, checkpointing="1:3"), 256),
    "tiny, an indexer, blocks alone": (replace(TINY, nsa=INDEXED, compression="mean", branches=("slc",)), 256),
    "large, one layer": (preset("large", num_layers=1), 256),
}
BOTH: list[Precision] = ["fp32", "bf16"]


def measure(config: DecoderConfig, seq_len: int, precision: Precision) -> dict[str, int]:
    """Bytes of a forward and backward pass: saved, after forward, and the peak of both."""
    tokens = torch.randint(config.vocab_size, (1, seq_len))
    with AllocatorProbe() as probe:
        model = DecoderLM(config)
        own = tokens.clone()
        probe.mark("model")
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
        selection = None if config.nsa.index_heads is None else SelectionLoss()
        with saved_for_backward(list(model.parameters())) as saved, autocast:
            loss = model(own, targets=own, selection=selection)
            loss = loss if selection is None else loss + selection.total
        saved_bytes = saved.total
        probe.mark("forward")
        loss.backward()
        probe.mark("backward")
    return {
        "saved": saved_bytes,
        "after_forward": probe.at["forward"],
        "peak": max(probe.peak["forward"], probe.peak["backward"]),
    }


@pytest.mark.parametrize(
    ("name", "precision"),
    [(name, each) for at, name in enumerate(MODELS) for each in (BOTH if at < 2 else [BOTH[at % 2]])],
)
def test_estimate_is_within_a_tenth(name: str, precision: Precision) -> None:
    config, seq_len = MODELS[name]
    measured = measure(config, seq_len, precision)
    figures = estimate_training(config, seq_len=seq_len, precision=precision)
    estimated = {
        "saved": figures.saved,
        "after_forward": figures.after_forward,
        "peak": max(figures.peak_forward, figures.peak_training),
    }
    ratios = {quantity: estimated[quantity] / value for quantity, value in measured.items()}
    assert ratios == {quantity: pytest.approx(1, abs=0.1) for quantity in measured}


@pytest.mark.parametrize("precision", BOTH)
def test_checkpointed_layers_keep_the_gradients_of_the_selection_loss(precision: Precision) -> None:
    config = replace(TINY, nsa=INDEXED, checkpointing=True)
    measured = measure(config, 256, precision)  # but for "saved": hooks do not see what a policy keeps
    figures = estimate_training(config, seq_len=256, precision=precision)
    assert figures.after_forward == pytest.approx(measured["after_forward"], rel=0.1)
    assert max(figures.peak_forward, figures.peak_training) == pytest.approx(measured["peak"], rel=0.1)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_counted(name: str) -> None:
    config, _ = MODELS[name]
    with torch.device("meta"):
        assert parameter_count(config) == sum(parameter.numel() for parameter in DecoderLM(config).parameters())


@pytest.mark.parametrize("precision", BOTH)
@pytest.mark.parametrize(
    ("own", "change", "tolerance"),
    [(TINY, {"shared_keys": True}, 0), (replace(TINY, nsa=INDEXED), {"share_index": 3}, 0.03)],
    ids=["keys", "index"],
)
def test_what_sharing_saves_is_estimated(
    own: DecoderConfig, change: dict[str, Any], tolerance: float, precision: Precision
) -> None:
    configs = own, replace(own, **change)
    before, after = (measure(config, 256, precision)["saved"] for config in configs)
    more, less = (estimate_training(config, seq_len=256, precision=precision).saved for config in configs)
    assert more - less == pytest.approx(before - after, rel=tolerance, abs=0)


@pytest.mark.parametrize("branch", ["cmp", "slc", "win"])
def test_flex_saves_what_the_recorded_gpu_measured(branch: str) -> None:
    record = json.loads((Path(__file__).parents[3] / "benchmarks/results/h200.json").read_text())
    points = [point for point in record["points"] if point["name"] == f"{branch} branch"]
    assert points
    setting = {name: record["setting"][name] for name in ("num_heads", "num_kv_heads", "head_dim")}
    config = DecoderConfig(dim=8192, num_layers=1, **setting, nsa=NSAConfig(**record["setting"]["config"]))
    for point in points:
        work = Work(config, 1, point["seq_len"], 2, "flex", True)
        # Recorded without the inputs: keys and values, which the window reads as they are.
        saved = FLEX.saved(branch, work.sizes) - (work.sizes.keys(work.length) if branch == "win" else 0)
        # And with the output held, which in a model the gates have let go of by then.
        peak = saved + FLEX.backward(branch, work.sizes)
        estimated = {"saved_mib": saved / 2**20, "peak_mib": peak / 2**20}
        assert estimated == {quantity: pytest.approx(point[quantity], rel=0.001) for quantity in estimated}


def test_triton_allocates_what_the_recorded_gpu_measured() -> None:
    results = Path(__file__).parents[3] / "benchmarks/results"
    names = "selected", "peers", "qsa"
    timed, peers, qsa = (json.loads((results / f"{name}_h200.json").read_text())["points"] for name in names)
    sequences = {"m7c-125m 8k": (4, 8192), "m7c-125m 32k": (1, 32768)}
    measured = [
        (NSAConfig(), (*sequences[p["name"]], 12, 2, 64), p["backward MiB"])
        for p in timed
        if p["kind"] == "time" and p["name"] in sequences
    ]
    kinds = ("flexnsa", peers, NSAConfig(), (64, 4, 128)), ("QSA", qsa, NSAConfig.qsa(), (16, 2, 256))
    measured += [
        (config, (1, p["seq_len"], *heads), p["peak_mib"] - p["saved_mib"])
        for name, points, config, heads in kinds
        for p in points
        if p["name"] == name and p["kind"] in ("selected", "qsa")
    ]
    assert len(measured) == 9
    for config, (batch, length, *heads, dim), allocated in measured:
        of_heads = dict(zip(("num_heads", "num_kv_heads"), heads, strict=True)) | {"head_dim": dim, "v_head_dim": dim}
        sizes = AttentionSizes(config=config, batch=batch, seq_len=length, activation=2, **of_heads)
        estimated = TRITON.backward("slc", sizes) / 2**20
        # Some are rounded to MiB; and what is left of a block, if less than 1 MiB, is not split off.
        assert -0.5 <= allocated - estimated <= 1.5, length


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_training_peaks_of_the_recorded_gpu_are_estimated(attention: str) -> None:
    record = json.loads((Path(__file__).parents[3] / "benchmarks/results/training_h200.json").read_text())
    points = [p for p in record["points"] if p["attention"] == attention and p["model"] in PRESETS and "peak_mib" in p]
    assert points
    for point in points:
        config = preset(point["model"], attention=attention, checkpointing=False)
        sizes: dict[str, Any] = {"seq_len": point["seq_len"], "batch_size": point["batch"], "precision": "bf16"}
        figures = estimate_training(config, **sizes, impl="triton", fused_norm=True, optimizer=True, compiled=True)
        peak = max(figures.peak_forward, figures.peak_training) / 2**20
        assert peak == pytest.approx(point["peak_mib"], rel=0.006), point


@pytest.mark.parametrize(
    ("name", "precision"), [("tiny", "bf16"), ("tiny, dense", "bf16"), ("tiny, branches run again", "fp32")]
)
def test_what_compiled_layers_save_is_estimated(name: str, precision: Precision) -> None:
    config, seq_len = MODELS[name]
    torch._dynamo.reset()
    model, tokens = DecoderLM(config), torch.randint(config.vocab_size, (1, seq_len))
    # A backend that cuts a graph into forward and backward as Inductor does, and generates no code.
    model.compile_layers(fullgraph=True, backend="aot_eager_decomp_partition")
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with saved_for_backward(list(model.parameters())) as saved, autocast:
        _loss = model(tokens, targets=tokens)
    estimated = estimate_training(config, seq_len=seq_len, precision=precision, compiled=True)
    assert estimated.saved / saved.total == pytest.approx(1, abs=0.1)


def test_estimates_make_no_tensors() -> None:
    class NoTensors(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} was called")

    with NoTensors():
        with pytest.raises(AssertionError, match="was called"):
            torch.zeros(1)
        estimate_training(preset("large"), seq_len=1 << 20, precision="bf16", impl="flex")
        estimate_decoding(preset("large"), seq_len=1 << 20)


def test_saved_grows_with_the_length_once_all_else_is_paid() -> None:
    short, long = (estimate_training(TINY, seq_len=length).saved for length in (1 << 16, 1 << 17))
    assert long / short == pytest.approx(2, abs=0.001)


def test_one_decoded_token_reads_what_the_branches_show() -> None:
    # The 257th token: three whole blocks of 16 and the first token of its own, a window of 24, and the compressed
    # tokens that end by then, every 4 tokens from the 8th on.
    read = (3 * 16 + 1) + 24 + len(range(8, 257 + 1, 4))
    key_and_value = 2 * 16 * 2
    token = estimate_decoding(TINY, seq_len=256)
    assert token.bytes_read == 3 * 2 * read * key_and_value
    assert token.dense_bytes_read == 3 * 2 * 257 * key_and_value


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seq_len": 0}, "seq_len: expected"),
        ({"batch_size": -1}, "batch_size: expected"),
        ({"precision": "fp8"}, "precision: expected one of 'fp32', 'bf16', got 'fp8'"),
        ({"impl": "reference"}, "impl: expected one of 'sdpa', 'flex', 'triton', got 'reference'"),
    ],
)
def test_wrong_arguments_are_named(wrong: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"seq_len": 64} | wrong
    with pytest.raises(ValueError, match=message):
        estimate_training(TINY, **arguments)
