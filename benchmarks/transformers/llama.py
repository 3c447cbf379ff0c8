"""A small Llama of bytes that learns Python's standard library, dense or converted; a stopped training resumes.

It reads sequences of 8,192 bytes, in bf16 by autocast. ``held_out`` is the loss in nats on held-out sequences after so
many steps, the first before any; ``losses`` are means over ``--every`` steps. After as many the state is saved next to
the JSON file (``.pt``), from which the same command goes on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from benchmarks.harness import options
from benchmarks.harness.recording import Recording
from benchmarks.harness.setting import TINY_SIZES
from flexnsa import NSAConfig
from flexnsa.lm import read_corpus

SIZES: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 8192}
TINY: dict[str, Any] = SIZES | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 8}
HELD_OUT_ROWS = 8


def parser(doc: str | None, *, json: str, first_steps: int, every: int) -> argparse.ArgumentParser:
    """Make the parser of a benchmark that trains Llamas."""
    made = options.parser(doc, json=options.RESULTS / json, deadline=480, tiny=False)
    made.add_argument("--first-steps", type=int, default=first_steps, help="of the dense model; default: %(default)s")
    made.add_argument("--steps", type=int, default=300, help="of all weights, after these; default: %(default)s")
    made.add_argument("--batch", type=int, default=4, help="rows of a step; default: %(default)s")
    made.add_argument("--seq-len", type=int, default=8192, help="tokens of a row; default: %(default)s")
    made.add_argument("--lr", type=float, default=6e-4, help="learning rate; default: %(default)s")
    made.add_argument("--warm-up", type=int, default=50, help="steps until it is reached; default: %(default)s")
    made.add_argument("--every", type=int, default=every, help="steps between looks; default: %(default)s")
    return made


class Experiment:
    """Trainings of one dense model and of what is made of it, on the same rows, until the deadline."""

    def __init__(self, arguments: argparse.Namespace, doc: str | None, **training: Any) -> None:
        """Open the recording and note all sizes; ``training`` are settings beside those of every experiment."""
        self.arguments, self.end = arguments, time.monotonic() + arguments.deadline
        self.rows = Rows(arguments.seq_len, arguments.device)
        self.recording = options.open_recording(arguments, doc, keep=True)
        self.sizes, self.nsa = (TINY, TINY_SIZES) if arguments.tiny else (SIZES, NSAConfig())
        if "rope_theta" in arguments:
            self.sizes = self.sizes | {"rope_parameters": {"rope_type": "default", "rope_theta": arguments.rope_theta}}
        names = ("batch", "seq_len", "lr", "warm_up")
        training |= {name: getattr(arguments, name) for name in names} | {"held_out_rows": HELD_OUT_ROWS}
        setting = {"device": arguments.device, "sizes": self.sizes, "nsa": asdict(self.nsa), "training": training}
        self.recording.note(setting=setting)

    def train(self, kind: type[Run], name: str, model: Any, steps: int, seed: int) -> Run:
        """Train a model; rows are drawn by the seed."""
        run = kind(name, model, steps, self.arguments)
        self.rows.seek(seed, run.point["steps"], self.arguments.batch)
        if not run.resume(self.rows, self.recording, self.end):
            raise SystemExit("the deadline is over; the same command resumes here")
        return run

    def dense(self) -> Any:
        """Train the dense model from which all begin."""
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**self.sizes))
        return self.train(Run, "pretraining", model, self.arguments.first_steps, seed=1).model


class Run:
    """Training of one workload, which can be stopped after any ``--every`` steps."""

    def __init__(self, name: str, model: Any, steps: int, arguments: argparse.Namespace) -> None:
        self.name, self.arguments, self.steps = name, arguments, steps
        self.device = arguments.device
        self.model = model.to(self.device)
        self.optimizer = torch.optim.AdamW(self.groups(), lr=arguments.lr, betas=(0.9, 0.95))
        self.point: dict[str, Any] = {"name": name, "steps": 0, "losses": [], "held_out": [], "seconds": 0.0}
        if self.path.exists():
            state = torch.load(self.path, map_location=self.device)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.point = state["point"]

    def groups(self) -> Iterable[Any]:
        """Return the parameters that learn, perhaps in groups with rates of their own."""
        return self.model.parameters()

    @property
    def path(self) -> Path:
        """Return where the state is kept."""
        return self.arguments.json.with_suffix(f".{self.name.replace(' ', '_')}.pt")

    @property
    def is_done(self) -> bool:
        """Whether there is no step left."""
        return self.point["steps"] >= self.steps

    def resume(self, rows: Rows, recording: Recording, end: float) -> bool:
        """Train until it is done, or until the time is up; return whether it is done."""
        if not self.point["held_out"]:
            self._evaluate(rows, recording)
        while not self.is_done:
            if time.monotonic() > end:
                return False
            begin, count = time.perf_counter(), min(self.arguments.every, self.steps - self.point["steps"])
            losses = [self._step(rows) for _ in range(count)]
            self.point["losses"].append(round(torch.stack(losses).mean().item(), 4))
            self.point["seconds"] += time.perf_counter() - begin
            self._evaluate(rows, recording)
        return True

    def _step(self, rows: Rows) -> Tensor:
        for group in self.optimizer.param_groups:
            rate = group.setdefault("rate", group["lr"])
            group["lr"] = rate * min(1.0, (self.point["steps"] + 1) / self.arguments.warm_up)
        loss = self.objective(rows.batch(self.arguments.batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.point["steps"] += 1
        return loss.detach()

    def objective(self, x: Tensor) -> Tensor:
        """Return what a step differentiates."""
        return self._loss(x)

    def _loss(self, x: Tensor, **options: Any) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            return self.model(x, labels=x, use_cache=False, **options).loss

    def _evaluate(self, rows: Rows, recording: Recording) -> None:
        with torch.no_grad():
            loss = torch.stack([self._loss(row[None]) for row in rows.held_out]).mean().item()
        self.point["held_out"].append([self.point["steps"], round(loss, 5)])
        recording.add(self.point, ("name",))
        print(f"{self.name}: step {self.point['steps']}, held out {loss:.4f} nats", flush=True)
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "point": self.point}
        torch.save(state, self.path.with_suffix(".tmp"))
        self.path.with_suffix(".tmp").replace(self.path)


class Rows:
    """Rows of bytes: the same for all implementations, and others for the training before."""

    def __init__(self, seq_len: int, device: str) -> None:
        corpus = read_corpus()
        self.train, self.seq_len, self.device = corpus.train, seq_len, device
        self.held_out = corpus.validation[: HELD_OUT_ROWS * seq_len].view(-1, seq_len).long().to(device)
        self.generator = torch.Generator()

    def seek(self, seed: int, steps: int, batch: int) -> None:
        """Go to where a run is that has taken some steps."""
        self.generator.manual_seed(seed)
        for _ in range(steps):
            self._starts(batch)

    def batch(self, batch: int) -> Tensor:
        """Draw rows ``(batch, seq_len)``."""
        starts = self._starts(batch)
        return torch.stack([self.train[i : i + self.seq_len] for i in starts.tolist()]).long().to(self.device)

    def _starts(self, batch: int) -> Tensor:
        return torch.randint(len(self.train) - self.seq_len, (batch,), generator=self.generator)
