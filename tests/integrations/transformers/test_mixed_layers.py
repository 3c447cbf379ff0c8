"""Models whose layers differ: NSA acts on those with full attention, and the others attend as they did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.testing import assert_close

from flexnsa import NSAConfig
from flexnsa.transformers import convert
from flexnsa.transformers.dropin import attention_forward
from flexnsa.transformers.local_layers import FULL, layer_type, local_attention
from tests.integrations.transformers.families import FEW, SIZES, in_steps, pad_left, tokens
from tests.integrations.transformers.multimodal import VISION, llava, page

WINDOW = 12
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
CHUNKED: dict[str, Any] = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": WINDOW}
LINEAR: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4}
LINEAR |= {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
SHARED: dict[str, Any] = {"layer_types": SLIDING["layer_types"] * 2, "sliding_window": WINDOW}
SHARED |= {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 64}
EXPERTS: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1}
CONFIGS: dict[str, Callable[[], Any]] = {
    "gemma2": lambda: transformers.Gemma2Config(**SIZES | SLIDING, attn_logit_softcapping=2.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES | SLIDING),
    "gemma3n": lambda: transformers.Gemma3nTextConfig(**SIZES | SHARED),
    "gpt_oss": lambda: transformers.GptOssConfig(**SIZES | SLIDING | EXPERTS),
    "llama4": lambda: transformers.Llama4TextConfig(**SIZES | CHUNKED | EXPERTS, intermediate_size_mlp=64),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(**SIZES | LINEAR, num_experts=0, mlp_only_layers=[0, 1]),
}
ROUNDING: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}
"""Of experts and of linear layers, which compute in float32."""


def mixed(kind: str, implementation: str = "flexnsa", **options: Any) -> Any:
    """Make a model in float64, with layers of two types, that leaves blocks out."""
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    config._experts_implementation, config.flexnsa = "eager", FEW | options  # the others take no float64
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval().double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.linspace(-1, 2, len(parameter)))
    return model


@contextmanager
def loops_instead() -> Iterator[list[str]]:
    """Compute layers of full attention in loops over heads and queries; collect the types of layers that attend."""
    kinds: list[str] = []

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        kinds.append(layer_type(module))
        if kinds[-1] not in FULL:
            return attention_forward(module, q, k, v, mask, **options)
        sizes, softmax = NSAConfig(**FEW), {"cap": options.get("softcap"), "sinks": options.get("s_aux")}
        return attend_in_loops(q, k, v, sizes, scale=options["scaling"], **softmax), None

    transformers.AttentionInterface.register("flexnsa", attend)
    try:
        yield kinds
    finally:
        transformers.AttentionInterface.register("flexnsa", attention_forward)


def logits_and_gradients(model: Any, **inputs: Tensor) -> list[Tensor]:
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    logits[:, -20:].square().mean().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("kind", CONFIGS)
def test_full_layers_attend_as_loops_do_and_the_others_as_they_did(kind: str) -> None:
    model, x = mixed(kind), tokens(1, 60)
    got = logits_and_gradients(model, input_ids=x)
    with loops_instead() as kinds:
        want = logits_and_gradients(model, input_ids=x)
    assert kinds == [each for each in model.config.layer_types if each != "linear_attention"]
    assert_close(got, want, **ROUNDING)
    model.config.flexnsa = FEW | {"num_selected_blocks": 64}
    with torch.no_grad():
        assert (model(x).logits - got[0]).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_mixed_model_is_saved_and_loaded_and_steps_on_a_cache_see_whole_sequences(kind: str, tmp_path: Path) -> None:
    model, x = mixed(kind), tokens(1, 60)
    want = model(x, use_cache=False).logits
    assert_close(in_steps(model, x, 50), want, **ROUNDING)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    assert again.config._attn_implementation == "flexnsa"
    assert_close(again(x).logits, want, **ROUNDING)


@torch.no_grad()
def test_a_text_tower_of_mixed_layers_sees_images() -> None:
    model = llava(text=transformers.Gemma3TextConfig(**SIZES | SLIDING))
    model.config.flexnsa = FEW
    model.set_attn_implementation({"text_config": "flexnsa"})
    got = model(**page(), use_cache=False).logits
    with loops_instead() as kinds:
        want = model(**page(), use_cache=False).logits
    assert kinds == SLIDING["layer_types"]
    assert_close(got, want)


@torch.no_grad()
def test_images_that_see_both_ways_are_refused_and_text_is_not() -> None:
    torch.manual_seed(0)
    text, vision = transformers.Gemma3TextConfig(**SIZES | SLIDING), transformers.SiglipVisionConfig(**VISION)
    config: Any = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    config.image_token_id = 2
    config.flexnsa, chosen = FEW, {"text_config": "flexnsa"}
    model = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation=chosen)
    model, x = model.eval().double(), tokens(1, 60)
    got = model(x, token_type_ids=torch.zeros_like(x), use_cache=False).logits
    with loops_instead():
        assert_close(got, model(x, use_cache=False).logits)
    options = page()
    images = (options["input_ids"] == 2).long()
    with pytest.raises(ValueError, match="block_sequence_ids: expected None"):
        model(**options, token_type_ids=images)


DOCUMENTS = (23, 8, 29)


@torch.no_grad()
@pytest.mark.parametrize("local", [None, "eager"])
@pytest.mark.parametrize("kind", ["gemma3", "llama4"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_documents_stand_alone_in_local_layers(kind: str, local: str | None, use_cache: bool) -> None:
    """With a cache or a mask transformers does not find documents, and chunks of the second started in the first."""
    model, x = mixed(kind, local=local), tokens(1, 7 + sum(DOCUMENTS))
    options = {"position_ids": torch.cat([torch.arange(count) for count in (7, *DOCUMENTS)])[None]}
    options |= {"cu_seq_lens_q": torch.tensor([0, 7, 30, 38, 67])}  # the layers of Llama 4 get no positions
    if use_cache:
        options["attention_mask"] = torch.ones_like(x)
        options["attention_mask"][:, :7] = 0
    got = model(x, **options, use_cache=use_cache).logits
    want = [model(document, use_cache=False).logits for document in x[:, 7:].split(DOCUMENTS, dim=1)]
    assert_close(got[:, 7:], torch.cat(want, 1), **ROUNDING)


@torch.no_grad()
@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize(("kind", "own"), [("gemma2", "eager"), ("gemma3", "sdpa"), ("gpt_oss", "eager")])
def test_local_layers_attend_by_what_the_dense_class_has_and_padding_is_finite(
    kind: str, own: str, converted: bool
) -> None:
    model = mixed(kind)
    if converted:
        model.set_attn_implementation("eager")
        model = convert(model, NSAConfig(**FEW), branches=["slc"])
    rows = [tokens(60), tokens(31)]
    got = model(**pad_left(rows)).logits
    assert local_attention(model.config) == own
    assert got.isfinite().all()
    for row, logits in zip(rows, got, strict=True):
        assert_close(logits[-len(row) :], model(row[None]).logits[0], **ROUNDING)


@torch.no_grad()
def test_local_layers_attend_as_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mixed("gemma3"), tokens(1, 60)
    called: list[Any] = []

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> Any:  # noqa: ARG001
        called.append(mask)
        return torch.zeros_like(q).transpose(1, 2), None

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "flash_attention_2", attend)
    model.config.flexnsa = FEW | {"local": "flash_attention_2"}
    model(x, use_cache=False)
    assert called == [None]  # its own mask of a sequence without padding
    with pytest.raises(ValueError, match=r"position_ids: expected one document .* local='flash_attention_2'"):
        model(x, position_ids=(torch.arange(60) % 30)[None], use_cache=True)
    for wrong in ("flexnsa", "fast", 3):
        model.config.flexnsa = FEW | {"local": wrong}
        with pytest.raises((TypeError, ValueError), match=r"local: expected one of 'eager', .* got"):
            model(x, use_cache=False)
    sunk = mixed("gpt_oss", local="sdpa")
    with pytest.raises(ValueError, match="local: expected an attention that takes attention sinks"):
        sunk(x, use_cache=False)


def test_a_window_in_all_layers_leaves_nothing_to_nsa() -> None:
    sizes: dict[str, Any] = SIZES | SLIDING | {"layer_types": ["sliding_attention"] * 2}
    config = transformers.Gemma3TextConfig(**sizes)
    with pytest.raises(ValueError, match=r"layer_types: expected some 'full_attention' .*'sliding_attention'"):
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="flexnsa")


def attend_in_loops(
    q: Tensor, k: Tensor, v: Tensor, sizes: NSAConfig, *, scale: float, cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attend from ``q (B, Hq, S, D)`` to the keys of the selected blocks, ``(B, S, Hq, D)``."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for b in range(len(q)):
        for key_head in range(k.shape[1]):
            heads = range(key_head * group, (key_head + 1) * group)
            keys, values = k[b, key_head], v[b, key_head]
            for t in range(q.shape[2]):
                seen = _selected_tokens(q[b, heads.start : heads.stop, t].detach(), keys.detach(), t, sizes, scale, cap)
                for head in heads:
                    scores = _capped(scale * (keys[seen] @ q[b, head, t]), cap)
                    terms = scores if sinks is None else torch.cat((scores, sinks[head : head + 1]))
                    out[b, head, t] = torch.softmax(terms, 0)[: len(scores)] @ values[seen]
    return out.transpose(1, 2)


def _selected_tokens(q: Tensor, keys: Tensor, t: int, sizes: NSAConfig, scale: float, cap: float | None) -> list[int]:
    """Return the tokens up to ``t`` of the blocks that the heads ``q (G, D)`` of a group select."""
    length, stride, block = sizes.compress_block_size, sizes.compress_stride, sizes.select_block_size
    starts = range(0, t - length + 2, stride)
    scores = [0.0] * (t // block + 1)
    for head in q:
        if starts:
            means = torch.stack([keys[start : start + length].mean(0) for start in starts])
            shares = torch.softmax(_capped(scale * (means @ head), cap), 0).tolist()
            for start, share in zip(starts, shares, strict=True):
                for token in range(start, start + length):
                    if token // block < len(scores):
                        scores[token // block] += share / stride
    last = len(scores) - sizes.num_local_blocks
    forced = {j for j in range(len(scores)) if j < sizes.num_init_blocks or j >= last}
    others = sorted({*range(len(scores))} - forced, key=lambda j: (-scores[j], j))
    chosen = forced | {*others[: sizes.num_selected_blocks - len(forced)]}
    return [token for token in range(t + 1) if token // block in chosen]


def _capped(scores: Tensor, cap: float | None) -> Tensor:
    return scores if cap is None else cap * torch.tanh(scores / cap)
