"""Train one model on recall, from short sequences to long ones; a stopped run resumes.

Tokens of one kind begin with embeddings that have something in common, as those of text come to have: without it heads
have nothing by which to tell kinds, or positions, apart from contents.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.learning.plan import DEPTHS, KINDS, Plan, Stage
from benchmarks.learning.replay import Replay, Step
from benchmarks.learning.selection import layer_inputs, selected_blocks, unscored_blocks
from benchmarks.learning.tasks import SLOT, Rows, Vocabulary, depth_rows, training_rows
from benchmarks.learning.variants import Variant
from benchmarks.learning.workers import Report
from flexnsa import NativeSparseAttention, NSAConfig, SelectionLoss
from flexnsa.lm import DecoderConfig
from flexnsa.optim import index_parameters

KINDS_IN_COMMON = 2.0
"""Standard deviation of what the embeddings of a kind have in common; what each has of its own has 1."""
LONGEST_SCORED = 4096
"""Tokens of the longest rows of which selection is looked at: the scores of all blocks are laid out for it."""


@dataclass
class Record:
    """What a run has seen so far; plain values.

    The columns ``loss``, ``recall``, ``found`` and ``unscored`` have an entry for each of :meth:`Plan.looks`, the last
    two for the first of them only: long sequences are not scored.

    Args:
        loss: nats, means over the steps since the entry before.
        recall: share answered of new sequences, questions beyond the reach of a window alone.
        found: share of these questions at which a head of the last layer selects the right block.
        unscored: share of the blocks before such a question that score exactly 0 in the last layer, so that selection
            cannot tell them apart.
        maps: by kind and length, how many of :meth:`Plan.map_questions` were answered, or had their block chosen, at
            each depth, from the start of the sequence to its end.
        obstacles: why steps were not replayed that should have been.
    """

    loss: list[float] = field(default_factory=list)
    recall: list[float] = field(default_factory=list)
    found: list[float] = field(default_factory=list)
    unscored: list[float] = field(default_factory=list)
    maps: dict[str, dict[str, list[int]]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    obstacles: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Run:
    """A model on its way through a plan, kept in a file; on a GPU its steps can be replayed."""

    def __init__(
        self,
        variant: Variant,
        config: DecoderConfig,
        plan: Plan,
        *,
        seed: int,
        device: str,
        path: Path,
        replayed: bool = False,
    ) -> None:
        self.plan = plan if variant.tight else plan.with_all_blocks()
        self.seed, self.device, self.path, self.replayed = seed, device, path, replayed
        self.config = config = variant.configure(config)
        torch.manual_seed(seed)
        self.model = variant.build(config).to(device)
        _bring_kinds_together(self.model.embedding, plan.vocabulary)
        self.optimizer = torch.optim.AdamW(
            variant.rates(self.model), lr=plan.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=device == "cuda"
        )
        self._of_indexers = index_parameters(self.model)
        self._taught_by_text = [x for x in self.model.parameters() if x not in set(self._of_indexers)]
        self._step_on_device = torch.zeros((), dtype=torch.int64, device=device)  # that a graph reads
        self.step, self.record = 0, Record()
        self._replay: tuple[Stage, Replay] | None = None
        # Beyond it no window of any layer reaches, nor all together.
        self.reach = config.num_layers * config.nsa.window_size
        self.selects = config.attention == "nsa" and "slc" in config.branches
        self.kinds = [kind for kind in KINDS if self.selects or kind != "needle chosen"]
        if path.exists():
            self._load()
        for group in self.optimizer.param_groups if replayed else ():
            group.update(capturable=True, lr=torch.zeros((), device=device))

    def resume(self, until: float, report: Report) -> None:
        """Train until the steps or the time, ``time.time()``, are up; maps end a run. Report on the way, keep all."""
        plan, losses = self.plan, list[Tensor]()
        started = time.perf_counter()
        if self.step < plan.steps:
            self.record.maps = Record().maps
        while self.step < plan.steps and time.time() < until:
            stage, end = plan.at(self.step)
            losses.append(self._train_step(stage))
            self.step += 1
            if self.step % plan.eval_every and self.step != end:
                continue
            self.record.loss.append(round(torch.stack(losses).mean().item(), 4))
            losses.clear()
            self.record.seconds += time.perf_counter() - started
            self._note_obstacle()
            self._evaluate(stage)
            self._save()
            report(self.describe())
            started = time.perf_counter()
        if self.step == plan.steps:
            self._draw_maps(until, report)
        self._save()

    def rehearse(self) -> None:
        """Do once, with every length, what has to be compiled; for the sake of what is compiled."""
        for stage in self.plan.stages:
            if stage.seq_len > self.plan.plain_up_to:
                self._train_step(stage)
                self._evaluate(stage)
        for seq_len in self.plan.map_lengths:
            for kind in self.kinds:
                self._depth_map(kind, seq_len)

    def describe(self) -> dict[str, Any]:
        """Return what the run has seen."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return {"step": self.step, "parameters": parameters, **asdict(self.record)}

    def _train_step(self, stage: Stage) -> Tensor:
        rows = self._rows(stage, self.step)
        for group in self.optimizer.param_groups:
            rate = group["scale"] * self.plan.learning_rate(self.step)
            group["lr"] = group["lr"].fill_(rate) if self.replayed else rate
        self._step_on_device.fill_(self.step)
        self._attend_as_at(stage)
        return self._step_of(stage)(rows.tokens, rows.targets)

    def _step_of(self, stage: Stage) -> Step:
        """Return the function that does the steps of a stage; a graph has one length, so each stage has its own."""
        if not self.replayed:
            return self._update
        if self._replay is None or self._replay[0] != stage:
            self._replay = stage, Replay(self._update)
        return self._replay[1]

    def _update(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Learn from rows, indexers from the selection loss; return the language loss alone."""
        self.optimizer.zero_grad()
        selection = SelectionLoss(seed=self.seed, step=self._step_on_device) if self._of_indexers else None
        with self._precision():
            loss = self.model(tokens, targets=targets, selection=selection)
        (loss if selection is None else loss + selection.total).backward()
        for parameters in (self._of_indexers, self._taught_by_text):  # apart: neither loss slows the other
            nn.utils.clip_grad_norm_(parameters, 1.0)
        self.optimizer.step()
        return loss.detach()

    def _note_obstacle(self) -> None:
        if self._replay is not None and self._replay[1].obstacle not in (None, *self.record.obstacles):
            self.record.obstacles.append(self._replay[1].obstacle)

    def _rows(self, stage: Stage, step: int, *, trained_on: bool = True) -> Rows:
        generator = self._generator(step, trained_on=trained_on)
        return training_rows(self.plan.vocabulary, stage.rows, stage.seq_len, stage.pairs, generator)

    def _generator(self, step: int, *, trained_on: bool) -> torch.Generator:
        """Return the generator of a step, another one for sequences that are not trained on."""
        return torch.Generator(self.device).manual_seed(((2 * self.seed + (not trained_on)) << 32) + step)

    def _attend_as_at(self, stage: Stage) -> None:
        plain = stage.seq_len <= self.plan.plain_up_to
        self._attend(stage.sizes(self.config.nsa), "reference" if plain else self.config.impl)

    def _attend(self, sizes: NSAConfig, impl: str) -> None:
        for module in self.model.modules():
            if isinstance(module, NativeSparseAttention):
                module.config, module.impl = sizes, impl

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")

    @torch.no_grad()
    def _answers(self, rows: Rows) -> Tensor:
        """Return for every token whether the likeliest value is the one that is asked for."""
        with self._precision():
            return self.model(rows.tokens).argmax(-1) == rows.targets

    def _evaluate(self, stage: Stage) -> None:
        rows = self._rows(stage, self.step, trained_on=False)
        far = rows.distances >= min(self.reach, stage.seq_len // 2)
        looks = [(self.record.recall, self._answers)]
        if self.selects and stage.seq_len <= LONGEST_SCORED:
            looks += [(self.record.found, self._finds), (self.record.unscored, self._unscored)]
        for record, look in looks:
            record.append(round(look(rows)[far].float().mean().item(), 4))

    @torch.no_grad()
    def _finds(self, rows: Rows) -> Tensor:
        """Return for every token whether a head of the last layer selects the block with the value asked for."""
        with self._precision():
            layer, x = layer_inputs(self.model, rows.tokens)[-1]
            blocks = selected_blocks(layer, x, impl=layer.impl)
        value_at = torch.arange(x.shape[1], device=x.device) - rows.distances + 1
        right = value_at // layer.config.select_block_size
        return (blocks == right[:, None, :, None]).any(3).any(1)

    @torch.no_grad()
    def _unscored(self, rows: Rows) -> Tensor:
        with self._precision():
            return unscored_blocks(*layer_inputs(self.model, rows.tokens)[-1])

    def _draw_maps(self, until: float, report: Report) -> None:
        """Draw the maps that there are not yet, short rows first, while there is time."""
        self._attend(self.config.nsa, self.config.impl)
        for seq_len in self.plan.map_lengths:
            for kind in self.kinds:
                counts = self.record.maps.setdefault(kind, {})  # states saved earlier know fewer kinds
                if str(seq_len) not in counts and time.time() < until:
                    counts[str(seq_len)] = self._depth_map(kind, seq_len)
                    report(self.describe())

    def _depth_map(self, kind: str, seq_len: int) -> list[int]:
        """Ask at the end of sequences for pairs at all depths, together or each alone in filler; count the answers.

        The kind ``needle chosen`` counts the questions whose block the last layer selects; see :meth:`_finds`.
        """
        plan, answers, look = self.plan, list[Tensor](), self._finds if kind == "needle chosen" else self._answers
        depths = torch.linspace(0, 1, DEPTHS, device=self.device).expand(plan.map_rows, -1)
        pairs = min(plan.map_pairs, seq_len // 16)
        if kind != "pairs":
            depths, pairs = depths[: plan.map_questions(kind)].reshape(-1, 1), 0
        generator = self._generator(seq_len, trained_on=False)
        for part in depths.split(max(2, plan.map_tokens // seq_len)):
            rows = depth_rows(plan.vocabulary, seq_len, part, pairs, generator)
            answers.append(look(rows)[:, -SLOT * part.shape[1] :: SLOT])
        return torch.cat(answers).reshape(-1, DEPTHS).sum(0).tolist()

    def _save(self) -> None:
        state: dict[str, Any] = {"step": self.step, "record": asdict(self.record)}
        state |= {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(self.path.name + ".tmp")
        torch.save(state, temporary)
        temporary.replace(self.path)

    def _load(self) -> None:
        state = torch.load(self.path, map_location=self.device)
        self.step, self.record = state["step"], Record(**state["record"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


@torch.no_grad()
def _bring_kinds_together(embedding: nn.Embedding, vocabulary: Vocabulary) -> None:
    """Add a common vector to the embeddings of keys, one to those of values, and one to those of filler."""
    for kind in vocabulary.kinds():
        embedding.weight[kind] += KINDS_IN_COMMON * torch.randn_like(embedding.weight[0])
