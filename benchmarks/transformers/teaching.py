"""Loss of a converted model whose indexers alone were taught, between that of means of keys and of the best blocks.

    python -m benchmarks transformers.teaching --json benchmarks/results/teaching.json

A small dense Llama of bytes learns Python's standard library in sequences of 8,192, in bf16 by autocast, with a rotary
base that lets it look far. Its selected branch then reads 16 blocks of 64 tokens, chosen by untaught index keys, each
the mean of 8 keys; by index keys of one token, whose scores are the true shares of blocks; and by indexers that the
selection loss has taught for ``--teaching-steps``, all else frozen. Then all weights learn, with the dense ones of the
same start beside them, for each of ``--seeds``.

``held_out`` is the loss in nats on held-out sequences after so many steps; ``recall`` the true shares of the selected
blocks over those of the best ones, mean and least of layers and key heads. States are kept as in up_training.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from benchmarks.harness import options
from benchmarks.harness.recording import Recording
from benchmarks.harness.setting import TINY_SIZES
from benchmarks.transformers.up_training import FIRST, HELD_OUT_ROWS, SIZES, TINY, Rows, Run
from flexnsa import NSAConfig, SelectionLoss
from flexnsa.optim import index_parameters, parameter_groups
from flexnsa.transformers import convert, recall

KEYS = {"means of keys": 8, "best blocks": 1}
"""Tokens of an index key. Untaught, it is the mean of their keys; that of one token gives the true shares of blocks."""


class Teaching(Run):
    """Indexers learn from the selection loss; all else is frozen."""

    def groups(self) -> Iterable[Any]:
        """Return the parameters of the indexers."""
        self.model.requires_grad_(False)
        return [parameter.requires_grad_() for parameter in index_parameters(self.model)]

    def objective(self, x: Tensor) -> Tensor:
        """Return the selection loss."""
        selection = SelectionLoss(step=self.point["steps"])
        with torch.autocast(self.device, torch.bfloat16):
            self.model.model(x, use_cache=False, selection=selection)
        return torch.as_tensor(selection.total)


class UpTraining(Run):
    """All weights learn: from the text, and indexers from the selection loss."""

    def groups(self) -> Iterable[Any]:
        """Return all parameters, compressors and indexers with their rates."""
        return parameter_groups(self.model.requires_grad_(), lr=self.arguments.lr, weight_decay=0.01)

    def objective(self, x: Tensor) -> Tensor:
        """Return both losses."""
        selection = SelectionLoss(step=self.point["steps"])
        return self._loss(x, selection=selection) + selection.total


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    end = time.monotonic() + arguments.deadline
    recording = options.open_recording(arguments, __doc__, keep=True)
    rows = Rows(arguments.seq_len, arguments.device)
    sizes, nsa = (TINY, TINY_SIZES) if arguments.tiny else (SIZES, NSAConfig())
    sizes: dict[str, Any] = sizes | {"rope_parameters": {"rope_type": "default", "rope_theta": arguments.rope_theta}}
    names = ("batch", "seq_len", "lr", "warm_up", "rank", "first_steps", "teaching_steps", "steps")
    training = {name: getattr(arguments, name) for name in names} | {"held_out_rows": HELD_OUT_ROWS}
    recording.note(setting={"device": arguments.device, "sizes": sizes, "nsa": asdict(nsa), "training": training})

    def train(kind: type[Run], name: str, model: Any, steps: int, seed: int) -> Run:
        run = kind(name, model, steps, arguments)
        rows.seek(seed, run.point["steps"], arguments.batch)
        if not run.resume(rows, recording, end):
            raise SystemExit("the deadline is over; the same command resumes here")
        return run

    def sparse(tokens_of_key: int) -> Any:
        heads = sizes["num_attention_heads"] // sizes["num_key_value_heads"]
        indexed = replace(nsa, index_heads=heads, index_block_size=tokens_of_key, index_stride=tokens_of_key)
        return convert(dense, indexed, branches=["slc"], index_rank=arguments.rank)

    torch.manual_seed(0)
    dense = train(Run, FIRST, LlamaForCausalLM(LlamaConfig(**sizes)), arguments.first_steps, seed=1).model
    for name, tokens_of_key in KEYS.items():
        note_recall(train(Run, name, sparse(tokens_of_key), 0, seed=1), rows, recording)
    taught = train(Teaching, "taught", sparse(KEYS["means of keys"]), arguments.teaching_steps, seed=1)
    counts = [sum(x.numel() for x in xs) for xs in (index_parameters(taught.model), dense.parameters())]
    taught.point["share_of_parameters"] = counts[0] / counts[1]
    note_recall(taught, rows, recording)
    starts = {"dense": (Run, dense), "taught": (UpTraining, taught.model)}
    weights = {name: {key: x.clone() for key, x in model.state_dict().items()} for name, (_, model) in starts.items()}
    for seed in arguments.seeds:
        for name, (kind, model) in starts.items():
            model.load_state_dict(weights[name])
            train(kind, f"{name}, all weights, seed {seed}", model.requires_grad_(), arguments.steps, seed=seed)


def note_recall(run: Run, rows: Rows, recording: Recording) -> None:
    """Record which share of the best blocks' attention the selected ones hold."""
    found = recall(run.model, rows.held_out[:1])
    run.point["recall"] = {"mean": found.nanmean().item(), "least": found.nan_to_num(torch.inf).min().item()}
    recording.add(run.point, ("name",))
    print(f"{run.name}: recall {run.point['recall']}", flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options.parser(__doc__, json=options.RESULTS / "teaching.json", deadline=480, tiny=False)
    parser.add_argument("--first-steps", type=int, default=1200, help="of the dense model alone; default: %(default)s")
    parser.add_argument("--teaching-steps", type=int, default=300, help="of indexers alone; default: %(default)s")
    parser.add_argument("--steps", type=int, default=300, help="of all weights; default: %(default)s")
    parser.add_argument("--seeds", type=int, nargs="+", default=[2, 3], help="of these steps; default: 2 3")
    parser.add_argument("--rope-theta", type=float, default=1e8, help="default: %(default)s")
    parser.add_argument("--rank", type=int, default=32, help="of the indexers' changes; default: %(default)s")
    parser.add_argument("--batch", type=int, default=4, help="rows of a step; default: %(default)s")
    parser.add_argument("--seq-len", type=int, default=8192, help="tokens of a row; default: %(default)s")
    parser.add_argument("--lr", type=float, default=6e-4, help="learning rate; default: %(default)s")
    parser.add_argument("--warm-up", type=int, default=50, help="steps until it is reached; default: %(default)s")
    parser.add_argument("--every", type=int, default=50, help="steps between looks; default: %(default)s")
    arguments = parser.parse_args(argv)
    if arguments.tiny:
        arguments.first_steps, arguments.teaching_steps, arguments.steps = 6, 4, 2
        arguments.seq_len, arguments.every, arguments.rank = 256, 2, 4
    return arguments


if __name__ == "__main__":
    main()
