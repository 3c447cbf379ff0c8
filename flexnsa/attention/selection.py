"""Top-n blocks of each query, the same on every device; scores exist for one chunk of queries at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flexnsa.attention.interface import Call, given
from flexnsa.attention.product_scores import scores_to_rank
from flexnsa.attention.scoring import block_scores, group_probabilities
from flexnsa.attention.shares import queries_at_once
from flexnsa.attention.threads import grouped, heads_at_once, repeated, run_heads_in_threads
from flexnsa.config import NSAConfig, blocks_within, num_compressed, overlap_band
from flexnsa.masks.positions import Positions, positions_of, tensors_of
from flexnsa.masks.user_mods import SoftCap, cap_of
from flexnsa.operators.opaque import opaque_operator

Probabilities = Callable[[Tensor, Tensor, Tensor | None, Positions, Call], Tensor]
"""``(q, k_cmp, lse, positions, call)``: ``p_cmp`` summed over each group, ``(B, Hkv, T, N)``."""

CHUNK = 256
"""Queries scored at a time: peak memory is ``B * Hq * CHUNK * N`` scores."""
NO_BLOCK = -(2**63)
"""Orders below the scores of all blocks."""


def top_blocks(scores: Tensor, positions: Positions, *, config: NSAConfig) -> Tensor:
    """Choose ``n`` blocks: the forced ones, then the highest scores, a tie to the lower index (section 3.3.2).

    Args:
        scores: fp32 ``(B, Hkv, T, M)``, of any sign.
        positions: of the ``T`` queries; candidates are the blocks up to and including the query's own, or
            that of the next token (``config.ahead``), which is left out again if it has no token yet.
        config: gives ``n`` and the forced blocks.

    Returns:
        int32 ``(B, Hkv, T, n)``, ascending, padded with -1 on the right.
    """
    scores = F.pad(scores, (0, config.ahead)) if config.ahead else scores
    num_blocks = scores.shape[-1]
    block = torch.arange(num_blocks, device=scores.device)
    own, current = own_and_last(positions, config)
    forced = (block < config.num_init_blocks) | (block > current - config.num_local_blocks)

    # Non-negative floats order like their bits, and negative ones too once all bits but the sign are flipped. So (bits,
    # reversed index) is one integer without ties. Adding 0 makes 0 of -0.
    bits = (scores + 0.0).masked_fill(forced, torch.inf).view(torch.int32)
    bits = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    keys = ((bits << 32) | (num_blocks - 1 - block)).masked_fill(block > current, NO_BLOCK)

    best = keys.topk(min(config.num_selected_blocks, num_blocks), dim=-1, sorted=False).values
    block = (num_blocks - 1 - (best & 0xFFFFFFFF)).masked_fill(best == NO_BLOCK, num_blocks)
    chosen = block.to(torch.int32).sort(-1).values
    chosen = chosen.masked_fill(chosen > own, -1)
    return F.pad(chosen, (0, config.num_selected_blocks - chosen.shape[-1]), value=-1)


def own_and_last(positions: Positions, config: NSAConfig) -> tuple[Tensor, Tensor]:
    """Return the block of each query and its last candidate, int ``(B or 1, 1, T, 1)``."""
    token = (positions.token - positions.start)[:, None, :, None]
    return token // config.select_block_size, (token + config.ahead) // config.select_block_size


class Ranking:
    """Chooses blocks as :func:`top_blocks` does, in any order, and again and again at the same positions.

    The compressed keys are counted by the strides in which they end: the first may belong to none.

    Args:
        position: of the queries in their sequences, int ``(B, T)``.
        num_blocks: of the longest sequence, ``M``.
        config: as of :func:`top_blocks`.
    """

    def __init__(self, position: Tensor, num_blocks: int, *, config: NSAConfig) -> None:
        self.count = min(config.num_selected_blocks, num_blocks)
        block = torch.arange(num_blocks, device=position.device)
        current = (position // config.select_block_size)[:, None, :, None]
        forced = (block < config.num_init_blocks) | (block > current - config.num_local_blocks)
        added = torch.zeros(forced.shape, device=block.device).masked_fill_(forced, torch.inf)
        self._added, self._order = added.masked_fill_(block > current, -torch.inf), block.flip(0)
        band, step = overlap_band(config)[1], config.strides_per_block
        band = F.pad(torch.tensor(band, dtype=torch.float32, device=block.device), (0, -len(band) % step))
        self._weights = band.view(-1, step).T.contiguous()  # for the block in which a key ends, and for those before

    def choose(self, probs: Tensor) -> Tensor:
        """Return blocks ``(B, Hkv, T, n)`` by the probabilities ``(B, Hkv, T, M * l' / d)`` of compressed keys.

        Where a query has fewer candidates, later blocks fill their places.
        """
        parts = probs.float().view(-1, len(self._weights)) @ self._weights
        parts = parts.view(*probs.shape[:3], -1, self._weights.shape[1])
        scores = parts[..., 0]
        for before in range(1, parts.shape[-1]):
            scores[..., :-before] += parts[..., before:, before]
        bits = (scores + self._added).view(torch.int32).to(torch.int64)  # as in top_blocks
        return self._order.add(bits, alpha=1 << 32).topk(self.count, sorted=False).indices


def all_blocks(positions: Positions, config: NSAConfig) -> Tensor | None:
    """List every block up to and including the query's own, int32 ``(B or 1, T, n)``, where these are at most ``n``.

    Top-n chooses the same, whatever the scores. None if any query has more candidates, and for no query.
    """
    own, last = (block[:, 0] for block in own_and_last(positions, config))
    if last.numel() == 0 or last.max() >= config.num_selected_blocks:
        return None
    block = torch.arange(config.num_selected_blocks, dtype=own.dtype, device=own.device)
    return block.where(block <= own, -1)


class SelectionInputs(NamedTuple):
    """Queries ``(B, Hq, T, D)``, compressed keys ``(B, Hkv, N, D)``, and the call that they belong to.

    ``lse (B, Hq, T)`` is that of the compressed branch, natural log, or None. The positions are int ``(B or 1, T)``, or
    None for one whole sequence from token 0.
    """

    q: Tensor
    k_cmp: Tensor
    lse: Tensor | None
    token: Tensor | None
    start: Tensor | None
    cmp_start: Tensor | None
    sizes: Sequence[int]
    scale: float
    cap: float | None
    aligned: bool
    longest: int | None

    @classmethod
    def of(cls, q: Tensor, k_cmp: Tensor, lse: Tensor | None, call: Call) -> SelectionInputs:
        """Write a call without a mod, or with a soft cap, as an operator takes it; nothing here has a gradient."""
        positions, tensors = call.positions, (q.detach(), k_cmp.detach(), None if lse is None else lse.detach())
        about = (True, None) if positions is None else (positions.aligned, positions.longest)
        numbers = call.config.to_ints(), call.scale, cap_of(call.score_mod)
        return cls(*tensors, *tensors_of(positions), *numbers, *about)

    @property
    def call(self) -> Call:
        """Undo :meth:`of`."""
        token, start, cmp_start, positions = self.token, self.start, self.cmp_start, None
        if token is not None and start is not None and cmp_start is not None:
            positions = Positions(token, start, cmp_start, aligned=self.aligned, longest=self.longest)
        return Call(NSAConfig.from_ints(self.sizes), self.scale, SoftCap(self.cap) if self.cap else None, positions)

    def empty_blocks(self) -> Tensor:
        """Allocate the selected blocks."""
        config = NSAConfig.from_ints(self.sizes)
        shape = self.q.shape[0], count_choices(self.q, self.k_cmp, config), self.q.shape[2], config.num_selected_blocks
        return self.q.new_empty(shape, dtype=torch.int32)


def count_choices(q: Tensor, k: Tensor, config: NSAConfig) -> int:
    """Return the number of key heads, each of which has a choice of blocks, given queries and keys of the scorer."""
    return k.shape[1] if config.index_score is None else q.shape[1] // given(config.index_heads)


def select_in_chunks(q: Tensor, k_cmp: Tensor, lse: Tensor | None, call: Call) -> Tensor:
    """Score and choose the blocks of every query, int32 ``(B, Hkv, T, n)``, without a gradient.

    One opaque operator to the compiler: its loop neither unrolls nor breaks the graph, and a checkpointing policy can
    save its result instead of selecting again.
    """
    return _select_in_chunks(SelectionInputs.of(q, k_cmp, lse, call))


def select_with_mod(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor | None,
    call: Call,
    *,
    probabilities: Probabilities = group_probabilities,
    chunk: int = CHUNK,
) -> Tensor:
    """As :func:`select_in_chunks`, but not as an operator, which takes no functions: a compiler unrolls the loop.

    Args:
        q: ``(B, Hq, T, Dk)``.
        k_cmp: ``(B, Hkv, N, Dk)``.
        lse: of the compressed branch with the same mod, or None.
        call: with the mod.
        probabilities: :func:`flexnsa.attention.scoring.group_probabilities`, perhaps compiled.
        chunk: queries scored at a time.
    """
    positions = positions_of(q, call.positions)
    q, k_cmp, lse = q.detach(), k_cmp.detach(), None if lse is None else lse.detach()
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        return _selection_with_mod(_select(q, k_cmp, lse, positions, call, probabilities, chunk))


@opaque_operator("select_in_chunks")
def _select_in_chunks(inputs: SelectionInputs) -> Tensor:
    q, k_cmp, lse, *_ = inputs
    call = inputs.call
    positions = positions_of(q, call.positions)
    every = None if q.is_cuda else all_blocks(positions, call.config)  # which would wait for a GPU
    chosen = inputs.empty_blocks()
    if every is not None:
        return every[:, None].repeat(q.shape[0] // len(every), chosen.shape[1], 1, 1)
    if call.config.index_score is not None:
        _choose_by_products(q, k_cmp, positions, call, chosen)
        return chosen

    def select(q: Tensor, k_cmp: Tensor, chosen: Tensor, *rest: Tensor) -> None:
        here, lse = Positions(*(x[:, 0] for x in rest[:3])), [x.flatten(1, 2) for x in rest[3:]]
        chosen.copy_(_select(q.flatten(1, 2), k_cmp, lse[0] if lse else None, here, call, group_probabilities, CHUNK))

    by_group = grouped(k_cmp, *(x for x in (q, lse) if x is not None))
    views = (next(by_group), k_cmp, chosen, *repeated(k_cmp, *positions.tensors), *by_group)
    run_heads_in_threads(select, views, heads_at_once(q, k_cmp, CHUNK))
    return chosen


_select_in_chunks.register_fake(SelectionInputs.empty_blocks)


@opaque_operator("selection_with_mod")
def _selection_with_mod(block_indices: Tensor) -> Tensor:
    """Copy a selection by an operator, whose name tells a checkpointing policy what to save."""
    return block_indices.clone()


@_selection_with_mod.register_fake
def _(block_indices: Tensor) -> Tensor:
    return torch.empty_like(block_indices)


def _select(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor | None,
    positions: Positions,
    call: Call,
    probabilities: Probabilities,
    chunk: int,
) -> Tensor:
    config = call.config
    chosen: list[Tensor] = []
    for at in range(0, q.shape[2], chunk):
        queries = slice(at, at + chunk)
        here = positions.at(queries)
        k_past = k_cmp[:, :, : _keys_until(here, k_cmp.shape[2], config)]
        probs = probabilities(q[:, :, queries], k_past, None if lse is None else lse[:, :, queries], here, call)
        width = blocks_within(k_past.shape[2], config)
        chosen.append(top_blocks(block_scores(probs, here, num_blocks=width, config=config), here, config=config))
    return torch.cat(chosen, dim=2)


def _choose_by_products(q: Tensor, k: Tensor, positions: Positions, call: Call, chosen: Tensor) -> None:
    """Score blocks for a chunk of queries at a time, and write what they choose."""
    chunk = queries_at_once(q, k)
    for at in range(0, q.shape[2], chunk):
        part, here = slice(at, at + chunk), positions.at(slice(at, at + chunk))
        past = k[:, :, : _keys_until(here, k.shape[2], call.config)]
        scores = scores_to_rank(q[:, :, part], past, here, blocks_within(past.shape[2], call.config), call)
        chosen[:, :, part] = top_blocks(scores, here, config=call.config)


def _keys_until(positions: Positions, num_keys: int, config: NSAConfig) -> int:
    """Bound the compressed keys that any query sees, by the largest position where reading it needs no wait."""
    if torch.compiler.is_compiling() or positions.token.is_cuda:
        return num_keys
    return num_compressed(int(positions.token.max()) + 1, config)
