"""Training loss of NSA and of dense attention on equal tokens, and what the trained model selects.

    python -m benchmarks learning.trained --json benchmarks/results/trained.json
    python -m benchmarks learning.trained --models NSA --compressor-lr 0.1 --json benchmarks/results/trained_slow.json

Byte-level models learn the source of Python's standard library, each seed's bytes in the same order for both, so that
losses of one step are of the same text. The dense model has the same layers and heads; it is wider, because NSA's keys
and values per branch and its compressors would else give NSA more parameters. The learning rate was not tuned for
either; compressors learn at the same one, in the second file at a tenth of it. At the end, the first NSA model reads a
sequence that no training saw: which blocks its queries select, and how far its gates open, is recorded. Everything runs
on one thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.harness import options
from benchmarks.learning.selection import layer_inputs, selected_blocks
from flexnsa import NSAConfig
from flexnsa.geometry import BRANCHES
from flexnsa.measure.clock import Clock
from flexnsa.measure.recording import Recording
from flexnsa.measure.table import format_table
from flexnsa.models import DecoderConfig, DecoderLM
from flexnsa.training import Corpus, TrainConfig, Trainer, read_corpus

# A late query of 1024 tokens selects 6 of 32 blocks, three of them freely, and its window is 64: sparsity is real.
NSA = DecoderConfig(
    dim=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    nsa=NSAConfig(
        compress_block_size=16, compress_stride=8, select_block_size=32, num_selected_blocks=6, window_size=64
    ),
)
MODELS = {"NSA": NSA, "dense": replace(NSA, attention="dense", dim=176, head_dim=44)}
TRAINING = TrainConfig(
    steps=450,
    batch_size=1,
    seq_len=1024,
    lr=2e-3,
    min_lr=0.05,
    warmup_steps=30,
    compressor_lr=1.0,
    eval_every=150,
    eval_sequences=48,
)
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
"""Names of blocks in the recording: one character each, ``.`` for none."""


def train(name: str, corpus: Corpus, config: TrainConfig) -> tuple[DecoderLM, dict[str, Any]]:
    """Train one model; its losses are bits per byte, of every step and on held-out text ``[step, bits]``."""
    torch.manual_seed(config.seed)
    model = DecoderLM(MODELS[name])
    trainer = Trainer(model, corpus, config)
    losses, held_out, clock = [], [], Clock()
    start = clock.start()
    with tqdm(total=config.steps, desc=f"{name:5} seed {config.seed}", unit="step") as bar:
        for step in range(1, config.steps + 1):
            losses.append(trainer.train_step().loss / math.log(2))
            if step % config.eval_every == 0 or step == config.steps:
                held_out.append([step, round(trainer.validation_bits_per_byte(), 4)])
            bar.set_postfix_str(f"{losses[-1]:.2f} bits per byte", refresh=False)
            bar.update()
    return model, {
        "name": name,
        "seed": config.seed,
        "seq_len": config.seq_len,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(clock.since(start) / 1e3, 1),
        "loss": [round(loss, 3) for loss in losses],
        "held_out": held_out,
    }


def held_out_text(corpus: Corpus) -> Tensor:
    """The sequence to look at: Python code, three quarters into the text that validates."""
    first = len(corpus.validation) * 3 // 4
    return corpus.validation[first : first + TRAINING.seq_len].long()


@dataclass
class Seen:
    """What one layer did with one sequence: blocks ``(Hkv, S, n)`` and gates ``(Hq, S, 3)``."""

    blocks: Tensor
    gates: Tensor


@torch.no_grad()
def observe(model: DecoderLM, tokens: Tensor) -> list[Seen]:
    """Let the model read ``tokens (S,)``; give every layer's selection and gates, from the layer's own input."""
    read = layer_inputs(model.eval(), tokens[None])
    return [Seen(selected_blocks(layer, x)[0], layer.gate(x)[0]) for layer, x in read]


def describe(seen: Sequence[Seen], tokens: Tensor) -> dict[str, Any]:
    """Plain values: a word of block digits a query, and the mean gate of every layer, head and branch."""
    return {
        "text": bytes(tokens.tolist()).decode("latin-1"),
        "blocks": [[_words(head) for head in layer.blocks.tolist()] for layer in seen],
        "gates": [
            [dict(zip(BRANCHES, map(_rounded, head), strict=True)) for head in layer.gates.mean(1).tolist()]
            for layer in seen
        ],
    }


def read_blocks(words: str) -> list[list[int]]:
    """Undo the words of :func:`describe`: the blocks of every query."""
    return [[DIGITS.index(digit) for digit in word if digit != "."] for word in words.split()]


def _words(queries: list[list[int]]) -> str:
    return " ".join("".join(DIGITS[block] if block >= 0 else "." for block in blocks) for blocks in queries)


def _rounded(value: float) -> float:
    return round(value, 4)


def table(points: Sequence[dict[str, Any]]) -> str:
    """A line of each run."""
    rows = [
        [p["name"], str(p["seed"]), f"{p['parameters']:,}", f"{p['held_out'][-1][1]:.3f}", f"{p['seconds']:,.0f}"]
        for p in points
    ]
    return format_table(["attention", "seed", "parameters", "held-out bits per byte", "seconds"], rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Train every model with every seed, record after each, print."""
    parser = options.parser(__doc__, json=options.RESULTS / "trained.json", device=False)
    parser.add_argument("--steps", type=int, default=TRAINING.steps, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], help="default: all")
    parser.add_argument(
        "--compressor-lr", type=float, default=TRAINING.compressor_lr, help="relative to all else; default: %(default)s"
    )
    arguments = parser.parse_args(argv)
    training = replace(TRAINING, steps=arguments.steps, compressor_lr=arguments.compressor_lr)
    torch.set_num_threads(1)
    corpus = read_corpus()
    recording = Recording(arguments.json, options.about(__doc__), commit=arguments.commit)
    recording.note(
        setting={"device": "cpu", "models": {name: model.to_dict() for name, model in MODELS.items()}},
        training=asdict(training),
        text_sha256=corpus.sha256(),
    )
    for seed in arguments.seeds:
        for name in arguments.models:
            model, point = train(name, corpus, replace(training, seed=seed))
            if "trained" not in recording.content and name == "NSA":
                tokens = held_out_text(corpus)
                recording.note(trained={"seed": seed} | describe(observe(model, tokens), tokens))
            recording.add(point)
    print(f"\n{table(recording.points)}\n\nRecorded in {arguments.json}.")


if __name__ == "__main__":
    main()
