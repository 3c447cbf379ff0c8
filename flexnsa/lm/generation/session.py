"""A decoding session: caches and a step that serve one batch of prompts after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexnsa.cache.bounds import doubled
from flexnsa.lm.generation.continuation import check_request, continue_prompts
from flexnsa.lm.generation.language_model import LanguageModel, check_model, check_prompts, last_logits
from flexnsa.lm.generation.sampling import Sampling
from flexnsa.lm.generation.steps import GROUP, Drawn, Draws, choose_steps
from flexnsa.lm.generation.stopping import OnToken, StopTokens
from flexnsa.masks.user_mods import MaskMod, ScoreMod
from flexnsa.operators.graphs import Step, capture
from flexnsa.primitives import check_int, check_positive_int, check_seed, check_type, describe


class DecodingSession:
    """Continue batches of prompts, one after the other, with the same caches and the same step.

    On CUDA a step is a graph, captured when the session is made and again when its caches grow; it serves all lengths
    below their capacity. Mods decode through FlexAttention, without a graph.

    Args:
        model: predicts the next token.
        batch_size: number of sequences ``B`` of every batch.
        max_seq_len: initial capacity of a sequence in tokens; doubled whenever it needs more.
        sampling: how to draw; by default from the model's own probabilities.
        steps: ``"graph"``, one CUDA graph per step; ``"compiled"``, by ``torch.compile``; ``"eager"``; or ``"auto"``, a
            graph on CUDA without mods, and else eager. There is no other fallback.
        score_mod: as in :func:`flexnsa.native_sparse_attention`.
        mask_mod: as in :func:`flexnsa.native_sparse_attention`.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: an argument is out of range, or no graph is possible; the message names it.

    Example:
        >>> session = DecodingSession(model, batch_size=4, max_seq_len=4096)
        >>> texts = [session.generate(prompts, max_new_tokens=100) for prompts in batches]  # each (4, S)
    """

    def __init__(
        self,
        model: LanguageModel,
        batch_size: int,
        max_seq_len: int,
        *,
        sampling: Sampling | None = None,
        steps: str = "auto",
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
    ) -> None:
        check_model(model)
        check_positive_int("batch_size", batch_size)
        check_positive_int("max_seq_len", max_seq_len)
        sampling = Sampling() if sampling is None else sampling
        check_type("sampling", sampling, Sampling)
        mods = {"score_mod": score_mod, "mask_mod": mask_mod}
        device = model.embedding.weight.device
        self._mods: dict[str, Any] = {name: mod for name, mod in mods.items() if mod is not None}
        self.steps = choose_steps(steps, device, self._mods)
        self.model, self.batch_size, self.max_seq_len = model, batch_size, max_seq_len
        self.caches = model.new_caches(batch_size, max_seq_len)
        self._predict: Any = torch.compile(model, dynamic=False) if self.steps == "compiled" else model
        self._draws = Draws(batch_size, sampling, device)
        self._active = torch.ones(batch_size, dtype=torch.int32, device=device)
        self._longest = 0
        self._graph = self._capture()

    def generate(
        self,
        prompts: Tensor,
        max_new_tokens: int,
        *,
        lengths: Tensor | None = None,
        stop_tokens: StopTokens = (),
        seed: int = 0,
        on_token: OnToken | None = None,
        group: int | None = None,
    ) -> list[list[int]]:
        """Continue each of ``prompts (B, S)``; see :func:`flexnsa.lm.generate_tokens`."""
        request = check_request(self.model, prompts, max_new_tokens, lengths, stop_tokens, seed, on_token, group)
        self._check_rows(prompts)
        self.reserve(request.max_seq_len)
        return continue_prompts(self, request)

    @torch.no_grad()
    def prefill(self, prompts: Tensor, lengths: Tensor | None = None, *, seed: int = 0) -> Drawn:
        """Reset, read the first ``lengths (B,)`` tokens of ``prompts (B, S)`` and draw one token for each sequence.

        Raises:
            TypeError: an argument is not of its kind.
            ValueError: an argument does not fit; the message names it.
        """
        lengths = check_prompts(self.model, prompts, lengths)
        self._check_rows(prompts)
        check_seed("seed", seed)
        self.reserve(prompts.shape[1])
        if self._longest:
            self._reset()
        self._longest = prompts.shape[1]
        self._active.fill_(1)
        self._draws.generator.manual_seed(seed)
        self._draws.draw(last_logits(self.model, prompts, lengths, caches=self.caches, **self._mods))
        return self._draws.read(1)

    @torch.no_grad()
    def step(self, count: int = 1) -> Drawn:
        """Draw the next ``count`` tokens of each active sequence, at most 8; the first step reads the last draw.

        Raises:
            TypeError: ``count`` is not an int.
            ValueError: it is out of range, or no prompt has been read.
        """
        check_int("count", count, 1, GROUP)
        if not self._longest:
            raise ValueError("prompts: expected some to continue, got a step before the first prefill")
        self.reserve(self._longest + count)
        step = self._next if self._graph is None else self._graph
        for _ in range(count):
            step()
        self._longest += count
        return self._draws.read(count)

    def set_active(self, active: Sequence[bool]) -> None:
        """Set which sequences continue. The others keep their tokens, and their draws are undefined.

        Raises:
            TypeError: ``active`` is not a sequence of bools.
            ValueError: it does not have one for each sequence of the batch.
        """
        check_type("active", active, Sequence)
        for goes_on in active:
            check_type("active", goes_on, bool)
        if len(active) != self.batch_size:
            raise ValueError(f"active: expected one for each of {self.batch_size} rows, got {len(active)}")
        self._active.copy_(torch.tensor(active, dtype=torch.int32))

    @torch.no_grad()
    def reserve(self, max_seq_len: int) -> None:
        """Double the capacity until sequences of ``max_seq_len`` tokens fit; tokens are kept.

        Raises:
            TypeError: it is not an int.
            ValueError: it is out of range.
        """
        check_positive_int("max_seq_len", max_seq_len)
        if max_seq_len > self.max_seq_len:
            capacity = doubled(self.max_seq_len, max_seq_len)
            self._graph = None  # free it before the new one takes memory
            for cache in self.caches:
                cache.grow(capacity)
            self.max_seq_len = capacity
        if self._graph is None:  # also where an earlier capture ran out of memory
            self._graph = self._capture()

    def _next(self) -> None:
        """Read the newest token of each active sequence and draw the next; a graph holds this."""
        logits = self._predict(self._draws.newest, caches=self.caches, lengths=self._active, **self._mods)
        self._draws.draw(logits[:, 0])

    @torch.no_grad()
    def _capture(self) -> Step | None:
        """Capture the step where steps are graphs. Inactive sequences keep their state, so all are made inactive."""
        if self.steps != "graph":
            return None
        empty, active, draws = not self._longest, self._active.clone(), self._draws.state()
        try:
            if empty:
                self._next()  # even an inactive sequence needs a token before its next one
            self._active.zero_()
            generator = self._draws.generator
            advice = "steps: expected 'compiled' or 'eager' for a model that no CUDA graph holds"
            return capture(self._next, generator.device, advice=advice, generator=generator)
        finally:
            self._active.copy_(active)
            self._draws.restore(draws)
            if empty:
                self._reset()

    def _reset(self) -> None:
        for cache in self.caches:
            cache.reset()
        self._longest = 0

    def _check_rows(self, prompts: Tensor) -> None:
        if len(prompts) != self.batch_size:
            raise ValueError(f"prompts: expected {self.batch_size} rows, as the session has, got {describe(prompts)}")
