"""Models loaded by transformers over two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from tests.integrations.transformers.families import FEW, converted, own, sparse, tokens
from tests.integrations.transformers.tiny_models import few_blocks

MODELS: dict[str, Any] = {
    "drop-in": lambda: sparse("llama", FEW),
    "converted": lambda: converted("qwen3", FEW),
    "gated": lambda: few_blocks("qwen3_5_text"),
    "own": own,
    "own, shared keys": lambda: own(shared_keys=True, skip_logits=True),
}
WAYS: dict[str, Any] = {"tensor parallel": {"tp_size": 2}, "sharded": {"fsdp_size": 2}}


def results_of(model: Any) -> dict[str, Tensor]:
    """Give logits, the loss in training and the gradient of every parameter, and tokens."""
    x = tokens(2, 60)
    out = model(x, labels=x, use_cache=False)
    out.loss.backward()
    model.zero_grad()
    trained = model.train()(x, labels=x, use_cache=False).loss
    trained.backward()
    model.eval()
    gradients = {name: _whole(parameter.grad) for name, parameter in model.named_parameters()}
    generated = model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=8, do_sample=False)
    return {"logits": out.logits.detach(), "loss": trained.detach(), "tokens": generated, **gradients}


def _whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def spread_models(folder: Path) -> None:
    """Save what each model gives, whole and spread in each way, by processes that see torchrun's variables."""
    dist.init_process_group("gloo")
    results = {}
    for name, make in MODELS.items():
        model = make()
        model(tokens(1, 8))  # a drop-in that has run says in its config what it is
        if dist.get_rank() == 0:
            model.save_pretrained(folder / name)
        dist.barrier()
        results[name] = {"whole": results_of(model)}
        for way, sizes in WAYS.items():
            spread = AutoModelForCausalLM.from_pretrained(folder / name, distributed_config=DistributedConfig(**sizes))
            results[name][way] = results_of(spread.eval())
    if dist.get_rank() == 0:
        torch.save(results, folder / "results.pt")
    dist.barrier()  # gloo aborts a process that leaves before the other does
