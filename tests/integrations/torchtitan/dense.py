"""Dense models of transformers that torchtitan loads, and what its NSA layers make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.integrations.torchtitan.runs import FEW, INDEXER, LOSS, config_of, override, save_results, train, trainer_of

# isort: split
from flexnsa.torchtitan.export import export
from tests.integrations.torchtitan.configs import DIM, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCAB, row

SIZES: dict[str, Any] = {
    "hidden_size": DIM,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA_ROPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
}
ALL = FEW | {"num_selected_blocks": 8}
"""Every block of a row of 128 tokens is selected."""
TRAINED = {"three branches": FEW, "one branch": FEW | {"branches": ["slc"]}}
TRAINED["indexers"] = INDEXER | {"index_rank": 4, "share_index": [0, 1, 0, 3]}
"""Options of models that are trained a little, and exported."""


def rows(count: int = 4) -> tuple[Tensor, Tensor]:
    """Give the tokens and labels of the first rows that runs learn from."""
    tokens, _, labels = zip(*(row(index, 128, 1) for index in range(count)), strict=True)
    return torch.stack(tokens), torch.stack(labels)


def loading(folder: Path) -> tuple[str, ...]:
    """Give the arguments that load a dense model in the format of transformers."""
    return (
        f"--hf_assets_path={folder}",
        "--checkpoint.enable",
        "--checkpoint.initial_load_in_hf",
        f"--checkpoint.initial_load_path={folder}",
    )


def run_from_dense(file: Path, family: str) -> None:
    """Save the first loss of torchtitan's dense model and of NSA ones, and the logits of trained ones."""

    def make(folder: Path) -> dict[str, Any]:
        torch.manual_seed(0)
        model = FAMILIES[family]().eval()
        model.save_pretrained(folder / "dense")
        tokens, labels = rows()
        loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())
        arguments = (*loading(folder / "dense"), "--training.steps=1", "--checkpoint.load_only")
        first = {
            "dense": train(family, folder / "first", *arguments),
            "selected": train(family, folder / "selected", *arguments, override(**ALL, branches=["slc"])),
            "three": train(family, folder / "three", *arguments, override(**ALL)),
        }
        logits = {name: _train(family, folder, name) for name in (*TRAINED, "dense run")}
        config = config_of(family, folder, f"--hf_assets_path={folder / 'dense'}")
        export(config, folder / "dense run" / "checkpoint" / "step-3", folder / "exported")
        arguments = (*loading(folder / "exported"), "--training.steps=1", "--checkpoint.load_only")
        first |= {
            "selected, begun": train(family, folder / "begun", *arguments, override(**ALL, branches=["slc"])),
            "three, begun": train(family, folder / "three begun", *arguments, override(**ALL)),
        }
        results = {"transformers": loss.item(), **{name: run[LOSS][0] for name, run in first.items()}}
        return {"folder": str(folder), "losses": results, "logits": logits}

    save_results(file, make)


def _train(family: str, folder: Path, name: str) -> Tensor:
    """Train a few steps from the dense model, save a checkpoint, and give logits."""
    given = (*loading(folder / "dense"), "--training.steps=3")
    given += (override(**TRAINED[name]),) if name in TRAINED else ()
    with trainer_of(family, folder / name, *given) as (trainer, _):
        trainer.train()
        model = trainer.model_parts[0].eval()
        with torch.no_grad():
            return model(rows()[0])
