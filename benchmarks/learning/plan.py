"""How a run goes from short rows to long ones, and how much of a row NSA reads on the way.

The longer the rows, the longer nothing is learned (arXiv 2511.01033: steps grow with the square of the length), while
what was learned from short ones serves on long ones at once. So training begins with rows of a few pairs.

A branch learns to match when it is the one that can answer. As long as blocks and windows cover whole rows, nothing is
left for compressed tokens to do; when they are first needed, rows hold so many pairs that matching is not learned any
more, and scores that learned nothing select blocks at random. So once rows of 16 tokens are learned, what is selected
is a small part of the row.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch

from benchmarks.learning.tasks import Vocabulary
from flexnsa import NSAConfig

DEPTHS = 16
KINDS = ("pairs", "needle chosen", "needle")
"""Of maps: answered questions about sequences full of pairs; questions about needles, single pairs in filler, whose
block a head of the last layer selects; and answered questions about needles.
"""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """So many steps, each on so many rows of ``seq_len`` tokens with up to ``pairs`` pairs.

    ``selected_tokens``, those of a query's blocks, and ``window_size`` say how much of a row NSA reads, where that is
    less than the model's config says.
    """

    seq_len: int
    rows: int
    pairs: int
    steps: int
    selected_tokens: int | None = None
    window_size: int | None = None

    def sizes(self, config: NSAConfig) -> NSAConfig:
        """Return the sizes of the branches at this stage, forced blocks included; no parameter depends on them."""
        selected, window = config.num_selected_blocks, config.window_size
        if self.selected_tokens is not None:
            forced = config.num_init_blocks + config.num_local_blocks
            selected = min(selected, max(1, forced, self.selected_tokens // config.select_block_size))
        if self.window_size is not None:
            window = min(window, self.window_size)
        return replace(config, num_selected_blocks=selected, window_size=window)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that determines a run but its model and its seed.

    Args:
        vocabulary: of the rows.
        stages: one after the other.
        lr: peak learning rate.
        warmup_steps: first steps, over which the rate rises.
        fall_steps: last steps, over which it falls to a tenth along a half cosine.
        plain_up_to: rows of up to so many tokens are attended to by the reference, for which nothing is compiled.
        eval_every: steps between two looks at how much is recalled, in as many rows as a step has.
        map_lengths: of the rows with pairs at all depths, after the last step.
        map_pairs: most pairs in such a sequence in addition to those that are asked for.
        map_rows: of each map, a multiple of :data:`DEPTHS`.
        map_tokens: of the rows that are read at once, at least two.
    """

    vocabulary: Vocabulary
    stages: tuple[Stage, ...]
    lr: float
    warmup_steps: int = 100
    fall_steps: int = 1
    plain_up_to: int = 0
    eval_every: int = 100
    map_lengths: tuple[int, ...] = ()
    map_pairs: int = 0
    map_rows: int = 2 * DEPTHS
    map_tokens: int = 2**17

    @property
    def steps(self) -> int:
        """Count the steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    def map_questions(self, kind: str) -> int:
        """Count the questions of a map at each depth: one in each sequence of pairs, or of its share of needles."""
        return self.map_rows if kind == "pairs" else self.map_rows // DEPTHS

    def with_all_blocks(self) -> Plan:
        """Return the plan at whose stages a model reads what its config says."""
        stages = tuple(replace(stage, selected_tokens=None, window_size=None) for stage in self.stages)
        return replace(self, stages=stages)

    def at(self, step: int) -> tuple[Stage, int]:
        """Return the stage of a step counted from 0, and the step behind its last."""
        end = 0
        for stage in self.stages:
            end += stage.steps
            if step < end:
                return stage, end
        raise ValueError(f"step: expected less than {self.steps}, got {step}")

    def looks(self) -> list[tuple[int, int]]:
        """List the steps after which a run is evaluated, each with the length of its sequences then."""
        ends = itertools.accumulate(stage.steps for stage in self.stages)
        return [
            (step, stage.seq_len)
            for stage, end in zip(self.stages, ends, strict=True)
            for step in range(end - stage.steps + 1, end + 1)
            if step % self.eval_every == 0 or step == end
        ]

    def learning_rate(self, step: int) -> float:
        """Return the rate of a step counted from 0."""
        left = (self.steps - step) / self.fall_steps
        fall = 0.1 + 0.9 * (1 - torch.cos(torch.tensor(min(1.0, left) * torch.pi)).item()) / 2
        return self.lr * min(1.0, (step + 1) / self.warmup_steps) * fall
