"""Loss of a converted model that is trained further, with that of the dense model trained as long.

    python -m benchmarks transformers.up_training --json benchmarks/results/up_training.json

A small dense Llama of bytes learns Python's standard library (:mod:`benchmarks.transformers.llama`). It is then
converted: the selected branch alone, and all three. These models and the dense one start from the same weights, with a
new AdamW, and read the same sequences. The first ``held_out`` loss of a model is right after the conversion.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.transformers.llama import Experiment, Run, parser
from flexnsa.transformers import convert

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "three branches": ("cmp", "slc", "win"),
    "selected branch": ("slc",),
}


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser(__doc__, json="up_training.json", first_steps=600, every=20).parse_args(argv)
    if arguments.tiny:
        arguments.first_steps, arguments.steps, arguments.seq_len, arguments.every = 6, 4, 256, 2
    experiment = Experiment(arguments, __doc__)
    pretrained = experiment.dense()
    start = {name: tensor.clone() for name, tensor in pretrained.state_dict().items()}
    for name, branches in IMPLEMENTATIONS.items():
        pretrained.load_state_dict(start)
        model = convert(pretrained, experiment.nsa, branches=branches) if branches else pretrained
        experiment.train(Run, name, model, arguments.steps, seed=2)


if __name__ == "__main__":
    main()
