"""Generation: one pass over the prompts, then a step for every token, which reads the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexnsa.lm.generation.continuation import check_request, continue_prompts
from flexnsa.lm.generation.language_model import LanguageModel, check_model, last_logits
from flexnsa.lm.generation.sampling import Sampling
from flexnsa.lm.generation.session import DecodingSession
from flexnsa.lm.generation.steps import Drawn, Draws
from flexnsa.lm.generation.stopping import OnToken, StopTokens
from flexnsa.masks.user_mods import MaskMod, ScoreMod
from flexnsa.primitives import check_choice, check_positive_int, check_type


def generate_tokens(
    model: LanguageModel,
    prompts: Tensor,
    max_new_tokens: int,
    *,
    lengths: Tensor | None = None,
    sampling: Sampling | None = None,
    stop_tokens: StopTokens = (),
    seed: int = 0,
    on_token: OnToken | None = None,
    cached: bool = True,
    steps: str = "auto",
    group: int | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> list[list[int]]:
    """Continue each prompt.

    On CUDA every step is the replay of one graph, tokens are drawn on the device, and they reach the host in groups of
    8. User mods decode without a graph, most through FlexAttention. For several batches of prompts use a
    :class:`flexnsa.lm.DecodingSession`, which captures its graph once.

    Args:
        model: predicts the next token.
        prompts: int ``(B, S)``, padded on the right.
        max_new_tokens: largest number of new tokens of a sequence.
        lengths: int ``(B,)``, tokens of each prompt, at least 1; by default ``S``.
        sampling: how to draw; by default from the model's own probabilities.
        stop_tokens: a sequence ends when it draws one of them, a token or a whole sequence, which is not returned.
        seed: seed of the draws, which repeats them on the same kind of device.
        on_token: called for every token that is returned; a token that may start a stop sequence is held until it is
            known whether it does.
        cached: False computes the whole sequence again for every token: the same tokens, slower.
        steps: ``"graph"``, ``"compiled"``, ``"eager"`` or ``"auto"``, as in :class:`flexnsa.lm.DecodingSession`;
            without a cache they are eager.
        group: number of tokens of a sequence, at most 8, that are drawn before the host reads them; by default 8 on
            CUDA, where reading synchronizes, and else 1. Tokens sampled after a stop are discarded.
        score_mod: as in :func:`flexnsa.native_sparse_attention`, the same in every layer.
        mask_mod: as in :func:`flexnsa.native_sparse_attention`, the same in every layer.

    Returns:
        The new tokens of each sequence.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: an argument is out of range, or there can be no graph; the message names it.
        FloatingPointError: a logit is not finite.
    """
    check_model(model)
    request = check_request(model, prompts, max_new_tokens, lengths, stop_tokens, seed, on_token, group)
    sampling = Sampling() if sampling is None else sampling
    check_type("sampling", sampling, Sampling)
    check_type("cached", cached, bool)
    mods: dict[str, Any] = {"score_mod": score_mod, "mask_mod": mask_mod}
    if cached:
        session = DecodingSession(model, len(prompts), request.max_seq_len, sampling=sampling, steps=steps, **mods)
        return continue_prompts(session, request)
    check_choice("steps", steps, ("auto", "eager"))
    return continue_prompts(_Uncached(model, sampling, mods), request)


def generate(model: LanguageModel, prompt: bytes, num_bytes: int, *, temperature: float = 0.8, seed: int = 0) -> bytes:
    """Continue a prompt with a byte-level model (``vocab_size`` 256); return the new bytes.

    Raises:
        ValueError: the prompt is empty or the temperature negative.
    """
    check_model(model)
    check_type("prompt", prompt, bytes)
    check_positive_int("num_bytes", num_bytes)
    if not prompt:
        raise ValueError("prompt: expected at least one byte, got none")
    tokens = torch.tensor([list(prompt)], device=model.embedding.weight.device)
    sampling = Sampling(temperature=temperature)
    return bytes(generate_tokens(model, tokens, num_bytes, sampling=sampling, seed=seed)[0])


class _Uncached:
    """Draws as :class:`DecodingSession` does, from the whole sequence each time."""

    def __init__(self, model: LanguageModel, sampling: Sampling, mods: dict[str, Any]) -> None:
        self.model, self.sampling = model, sampling
        self.mods = {name: mod for name, mod in mods.items() if mod is not None}

    def prefill(self, prompts: Tensor, lengths: Tensor | None = None, *, seed: int = 0) -> Drawn:
        """Draw the first token of each sequence."""
        assert lengths is not None
        self.tokens, self.lengths = prompts.to(torch.int64, copy=True), lengths.long()
        self.rows = torch.arange(len(prompts), device=prompts.device)
        self.active = torch.ones_like(self.lengths, dtype=torch.bool)
        self.draws = Draws(len(prompts), self.sampling, prompts.device)
        self.draws.generator.manual_seed(seed)
        self._draw()
        return self.draws.read(1)

    def step(self, count: int = 1) -> Drawn:
        """Draw the next tokens of each active sequence."""
        for _ in range(count):
            if self.lengths.max() == self.tokens.shape[1]:
                self.tokens = torch.nn.functional.pad(self.tokens, (0, 1))
            self.tokens[self.rows[self.active], self.lengths[self.active]] = self.draws.newest[self.active, 0]
            self.lengths = self.lengths + self.active.long()
            self._draw()
        return self.draws.read(count)

    def set_active(self, active: Sequence[bool]) -> None:
        """Set which sequences continue."""
        self.active = torch.tensor(active, device=self.active.device)

    @torch.no_grad()
    def _draw(self) -> None:
        self.draws.draw(last_logits(self.model, self.tokens, self.lengths, **self.mods))
