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
from benchmarks.learning.selection import gates_of, layer_inputs, selected_blocks
from flexnsa import NSAConfig
from flexnsa.geometry import BRANCHES
from flexnsa.lm import Corpus, DecoderConfig, DecoderLM, TrainConfig, Trainer, read_corpus
from flexnsa.lm.measure.clock import Clock
from flexnsa.lm.measure.table import format_table

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
QUERIES = 8
"""Neighbouring queries whose blocks are recorded together; they are of one block."""


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
    return [Seen(selected_blocks(layer, x)[0], gates_of(layer, x)[0]) for layer, x in read]


def describe(seen: Sequence[Seen], block_size: int) -> dict[str, Any]:
    """Return plain values: which blocks each layer and head selects, and the mean gate of each head and branch.

    A word is of :data:`QUERIES` neighbouring queries, and has a digit for each block up to their own: how many of them
    select it.
    """
    return {
        "blocks": [[_words(head, block_size) for head in layer.blocks] for layer in seen],
        "gates": [
            [dict(zip(BRANCHES, map(_rounded, head), strict=True)) for head in layer.gates.mean(1).tolist()]
            for layer in seen
        ],
    }


def read_blocks(words: str) -> list[list[int]]:
    """Undo the words of :func:`describe`: by group of queries, how many of them select each block."""
    return [[int(digit) for digit in word] for word in words.split()]


def _words(blocks: Tensor, block_size: int) -> str:
    """Write the blocks ``(S, n)`` of a head."""
    groups = [torch.cat([*group]) for group in blocks.split(QUERIES)]
    counts = [
        torch.bincount(group[group >= 0], minlength=QUERIES * number // block_size + 1).tolist()
        for number, group in enumerate(groups)
    ]
    return " ".join("".join(map(str, count)) for count in counts)


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
    recording = options.open_recording(arguments, __doc__)
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
                recording.note(trained={"seed": seed} | describe(observe(model, tokens), NSA.nsa.select_block_size))
            recording.add(point)
    print(f"\n{table(recording.points)}\n\nRecorded in {arguments.json}.")


if __name__ == "__main__":
    main()
