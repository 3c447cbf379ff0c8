"""The training run that version 0.1 wrote: the options it was started with, and how to read what it left."""

from __future__ import annotations

import json
from pathlib import Path

RECORDED = Path(__file__).parent / "recorded"
RUN = RECORDED / "run"
"""What a run leaves that was stopped half-way: ``checkpoint.safetensors`` and ``log.jsonl``."""
WHOLE_LOG = RECORDED / "whole_run.jsonl"
"""The log of the same run, never stopped."""
TEXT = RECORDED / "text.txt"

_SIZES = (
    "--dim 4 --num-layers 2 --num-heads 2 --num-kv-heads 1 --head-dim 4 "
    "--compress-block-size 8 --compress-stride 4 --select-block-size 8 --num-selected-blocks 3 --window-size 8 "
    "--steps 24 --batch-size 2 --seq-len 48 --lr 0.02 --warmup-steps 2 --eval-every 4 --eval-sequences 4 --pack"
)


def train_options(folder: Path) -> list[str]:
    """Give the command line behind ``python -m flexnsa`` that trains into a folder, and resumes what is there."""
    return ["train", "--text", str(TEXT), "--out", str(folder), "--device", "cpu", *_SIZES.split()]


def generate_options(folder: Path) -> list[str]:
    """Give the command line that continues a prompt with the likeliest bytes."""
    prompt = ["--prompt", "3 plus 4 is 7"]
    sampling = "--device cpu --temperature 0 --max-new-tokens 24"
    return ["generate", "--checkpoint", str(folder), *prompt, *sampling.split()]


def read_losses(log: Path) -> dict[int, dict[str, float]]:
    """Give by step what does not depend on the machine: loss, rate, gradient norm and validation."""
    records = map(json.loads, log.read_text().splitlines())
    machine = {"step", "tokens_per_second", "peak_mib", "checksum"}
    return {r["step"]: {name: value for name, value in r.items() if name not in machine} for r in records}
