"""What a decoding step's kernels make of keys and values in pages, and of the same in a cache, in an interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flexnsa.attention.step import IndexInputs, StepInputs
from flexnsa.attention.triton import step as operator
from flexnsa.attention.triton.kernels import step as kernels
from tests.support.triton_decoding import CASES, decode

PAGED = {
    "from nothing, ragged": 2,
    "eight at once": 4,
    "linear, softmax, three heads": 16,
    "mean, no overlap": 64,
    "compressed longer than selected": 6,
    "compressed alone": 8,
    "residual gates, two branches": 8,
    "an indexer, keys that overlap, ragged": 4,
    "an indexer, selected alone": 32,
    "bf16, 16 heads of 64": 16,
}
"""Tokens of a page, by case."""


def interpret(name: str) -> dict[str, list[Tensor]]:
    """Return what all steps of a case make of a cache, and of pages."""
    results: dict[str, list[Tensor]] = {"cache": [], "pages": [], "cache blocks": [], "page blocks": []}

    def attend(inputs: StepInputs, scratch: kernels.StepScratch, out: Tensor, blocks: Tensor) -> None:
        before = inputs.lengths.clone()
        attend_to_cache(inputs, scratch, out, blocks)
        paged = in_pages(replace(inputs, lengths=before), scratch, PAGED[name])
        again, chosen = paged.empty_results()
        attend_to_cache(paged, kernels.StepScratch.of(paged, kernels.locate(paged)), again, chosen)
        new = torch.full((len(out),), out.shape[1]) if inputs.new_lengths is None else inputs.new_lengths
        is_new = torch.arange(out.shape[1]) < new[:, None]
        for part, x in zip(results, (out[is_new], again[is_new], blocks, chosen), strict=True):
            results[part].append(x.clone() if x.dim() < 3 else x.transpose(1, 2)[is_new])

    attend_to_cache = kernels.attend
    with mock.patch.object(kernels, "attend", attend):
        case = CASES[name]
        decode(case, case.layer(), case.tokens())
    return results


def in_pages(inputs: StepInputs, scratch: kernels.StepScratch, page_size: int) -> StepInputs:
    """Copy the cache of a step, whose tokens are stored, to pages in random order, and take its rotated queries."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, buffer in inputs.buffers.items():
        parts.setdefault(name[2:], {})[name[0]] = buffer
    after = inputs.lengths + (inputs.q.shape[1] if inputs.new_lengths is None else inputs.new_lengths)
    buffers: dict[str, Tensor] = {}
    tables: dict[str, Tensor] = {}
    for kind in ("cmp", "index", "slc", "win"):
        if kind not in parts:
            continue
        of_kind = {"cmp": inputs.config, "index": inputs.config.scoring}.get(kind)
        stride, skipped = 1, 0
        if of_kind is not None:
            stride, skipped = of_kind.compress_stride, of_kind.compress_block_size // of_kind.compress_stride - 1
        joint = torch.cat([*parts[kind].values()], -1)
        states, size = page_size // stride, joint.shape[2] - 1
        pages = -(-inputs.max_seq_len // page_size)
        tables[kind] = (torch.randperm(len(joint) * pages + 3)[: len(joint) * pages] + 0).view(len(joint), -1).int()
        held = joint.new_full((len(joint) * pages + 3, joint.shape[1], states, joint.shape[3]), torch.nan)
        for b, length in enumerate(after.tolist()):
            count = length if of_kind is None else max(0, (length - of_kind.compress_block_size) // stride + 1)
            for number in range(max(0, count - size) if kind == "win" else 0, count):
                page, place = divmod(number + skipped, states)
                held[tables[kind][b, page], :, place] = joint[b, :, number % size if kind == "win" else number]
        for name, part in zip(parts[kind], held.split([x.shape[-1] for x in parts[kind].values()], -1), strict=True):
            buffers[f"{name}_{kind}"] = part
    index = inputs.index
    if index is not None:
        of_scorer = kernels.StepScratch.of(inputs.scorer)
        kernels.place(inputs.scorer, of_scorer)
        index = IndexInputs(of_scorer.q.transpose(1, 2).flatten(2), index.k, index.phi)
    q = scratch.q.transpose(1, 2).flatten(2)
    nothing: Any = {}
    return replace(inputs, q=q, k=nothing, v=nothing, index=index, buffers=buffers, tables=tables)
