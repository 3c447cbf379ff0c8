"""What a trained model's key heads select, beside the best blocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flexnsa import NativeSparseAttention, block_shares, select_blocks, selection_recall
from flexnsa.attention.selection import top_blocks
from flexnsa.layers.rope import apply_rope
from flexnsa.lm import DecoderConfig, DecoderLM
from flexnsa.lm.cli import main
from flexnsa.lm.diagnosis import trace_selection
from flexnsa.masks.positions import Positions
from tests.lm.cli.tiny_run import train, write_text
from tests.support.inputs import TINY

NSA = replace(TINY, num_selected_blocks=5)
SIZES: dict[str, Any] = {"dim": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "vocab_size": 50}
TOKENS = torch.randint(50, (2, 100), generator=torch.Generator().manual_seed(0))


def make(**options: Any) -> DecoderLM:
    torch.manual_seed(0)
    return DecoderLM(DecoderConfig(**{**SIZES, "num_layers": 2, "nsa": NSA, **options}))


def test_recall_is_that_of_the_blocks_and_heads_of_the_model() -> None:
    model = make(num_layers=1, gate="softmax")
    (layer,) = (module for module in model.modules() if isinstance(module, NativeSparseAttention))
    seen: list[torch.Tensor] = []
    layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    traced = sorted(trace_selection(model, TOKENS), key=lambda head: head.head)
    heads, layout = layer.project(seen[0]), layer.layout(100)
    q, k = apply_rope(heads.q, layout.tokens), apply_rope(heads.k["slc"], layout.tokens)
    keys = apply_rope(layer.get_submodule("phi_k")(heads.k["cmp"]), layout.blocks["cmp"].tables)
    blocks = select_blocks(q, keys, config=NSA)
    for forced, name in ((False, "recall"), (True, "recall_with_forced")):
        want = selection_recall(q, k, blocks, config=NSA, forced=forced)
        torch.testing.assert_close(torch.tensor([getattr(head, name) for head in traced]), want)
    shares = block_shares(q, k, config=NSA)
    best = top_blocks(shares, Positions.of_sequence(100), config=NSA)
    masses = [
        shares.gather(-1, x.clamp_min(0).long()).masked_fill(x < 0, 0).sum(-1).mean((0, 2)) for x in (best, blocks)
    ]
    torch.testing.assert_close(torch.tensor([head.missed for head in traced]), masses[0] - masses[1])
    assert all(abs(sum(head.gates.values()) - 1) < 1e-5 for head in traced)


def test_a_layer_whose_scores_are_turned_round_comes_first() -> None:
    model = make(shared_keys=True, begin_as_mean=True)
    layers = [module for module in model.modules() if isinstance(module, NativeSparseAttention)]
    with torch.no_grad():
        for layer in layers:
            layer.get_parameter("w_q.weight").mul_(8)
        layers[1].get_parameter("phi_k.out.weight").neg_()
    traced = trace_selection(model, TOKENS)
    assert [head.layer for head in traced] == [1, 1, 0, 0]
    assert traced[1].recall < 0.6 < traced[2].recall


def test_the_model_is_left_as_it_was() -> None:
    model = make()
    before = model(TOKENS)
    trace_selection(model, TOKENS)
    assert torch.equal(model(TOKENS), before)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_all_blocks_are_the_best_ones() -> None:
    traced = trace_selection(make(nsa=replace(TINY, num_selected_blocks=20)), TOKENS)
    assert all(head.recall == head.recall_with_forced == 1 and head.missed == 0 for head in traced)


@pytest.mark.parametrize("options", [{"attention": "dense"}, {"branches": ("cmp", "win")}])
def test_a_model_that_selects_nothing_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^model: expected NSA with the branch slc"):
        trace_selection(make(**options), TOKENS)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(folder / "run", write_text(folder / "text"), *["--select-block-size", "16", "--num-selected-blocks", "4"])
    return folder


def diagnose(run: Path, *options: str) -> None:
    files = ("--checkpoint", str(run / "run"), "--text", str(run / "text"), "--device", "cpu")
    main(["diagnose", "selection", *files, "--json", str(run / "report.json"), *options])


def test_the_command_reports_every_head(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diagnose(run, "--seq-len", "120", "--sequences", "2")
    printed, record = capsys.readouterr().out, json.loads((run / "report.json").read_text())
    assert record["sentence"] in printed
    assert "layer 0, key head 0 finds 0." in record["sentence"]
    assert (record["seq_len"], record["sequences"]) == (120, 2)
    assert 0 < record["heads"][0]["recall"] < 1
    assert "gate slc" in printed


def test_where_every_block_is_forced_there_is_nothing_to_choose(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diagnose(run, "--seq-len", "40")
    assert "nothing to choose" in capsys.readouterr().out
    assert json.loads((run / "report.json").read_text())["heads"][0]["recall"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--seq-len", "100000"), "argument --seq-len: expected less than"),
        (("--seq-len", "0"), "argument --seq-len: expected at least 1, got 0"),
        (("--sequences", "0"), "argument --sequences: expected at least 1, got 0"),
        (("--checkpoint", "nowhere"), "argument --checkpoint: expected a checkpoint of `flexnsa train`"),
    ],
)
def test_wrong_options_are_named(
    run: Path, options: tuple[str, ...], message: str, refused: Callable[..., str]
) -> None:
    assert message in refused(diagnose, run, *options)
