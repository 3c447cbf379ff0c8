"""What a decoding step's kernels make of keys and values in pages, beside the same in a cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor

from flexnsa import NSAConfig
from flexnsa.attention.step import StepInputs
from flexnsa.attention.triton.kernels import step as kernels
from flexnsa.attention.triton.step import step_in_pages
from flexnsa.config import gated_branches


@contextmanager
def attending_in_pages(page_size: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Have each step attend to pages too, and record outputs and blocks of new tokens, of the cache and of pages."""
    pairs: list[tuple[Tensor, Tensor]] = []
    attend_to = kernels.attend

    def attend(inputs: StepInputs, scratch: kernels.StepScratch, out: Tensor, blocks: Tensor) -> None:
        before = inputs.lengths[:, None].clone()
        attend_to(inputs, scratch, out, blocks)  # adds the new tokens to the lengths
        if inputs.tables is not None:
            return
        position = before + torch.arange(out.shape[1], device=out.device)
        after = before + (out.shape[1] if inputs.new_lengths is None else inputs.new_lengths[:, None])
        token = torch.minimum(position, after - 1).clamp_min(0).int()
        tokens = torch.stack((token, token * 0, token * 0))
        found = step_in_pages(in_pages(inputs, scratch, before, after, page_size), tokens)
        for ours, paged in zip((out, blocks.transpose(1, 2)), (found[0], found[1].transpose(1, 2)), strict=True):
            pairs.append((ours[position < after].cpu(), paged[position < after].cpu()))

    with mock.patch.object(kernels, "attend", attend):
        yield pairs


def in_pages(
    inputs: StepInputs, scratch: kernels.StepScratch, before: Tensor, after: Tensor, page_size: int
) -> StepInputs:
    """Copy the cache of a step to pages in random order, and take the queries that it rotated."""
    buffers: dict[str, Tensor] = {}
    tables: dict[str, Tensor] = {}
    sizes: dict[str, NSAConfig | None] = {
        "cmp": inputs.config,
        "index": inputs.config.scoring,
        "slc": None,
        "win": None,
    }
    for kind, of_kind in sizes.items():
        parts = {name: buffer for name, buffer in inputs.buffers.items() if name[2:] == kind}
        if parts:
            tables[kind], held = copy_to_pages(torch.cat([*parts.values()], -1), after[:, 0], page_size, of_kind)
            buffers |= zip(parts, held.split([part.shape[-1] for part in parts.values()], -1), strict=True)
    q_index = None
    if inputs.index is not None:
        scorer = replace(inputs.scorer, lengths=before[:, 0])
        of_scorer = kernels.StepScratch.of(scorer)
        kernels.place(scorer, of_scorer)
        q_index = of_scorer.q.transpose(1, 2)
    q, gates, longest = scratch.q.transpose(1, 2), weigh(inputs), inputs.max_seq_len
    return StepInputs.in_pages(
        q, q_index, gates, buffers, tables, max_seq_len=longest, config=inputs.config, scale=inputs.scale
    )


def copy_to_pages(cache: Tensor, lengths: Tensor, page_size: int, sizes: NSAConfig | None) -> tuple[Tensor, Tensor]:
    """Return the pages of each sequence, and the pages; unread states are NaN.

    A buffer smaller than a sequence holds its last tokens, each in the slot ``token % size``.
    """
    stride, length = (1, 1) if sizes is None else (sizes.compress_stride, sizes.compress_block_size)
    batch, heads, size, width = cache.shape
    table = torch.randperm(batch * (int(lengths.max()) // page_size + 2)).view(batch, -1).int().to(cache.device)
    pages = cache.new_full((table.numel(), heads, page_size // stride, width), torch.nan)
    for b, tokens in enumerate(lengths.tolist()):
        count = max(0, (tokens - length) // stride + 1)
        for number in range(max(0, count - size + 1), count):
            last = number * stride + length - 1
            pages[table[b, last // page_size], :, last % page_size // stride] = cache[b, :, number % (size - 1)]
    return table, pages


def weigh(inputs: StepInputs) -> Tensor:
    """Return the weights of all branches ``(B, T, Hq, branches)``."""
    gated = gated_branches(inputs.gate, inputs.branches)
    logits = inputs.gates.unflatten(-1, (inputs.num_heads, len(gated)))
    weights = dict(
        zip(gated, (logits.softmax(-1) if inputs.gate == "softmax" else logits.sigmoid()).unbind(-1), strict=True)
    )
    return torch.stack([weights.get(tag, torch.ones_like(logits[..., 0])) for tag in inputs.branches], -1)
