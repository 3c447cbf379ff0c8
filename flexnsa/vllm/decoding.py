"""Attention of all requests that decode, at once, through their block tables; nothing waits for the device.

On a GPU the kernels of a decoding step read pages in place; elsewhere PyTorch does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from flexnsa.attention.interface import given
from flexnsa.attention.sdpa.paged import PagedStep
from flexnsa.attention.step import StepInputs
from flexnsa.attention.triton.arguments import runs_kernels
from flexnsa.attention.triton.step import step_in_pages
from flexnsa.config import NSAConfig
from flexnsa.vllm.batch import Batch
from flexnsa.vllm.buffers import PagedBuffer


class PagedLayer(NamedTuple):
    """A layer as its buffers and queries see it.

    Args:
        sizes: of the branches.
        branches: of the layer, in the order of :data:`flexnsa.config.BRANCHES`.
        kinds: sizes of the compressed tokens that it keeps: ``cmp``, ``index``.
        buffers: for each of these, ``slc``, ``win``, and ``tail`` for raw keys and values.
        num_kv_heads: on this rank.
        scale: factor on the scores.
        shape: equal for layers whose buffers have equal sizes.
    """

    sizes: NSAConfig
    branches: tuple[str, ...]
    kinds: Mapping[str, NSAConfig]
    buffers: Mapping[str, PagedBuffer]
    num_kv_heads: int
    scale: float
    shape: str


def attend_decodes(
    layer: PagedLayer, batch: Batch, q: Tensor, q_index: Tensor | None, gates: Tensor, blocks: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Attend from the tokens of requests that decode, and return theirs alone, ``(T, Hq, Dv)``, and their blocks.

    Arguments are those of :meth:`flexnsa.vllm.attention.PagedAttention.forward`, but for these:
        blocks: ``(R, Hkv, T, n)`` of ``R`` requests with up to ``T`` new tokens each, if those are chosen.
    """
    row, position = batch.decodes
    buffers = {kind: buffer for kind, buffer in layer.buffers.items() if kind != "tail"}
    if runs_kernels(q):
        keys: dict[str, Tensor] = {}
        for kind, buffer in buffers.items():
            keys |= zip((f"k_{kind}", f"v_{kind}"), buffer.kv_cache.split(buffer.widths, -1), strict=False)
        tables = {kind: given(buffer.batch).block_table[: len(row)] for kind, buffer in buffers.items()}
        longest = 1 << (batch.longest_decode - 1).bit_length()  # few sizes, for few variants of kernels
        index = None if q_index is None else q_index[row]
        sizes = {"max_seq_len": longest, "config": layer.sizes, "scale": layer.scale, "block_indices": blocks}
        inputs = StepInputs.in_pages(q[row], index, gates[row], keys, tables, **sizes)
        out, chosen = step_in_pages(inputs, batch.decoded_tokens)
        out, blocks = out.unflatten(-1, (q.shape[1], -1)), chosen if inputs.chooses else blocks
        return out.flatten(0, 1)[batch.decoded_rows], blocks
    even = batch.num_decode_tokens == row.numel()

    def rows(x: Tensor) -> Tensor:
        return x[: row.numel()].view(*row.shape, *x.shape[1:]) if even else x[row]

    every = {kind: given(buffer.batch) for kind, buffer in buffers.items()}
    pages = {kind: buffer.pages(every[kind]) for kind, buffer in buffers.items()}
    key = layer.shape, *map(id, every.values())
    step = batch.share(key, lambda: PagedStep(layer.sizes, pages, position, batch.longest_decode))
    index = None if q_index is None else rows(q_index)
    out, blocks = step.attend(pages, rows(q), index, rows(gates), blocks, layer.scale)
    return out.flatten(0, 1)[... if even else batch.decoded_rows], blocks
