"""The hyper-parameters of a run, which with the data and the model's config decide all of its results."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, Literal

from flexnsa.optim import COMPRESSOR_LR, INDEXER_LR
from flexnsa.primitives import (
    check_choice,
    check_int,
    check_number,
    check_positive_int,
    check_positive_number,
    check_seed,
    check_type,
    describe,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Hyper-parameters of one run.

    Args:
        steps: optimizer steps. A run may resume with another number, which decides the rate of the steps to come, and
            their stage.
        batch_size: largest number of sequences of one forward pass.
        seq_len: tokens of one sequence.
        stages: sequences that grow: ``(length, share)`` of each stage, its tokens of one sequence and its share of the
            steps. A pass has ``batch_size * seq_len`` tokens in all of them. The last length is ``seq_len``, at which a
            run is evaluated. Empty for one stage.
        dense_stages: how many of the first stages are dense, fewer than all: the selected branch alone attends, to all
            past tokens. What that leaves out, and indexers, learn nothing before they end. An evaluation attends as the
            step before it.
        indexer_stages: how many stages after dense ones are a warm-up of indexers: these learn alone, from attention
            that stays dense, and all other parameters are frozen.
        grad_accumulation: forward passes of one step on a single process. On any number of processes a step learns from
            ``batch_size * grad_accumulation`` sequences.
        lr: peak learning rate.
        min_lr: learning rate at the end of the cosine, as a fraction of ``lr``.
        warmup_steps: steps of linear warm-up.
        compressor_lr: learning rate of the compressors of keys and values, as a fraction of ``lr``. None for the value
            that the run started with: 0.1, or 1.0 in runs of versions without this field.
        indexer_lr: learning rate of indexers, as a fraction of ``lr``.
        selection_loss_weight: factor on the loss that teaches indexers, in models that have them.
        weight_decay: weight decay of matrices; vectors and embeddings are not decayed.
        beta1: decay of AdamW's first moment.
        beta2: decay of AdamW's second moment.
        clip: largest norm of the gradient of all parameters but those of indexers, and of the gradient of those.
        precision: ``"fp32"``, or ``"bf16"`` for autocast.
        pack: fill sequences with whole documents, which neither attention nor loss mixes, instead of cutting the text
            anywhere; see :class:`flexnsa.lm.data.rows.PackedDocuments`.
        seed: seed of the initial weights and of the order of the data.
        eval_every: steps between two evaluations; one more follows the last step.
        eval_sequences: number of validation sequences of one evaluation.
        checkpoint_every: steps between two checkpoints; one more follows the last step.

    Raises:
        TypeError: a field has another type.
        ValueError: a field is out of range.
    """

    steps: int = 1000
    batch_size: int = 8
    seq_len: int = 512
    stages: tuple[tuple[int, float], ...] = ()
    dense_stages: int = 0
    indexer_stages: int = 0
    grad_accumulation: int = 1
    lr: float = 1e-3
    min_lr: float = 0.1
    warmup_steps: int = 50
    compressor_lr: float | None = None
    indexer_lr: float = INDEXER_LR
    selection_loss_weight: float = 1.0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    precision: Literal["fp32", "bf16"] = "fp32"
    pack: bool = False
    seed: int = 0
    eval_every: int = 100
    eval_sequences: int = 64
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, ("fp32", "bf16"))
        check_type("pack", self.pack, bool)
        check_seed("seed", self.seed)
        may_be_zero = ("min_lr", "warmup_steps", "weight_decay", "beta1", "beta2", "compressor_lr", "indexer_lr")
        may_be_zero += ("dense_stages", "indexer_stages")
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in ("precision", "pack", "seed", "stages") or value is field.default is None:
                continue
            if isinstance(field.default, int):
                check_int(name, value, 0 if name in may_be_zero else 1)
            elif name not in may_be_zero:
                check_positive_number(name, value)
            else:
                check_number(name, value)
                if value < 0:
                    raise ValueError(f"{name}: expected at least 0, got {describe(value)}")
        for name in ("beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise ValueError(f"{name}: expected less than 1, got {getattr(self, name)}")
        if self.min_lr > 1:
            raise ValueError(f"min_lr: expected a fraction of lr, at most 1, got {self.min_lr}")
        object.__setattr__(self, "stages", _pairs(self.stages))  # JSON has lists
        if self.stages:
            self._check_stages()
        most = max(0, len(self.stages) - 1)
        for name, left in (("dense_stages", most), ("indexer_stages", most - self.dense_stages)):
            if getattr(self, name) > left:
                expected = f"at most {left}, because the last stage, of {most + 1}, selects"
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)}")

    def _check_stages(self) -> None:
        lengths, shares = zip(*self.stages, strict=True)
        tokens, starts = self.batch_size * self.seq_len, self._starts()
        expected = {
            "lengths that do not fall": list(lengths) == sorted(lengths),
            f"the last length to be seq_len={self.seq_len}": lengths[-1] == self.seq_len,
            f"lengths that divide batch_size * seq_len={tokens}": not any(tokens % length for length in lengths),
            "shares whose sum is 1": math.isclose(sum(shares), 1, abs_tol=1e-6),
            f"at least one of {self.steps} steps for each": len({*starts, self.steps}) > len(starts),
        }
        for what, holds in expected.items():
            if not holds:
                got = ",".join(f"{length}:{share:g}" for length, share in self.stages)
                raise ValueError(f"stages: expected {what}, got {got}")

    def _starts(self) -> list[int]:
        """Return the first step of each stage."""
        return [round(self.steps * share) for share in accumulate((share for _, share in self.stages), initial=0)][:-1]

    def by_stage(self) -> dict[int, TrainConfig]:
        """Return the config of each stage by its first step: its ``seq_len``, and ``batch_size`` for as many tokens."""
        tokens, single = self.batch_size * self.seq_len, {"stages": (), "dense_stages": 0, "indexer_stages": 0}
        return {
            start: replace(self, **single, seq_len=length, batch_size=tokens // length)
            for start, (length, _) in zip(self._starts(), self.stages, strict=True)
        } or {0: self}

    def at(self, step: int) -> TrainConfig:
        """Return the config of the stage of a step, counted from 0."""
        check_int("step", step, 0)
        return [config for start, config in self.by_stage().items() if start <= step][-1]

    def kind(self, step: int) -> Literal["dense", "indexers", "joint"]:
        """Return of which kind the stage of a step is, counted from 0: the last one selects, and all of it learns."""
        check_int("step", step, 0)
        warming = sum(start <= step for start in self._starts()[1:]) - self.dense_stages
        return "dense" if warming < 0 else "indexers" if warming < self.indexer_stages else "joint"

    @property
    def sequences_per_step(self) -> int:
        """Sequences that one step learns from."""
        return self.batch_size * self.grad_accumulation

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step learns from."""
        return self.sequences_per_step * self.seq_len

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0: linear warm-up, then a cosine down to ``min_lr * lr``."""
        check_int("step", step, 0)
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
        return self.lr * (self.min_lr + (1 - self.min_lr) * cosine)


def _pairs(stages: Any) -> tuple[tuple[int, float], ...]:
    """Return stages as tuples, each checked by itself."""
    try:
        pairs = tuple((length, share) for length, share in stages)
    except (TypeError, ValueError) as error:
        raise TypeError(f"stages: expected pairs of a length and a share, got {describe(stages)}") from error
    for length, share in pairs:
        check_positive_int("stages", length)
        check_positive_number("stages", share)
    return pairs


def completed(config: TrainConfig, compressor_lr: float = COMPRESSOR_LR) -> TrainConfig:
    """Return the config, with ``compressor_lr`` where it leaves that open."""
    return config if config.compressor_lr is not None else replace(config, compressor_lr=compressor_lr)


_M7C = TrainConfig(steps=50_000, batch_size=8, seq_len=2048, lr=2e-4, weight_decay=0.01, warmup_steps=2000)

_TEXT = TrainConfig(steps=2000, seq_len=8192, lr=6e-4, warmup_steps=100, precision="bf16")

TRAIN_PRESETS: dict[str, TrainConfig] = {
    "small": TrainConfig(),
    "large": replace(_M7C, batch_size=1),
    "m7c-125m": replace(_M7C, precision="bf16"),
    "m7c-cpu": replace(_M7C, batch_size=2, seq_len=512),
    "text-125m": _TEXT,
    "text-small": TrainConfig(),
    "paper": _TEXT,
}
"""Hyper-parameters for the models of the same names in :data:`flexnsa.lm.PRESETS`."""
