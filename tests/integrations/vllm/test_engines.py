"""vLLM answers as transformers' ``generate`` of the same checkpoint does, however it splits, pages and shares."""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.v1.engine import utils
from vllm.v1.executor import multiproc_executor
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.integrations.vllm import interpreted_engine
from tests.integrations.vllm.engines import ask, engine, metrics
from tests.integrations.vllm.references import CONVERTED, MODELS, Answer, Reference, add_adapter, answer, make_model
from tests.support.interpreter import Interpret

TOLERANCE = 1e-5
"""Of a logarithm of a probability, in fp32."""
SPLIT = {"max_num_batched_tokens": 96, "max_num_seqs": 4}
"""A chunk of a prompt may end inside a page, a compressed block and a selected one."""
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}

Ask = Callable[[str], Reference]


def assert_equal(found: list[Answer], expected: list[Answer]) -> None:
    assert [x.tokens for x in found] == [x.tokens for x in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logs == pytest.approx(other.logs, rel=0, abs=TOLERANCE)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have processes of an engine begin as copies of this one: to import vLLM takes each 15 seconds."""
    for module in (utils, multiproc_executor):
        monkeypatch.setattr(module, "get_mp_context", lambda: multiprocessing.get_context("fork"))


def check(said: Reference, **options: Any) -> None:
    with engine(said.folder, **options) as llm:
        assert_equal(ask(llm, [x.prompt for x in said.answers])[0], said.answers)


@pytest.mark.parametrize("name", [*MODELS, *CONVERTED])
def test_every_kind_of_model_in_pages_of_16(reference: Ask, name: str) -> None:
    check(reference(name))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("index", {"block_size": 128}),
        ("index", SPLIT),
        ("paper", SPLIT | {"block_size": 64}),
        ("rank", {"max_num_batched_tokens": 37, "max_num_seqs": 3}),
        ("rank", SPLIT | {"disable_hybrid_kv_cache_manager": True}),
    ],
    ids=["pages of 128", "chunks", "chunks, pages of 64", "chunks of 37", "no hybrid manager"],
)
def test_pages_and_chunks(reference: Ask, name: str, options: dict[str, Any]) -> None:
    check(reference(name), **options)


@pytest.mark.parametrize("name", ["paper", "rank"])
def test_steps_by_the_kernels_of_a_gpu(reference: Ask, interpret: Interpret, name: str) -> None:
    said = reference(name)
    question = {"folder": str(said.folder), "prompts": [x.prompt for x in said.answers], "new_tokens": 3}
    found = interpret(interpreted_engine, json.dumps(question))
    assert found["steps"] == 2 * MODELS[name].get("num_layers", 2)  # the prompt gives the first token
    answers = [Answer(x.prompt, *given) for x, given in zip(said.answers, found["answers"], strict=True)]
    assert_equal(answers, [Answer(x.prompt, x.tokens[:3], x.logs[:3]) for x in said.answers])


def test_compiled(reference: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    check(reference("qwen3"), **SPLIT, enforce_eager=False)


@pytest.mark.parametrize(
    ("name", "layers"),
    [("paper", ("w_q", "w_k_cmp", "w_v_slc", "w_o", "up")), ("qwen3", ("q_proj", "k_proj_cmp", "gate", "o_proj"))],
)
def test_requests_with_and_without_an_adapter(
    reference: Ask, name: str, layers: tuple[str, ...], tmp_path: Path
) -> None:
    said = reference(name)
    model = type(make_model(name)).from_pretrained(said.folder).eval()
    add_adapter(tmp_path, model, layers)
    expected = [answer(model, torch.tensor(x.prompt)) if i % 2 else x for i, x in enumerate(said.answers)]
    adapters = [None, LoRARequest("drawn", 1, str(tmp_path))] * 3
    # To requests without an adapter, vLLM's CPU build applies its last slot.
    with engine(said.folder, **SPLIT, enable_lora=True, max_loras=2) as llm:
        assert_equal(ask(llm, [x.prompt for x in expected], lora_request=adapters)[0], expected)


def test_an_adapter_of_what_vllm_does_not_adapt(reference: Ask, tmp_path: Path) -> None:
    said = reference("rank")
    add_adapter(tmp_path, make_model("rank"), ("up",))  # of the indexer too
    with engine(said.folder, enable_lora=True) as llm, pytest.raises(ValueError, match=r"indexer\.change"):
        ask(llm, [said.answers[0].prompt], lora_request=LoRARequest("drawn", 1, str(tmp_path)))


@pytest.mark.parametrize("name", ["index", "qwen2"])
def test_linear_layers_in_fp8_but_for_those_left_out(reference: Ask, name: str) -> None:
    said, found = reference(name), set[str]()
    model = type(make_model(name)).from_pretrained(said.folder)
    every = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    options = {"dtype": "bfloat16", "quantization": "fp8_per_channel"}
    with engine(said.folder, **options, quantization_config={"ignore": [x for x in every if ".0." in x]}) as llm:
        ask(llm, [said.answers[0].prompt], 2)
        served: Any = llm.apply_model(lambda model: model)[0]
        for name, layer in ((x, y) for x, y in served.named_modules() if hasattr(y, "weight_scale")):
            stem, _, last = name.replace("self_attn.w_o", "self_attn.o_proj").rpartition(".")
            parts = [f"{stem}.{part}" for part in served.packed_modules_mapping.get(last, [last])]
            own, scale, found = [every[part] for part in parts], layer.weight_scale, found | {*parts}
            exact = torch.cat([x.weight for x in own])
            assert ((layer.weight.t().float() * scale - exact).abs() <= exact.abs() / 16 + scale / 256).all(), name
            biases = [torch.zeros(len(x.weight)) if x.bias is None else x.bias for x in own]
            assert layer.bias is None or torch.equal(layer.bias, torch.cat(biases).bfloat16())
    others = re.compile(r"\.(indexer|phi_\w|compress_\w)\.")
    assert found == {x for x in every if ".1." in x and not others.search(x)}


@pytest.mark.parametrize(("name", "block_size"), [("index", 16), ("rank", 32)])
def test_prefixes_are_cached(reference: Ask, name: str, block_size: int) -> None:
    said = reference(name)
    with engine(said.folder, **SPLIT, enable_prefix_caching=True, block_size=block_size) as llm:
        assert_equal(ask(llm, [x.prompt for x in said.answers])[0], said.answers)
        found, cached = ask(llm, [x.prompt for x in said.answers])
        assert_equal(found, said.answers)
        assert cached > 1500  # of 2,221


def test_preempted_requests_begin_again(reference: Ask) -> None:
    said = reference("index")
    tight = {"max_num_seqs": 6, "num_gpu_blocks_override": 112, "scheduler_reserve_full_isl": False}
    with engine(said.folder, **SPLIT | tight) as llm:
        assert_equal(ask(llm, [x.prompt for x in said.answers])[0], said.answers)
        assert metrics(llm)["num_preemptions"] > 0


@pytest.mark.usefixtures("forked")
def test_rejected_drafts_are_forgotten(reference: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    # In a process of its own: where numba is imported, which n-grams need, vLLM 0.32 starts no second engine.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    said = reference("index")
    with engine(said.folder, speculative_config=DRAFTS) as llm:
        assert_equal(ask(llm, [x.prompt for x in said.answers])[0], said.answers)
        count = metrics(llm)
    assert count["spec_decode_num_draft_tokens"] > count["spec_decode_num_accepted_tokens"]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", ["rank", "qwen3"])
def test_two_ranks_share_the_heads(reference: Ask, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    check(reference(name), **SPLIT, tensor_parallel_size=2)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("name", "stages"), [("rank", "3,1"), ("llama", "1,1")])
def test_two_stages_share_the_layers(reference: Ask, monkeypatch: pytest.MonkeyPatch, name: str, stages: str) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", stages)
    # Uncompiled, vLLM's CPU build makes no room for what a stage gets from the one before.
    monkeypatch.setattr(CPUWorker, "_should_warm_up_model", lambda _: True)
    monkeypatch.setattr(CPUModelRunner, "warming_up_model", CPUModelRunner.profile_run)
    check(reference(name), **SPLIT, pipeline_parallel_size=2)
