"""Write ``recorded/``: what this version offers, computes and leaves in files, for later versions to be held to.

Recorded once, by version 0.1 at commit e20c46e, and not to be recorded anew: a difference is a promise broken. To
record what that version said, check it out beside this tree and run this file with its ``flexnsa``; the files here
import each other and public names only::

    git worktree add ../old e20c46e
    PYTHONPATH=../old python tests/compatibility/record.py

``public_api.json``     names, signatures, fields, constants
``numbers.json``        fingerprints of attention and layers in fp64, by the reference implementation
``state_dicts.pt``      layers of every compression and a model, with an input, its output, tokens and caches
``text.txt``, ``run/``  a training run stopped by SIGTERM; ``whole_run.jsonl``: the log of the same run, not stopped
``generated.txt``       what ``flexnsa generate`` prints from its checkpoint
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from attention_cases import ATTENTION_CASES, SMALL, run_attention_case
from fingerprints import fingerprint
from layer_cases import LAYER_CASES, draw_weights
from public_api import describe_everything
from recorded_run import RECORDED, RUN, TEXT, WHOLE_LOG, generate_options, train_options

from flexnsa import NativeSparseAttention, NSACache
from flexnsa.models import DecoderConfig, DecoderLM

LAYERS: dict[str, dict[str, Any]] = {
    "mean": {"compression": "mean"},
    "linear": {"compression": "linear", "gate": "softmax"},
    "mlp": {"compression": "mlp", "v_head_dim": 6},
    "no compressed branch": {"branches": ("slc", "win")},
}


def main() -> None:
    """Record everything."""
    torch.set_num_threads(1)
    RECORDED.mkdir(exist_ok=True)
    (RECORDED / "public_api.json").write_text(json.dumps(describe_everything(), indent=1) + "\n")
    record_numbers()
    torch.save({"layers": record_layers(), "model": record_model()}, RECORDED / "state_dicts.pt")
    record_run()


def record_numbers() -> None:
    """Fingerprint every case in fp64."""
    found = {name: run_attention_case(case, "reference", torch.float64) for name, case in ATTENTION_CASES.items()}
    found |= {name: compute("reference", torch.float64) for name, compute in LAYER_CASES.items()}
    numbers = {name: {key: fingerprint(x) for key, x in tensors.items()} for name, tensors in found.items()}
    lines = (f"{json.dumps(name)}: {json.dumps(tensors)}" for name, tensors in numbers.items())
    (RECORDED / "numbers.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def record_layers() -> dict[str, Any]:
    """Keep the weights of small layers, fp32, with an input and, computed in fp64, its output."""
    x = torch.randn(1, 45, 16, generator=torch.Generator().manual_seed(0))
    found = {}
    for name, options in LAYERS.items():
        arguments = {"dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, **options}
        layer = NativeSparseAttention(**arguments, config=SMALL, impl="reference")
        draw_weights(layer)
        state = {key: value.clone() for key, value in layer.state_dict().items()}
        with torch.no_grad():
            found[name] = {"arguments": arguments, "state": state, "x": x, "out": layer.double()(x.double())}
    return found


def record_model() -> dict[str, Any]:
    """Keep the weights of a small model, its logits, the likeliest continuation, and caches half-way through it."""
    config = DecoderConfig(
        dim=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, v_head_dim=6, vocab_size=24, nsa=SMALL
    )
    model = DecoderLM(config)
    draw_weights(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    model = model.double().eval()
    prompts = torch.arange(2 * 30).mul(7).remainder(23).view(2, 30)
    tokens = torch.tensor(_greedy(model, prompts, 20))
    caches = model.new_caches(2, 50)
    with torch.no_grad():
        logits = model(prompts)
        model(torch.cat((prompts, tokens[:, :10]), dim=1), caches=caches)
    return {
        "config": config.to_dict(),
        "state": state,
        "prompts": prompts,
        "logits": logits,
        "tokens": tokens,
        "caches_after_10_tokens": [cache.state_dict() for cache in caches if isinstance(cache, NSACache)],
    }


def record_run() -> None:
    """Train twice with the command line, stop one of them, and generate from what it left."""
    lines = (f"{a} plus {b} is {a + b}\n" + "\n" * (b % 3 == 0) for a in range(12) for b in range(a % 5, 12, 2))
    TEXT.write_text("".join(lines))
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "whole")
        subprocess.run(_command(train_options(whole)), check=True, stderr=subprocess.DEVNULL)
        shutil.copy(whole / "log.jsonl", WHOLE_LOG)
    shutil.rmtree(RUN, ignore_errors=True)
    process = subprocess.Popen(_command(train_options(RUN)), stderr=subprocess.DEVNULL)
    log = RUN / "log.jsonl"
    while not log.exists() or len(log.read_text().splitlines()) < 10:
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    assert len(log.read_text().splitlines()) < 20, "stopped too late to leave anything to resume"
    (RECORDED / "generated.txt").write_bytes(subprocess.check_output(_command(generate_options(RUN))))


def _greedy(model: DecoderLM, prompts: torch.Tensor, count: int) -> list[list[int]]:
    """Take the likeliest token each time, from the whole sequence; demand that no other machine could take another."""
    tokens = prompts
    with torch.no_grad():
        for _ in range(count):
            best, second = model(tokens)[:, -1].topk(2).values.unbind(-1)
            assert (best - second).min() > 1e-6
            tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), dim=1)
    return tokens[:, prompts.shape[1] :].tolist()


def _command(options: list[str]) -> list[str]:
    return [sys.executable, "-m", "flexnsa", *options]


if __name__ == "__main__":
    main()
