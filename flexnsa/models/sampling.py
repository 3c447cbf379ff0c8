"""Text out of a byte-level model, one byte at a time."""

from __future__ import annotations

import torch

from flexnsa.models.decoder import DecoderLM


@torch.no_grad()
def generate(model: DecoderLM, prompt: bytes, num_bytes: int, *, temperature: float = 0.8, seed: int = 0) -> bytes:
    """Continue a prompt, running the whole sequence again for every byte.

    Args:
        model: byte-level model (``vocab_size`` 256).
        prompt: at least one byte.
        num_bytes: bytes to add.
        temperature: 0 takes the likeliest byte.
        seed: of the draws.

    Returns:
        The added bytes, without the prompt.

    Raises:
        ValueError: the prompt is empty or the temperature negative.
    """
    if not prompt:
        raise ValueError("prompt: expected at least one byte, got none")
    if temperature < 0:
        raise ValueError(f"temperature: expected at least 0, got {temperature}")
    device = model.embedding.weight.device
    draws = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(num_bytes):
        logits = model(tokens)[0, -1].float().cpu()
        if temperature == 0:
            byte = logits.argmax(keepdim=True)
        else:
            byte = torch.multinomial((logits / temperature).softmax(-1), 1, generator=draws)
        tokens = torch.cat([tokens, byte[None].to(device)], dim=1)
    return bytes(tokens[0, len(prompt) :].tolist())
