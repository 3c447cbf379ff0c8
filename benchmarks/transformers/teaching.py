"""Loss of a converted model whose indexers alone were taught, between that of means of keys and of the best blocks.

    python -m benchmarks transformers.teaching --json benchmarks/results/teaching.json

A small dense Llama of bytes learns Python's standard library in sequences of 8,192, in bf16 by autocast, with a rotary
base that lets it look far. Its selected branch then reads 16 blocks of 64 tokens, chosen by untaught index keys, each
the mean of as many keys as by default, or of ``--index-stride``; by index keys of one token, whose scores are the true
shares of blocks; and by indexers that the selection loss has taught for ``--teaching-steps``, all else frozen. Then all
weights learn, with the dense ones of the same start beside them, for each of ``--seeds``.

``recall`` is the true shares of the selected blocks over those of the best ones, mean and least of layers and key
heads; :mod:`benchmarks.transformers.llama` describes the other fields.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.transformers.llama import Experiment, Run, parser
from flexnsa import NSAConfig, SelectionLoss
from flexnsa.optim import index_parameters, parameter_groups
from flexnsa.transformers import convert, recall

DEFAULT_STRIDE = NSAConfig.for_text(4, 1).index_stride
"""Tokens of an index key."""


class Teaching(Run):
    """Indexers learn from the selection loss; all else is frozen."""

    def groups(self) -> Iterable[Any]:
        """Return the parameters of the indexers, with their rate."""
        self.model.requires_grad_(False)
        learning = [parameter.requires_grad_() for parameter in index_parameters(self.model)]
        return [{"params": learning, "lr": self.arguments.teaching_lr}]

    def objective(self, x: Tensor) -> Tensor:
        """Return the selection loss."""
        selection = SelectionLoss(step=self.point["steps"], num_queries=self.arguments.queries)
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
        selection = SelectionLoss(step=self.point["steps"], num_queries=self.arguments.queries)
        return self._loss(x, selection=selection) + selection.total


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    names = ("rank", "index_stride", "queries", "first_steps", "teaching_steps", "teaching_lr", "steps")
    experiment = Experiment(arguments, __doc__, **{name: getattr(arguments, name) for name in names})

    def sparse(tokens_of_key: int) -> Any:
        sizes = {"index_block_size": tokens_of_key, "index_stride": tokens_of_key}
        heads = dense.config.num_attention_heads // dense.config.num_key_value_heads
        indexed = replace(experiment.nsa, index_heads=heads, **sizes)
        return convert(dense, indexed, branches=["slc"], index_rank=arguments.rank)

    dense = experiment.dense()
    # The scores of untaught index keys of one token are the true shares of blocks.
    strides = {"default means of keys": DEFAULT_STRIDE, "means of keys": arguments.index_stride, "best blocks": 1}
    for name, tokens_of_key in strides.items():
        note_recall(experiment.train(Run, name, sparse(tokens_of_key), 0, seed=1), experiment)
    taught = experiment.train(Teaching, "taught", sparse(arguments.index_stride), arguments.teaching_steps, seed=1)
    counts = [sum(x.numel() for x in xs) for xs in (index_parameters(taught.model), dense.parameters())]
    taught.point["share_of_parameters"] = counts[0] / counts[1]
    note_recall(taught, experiment)
    starts = {"dense": (Run, dense), "taught": (UpTraining, taught.model)}
    weights = {name: {key: x.clone() for key, x in model.state_dict().items()} for name, (_, model) in starts.items()}
    for seed in arguments.seeds:
        for name, (kind, model) in starts.items():
            model.load_state_dict(weights[name])
            name = f"{name}, all weights, seed {seed}"
            experiment.train(kind, name, model.requires_grad_(), arguments.steps, seed=seed)


def note_recall(run: Run, experiment: Experiment) -> None:
    """Record which share of the best blocks' attention the selected ones hold."""
    by_head = recall(run.model, experiment.rows.held_out[:1])
    run.point["recall"] = {"mean": by_head.nanmean().item(), "least": by_head.nan_to_num(torch.inf).min().item()}
    experiment.recording.add(run.point, ("name",))
    print(f"{run.name}: recall {run.point['recall']}", flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__, json="teaching.json", first_steps=2000, every=50)
    made.add_argument("--teaching-steps", type=int, default=300, help="of indexers alone; default: %(default)s")
    made.add_argument("--teaching-lr", type=float, default=2e-3, help="learning rate of these; default: %(default)s")
    made.add_argument("--index-stride", type=int, default=2, help="tokens of an index key; default: %(default)s")
    made.add_argument("--queries", type=int, default=2048, help="that teach, of each row; default: %(default)s")
    made.add_argument("--seeds", type=int, nargs="+", default=[2, 3], help="of the steps of all weights; default: 2 3")
    made.add_argument("--rope-theta", type=float, default=1e8, help="default: %(default)s")
    made.add_argument("--rank", type=int, default=32, help="of the indexers' changes; default: %(default)s")
    arguments = made.parse_args(argv)
    if arguments.tiny:
        arguments.first_steps, arguments.teaching_steps, arguments.steps = 6, 4, 2
        arguments.seq_len, arguments.every, arguments.rank = 256, 2, 4
    return arguments


if __name__ == "__main__":
    main()
