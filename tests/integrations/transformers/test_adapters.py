"""Adapters of PEFT on drop-in and converted models, and quantised weights: as on dense ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from flexnsa import NSAConfig
from flexnsa.transformers import convert
from tests.integrations.transformers.families import ALL, CHOICE, WIDE, dense, in_steps, tokens
from tests.integrations.transformers.tiny_models import few_blocks

peft = pytest.importorskip("peft", reason="pip install '.[hf-tests]'")
quantization = pytest.importorskip("torchao.quantization", reason="pip install '.[hf-tests]'")
pytest.importorskip("bitsandbytes", reason="pip install '.[hf-tests]'")

QUANTISED: dict[str, Callable[[], Any]] = {
    "bitsandbytes, 4 bits": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
    "bitsandbytes, 8 bits": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "torchao, 8 bits": lambda: TorchAoConfig(quantization.Int8WeightOnlyConfig()),
    "torchao, 8 bits of activations too": lambda: TorchAoConfig(quantization.Int8DynamicActivationInt8WeightConfig()),
}


def learn(adapted: Any, x: Tensor) -> None:
    """Train for a few steps, in which the loss falls."""
    optimizer, losses = torch.optim.AdamW(adapted.parameters(), lr=1e-2), list[float]()
    for _ in range(4):
        loss = adapted(input_ids=x, labels=x, use_cache=False).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    adapted.eval()


CONVERTED = ("gemma2", "gpt_oss", "llama", "olmo_hybrid", "phi3", "qwen3_moe")


@pytest.mark.parametrize("kind", [*CONVERTED, "drop-in", "bitsandbytes, 4 bits"])
def test_adapters_learn_and_are_merged(kind: str, folder: Path, tmp_path: Path) -> None:
    """Of converted models, and of drop-in ones."""

    def base() -> Any:
        if kind in CONVERTED:
            return few_blocks(kind)
        options = {"quantization_config": QUANTISED[kind]()} if kind in QUANTISED else {}
        return AutoModelForCausalLM.from_pretrained(folder / "dense", **CHOICE, **options)

    torch.manual_seed(0)
    new = [f"{letter}_proj_{tag}" for letter in "kv" for tag in ("cmp", "slc", "win")]
    names = ["q_proj", "o_proj", *new] if kind in CONVERTED else ["q_proj", "v_proj"]
    layers = [*range(2)] if kind not in ("gemma2", "gpt_oss", "olmo_hybrid") else [1]
    adapted: Any = peft.get_peft_model(base(), peft.LoraConfig(r=4, target_modules=names, layers_to_transform=layers))
    x = tokens(2, 60)
    learn(adapted, x)
    with torch.no_grad():
        want = adapted(input_ids=x, use_cache=False).logits
        assert_close(in_steps(adapted, x, 45, 52), want, atol=1e-4, rtol=1e-4)
        adapted.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(base(), tmp_path)
        assert_close(again(input_ids=x, use_cache=False).logits, want, atol=1e-4, rtol=1e-4)
        assert not (want - base()(x, use_cache=False).logits).abs().max() < 1e-2
        if kind not in QUANTISED:  # 4 bits are rounded when they are merged
            merged: Any = adapted.merge_and_unload()
            assert_close(merged(x, use_cache=False).logits, want, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_weights_are_those_of_the_dense_model(kind: str, folder: Path) -> None:
    x, options = tokens(1, 70), {"quantization_config": QUANTISED[kind]()}
    model = AutoModelForCausalLM.from_pretrained(folder / "dense", **options)
    want = model(x, use_cache=False).logits
    assert (want - dense("llama", **WIDE).float()(x).logits).abs().max() > 1e-2
    drop_in = AutoModelForCausalLM.from_pretrained(folder / "dense", **options, **CHOICE | {"flexnsa": ALL})
    loaded = AutoModelForCausalLM.from_pretrained(folder / "converted", **options)
    copied = convert(model, NSAConfig(**ALL), branches=["slc"])
    three = convert(model, NSAConfig(**ALL))
    models: tuple[Any, ...] = (drop_in, loaded, copied, convert(model, NSAConfig(**ALL), branches=["slc"], copy=False))
    for same in models:
        assert_close(same(x, use_cache=False).logits, want)
        options = {"max_new_tokens": 3, "do_sample": False}
        drawn = [same.generate(x[:, :40], **options, use_cache=use_cache) for use_cache in (True, False)]
        assert torch.equal(*drawn)  # a cache keeps what is computed, and not what weights are kept as
        assert drawn[0].shape == (1, 43)
    assert (three(x, use_cache=False).logits - want).abs().mean() < 0.1 * want.abs().mean()
