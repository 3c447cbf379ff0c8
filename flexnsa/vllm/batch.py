"""The requests of a batch: where their new tokens and pages are, and what follows from it, once for all layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadata

from flexnsa.config import NSAConfig
from flexnsa.masks.positions import Positions

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])


class Located(NamedTuple):
    """Which request each of ``K`` entries belongs to, int ``(K,)``, and its number within that, counted from 0."""

    request: Tensor
    number: Tensor


class Packed(NamedTuple):
    """Entries of several requests, one request after the other, and where entry 0 of each is, or would be."""

    entries: Located
    starts: Tensor


def once(method: Method) -> Method:
    """Have a method of :class:`Batch` compute what it returns once for all layers of a pass."""

    @wraps(method)
    def kept(self: Any, *args: Any) -> Any:
        return self.share((method.__name__, *args), lambda: method(self, *args))

    return cast("Method", kept)


@dataclass
class Batch(AttentionMetadata):
    """The metadata of a group of buffers.

    Args:
        block_table: int32 ``(R, P)``, the pages of each request.
        slots: int64 ``(T,)``, where the new tokens are stored: ``page * page_size + place``; -1 for padding.
        starts: int32 ``(R + 1,)``, the first new token of each request in the batch, and the end of the last.
        lengths: int32 ``(R,)``, tokens of each request, the new ones included.
        host_starts: ``starts`` on the host.
        host_lengths: ``lengths`` on the host, or more for a request that decodes.
        num_decodes: requests that decode, the first ones. They have at most a few new tokens each.
    """

    block_table: Tensor
    slots: Tensor
    starts: Tensor
    lengths: Tensor
    host_starts: Tensor
    host_lengths: Tensor
    num_decodes: int
    _made: dict[object, Any] = field(default_factory=dict)

    def share(self, key: object, make: Callable[[], T]) -> T:
        """Return what ``make`` makes, once for all layers that have an equal key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @cached_property
    def num_decode_tokens(self) -> int:
        """New tokens of the requests that decode."""
        return int(self.host_starts[self.num_decodes])

    @cached_property
    def num_tokens(self) -> int:
        """New tokens, without padding."""
        return int(self.host_starts[-1])

    @cached_property
    def tokens(self) -> Located:
        """Locate the new tokens, padding included: the request and the position of each."""
        token = torch.arange(len(self.slots), dtype=self.starts.dtype, device=self.starts.device)
        request = torch.searchsorted(self.starts[1:], token, right=True).clamp_max(len(self.lengths) - 1)
        return Located(request, token - self.starts[request + 1] + self.lengths[request])

    @once
    def places(self, page_size: int) -> tuple[Tensor, Tensor]:
        """Return the pages in which new tokens are stored, and their places there; 0 for padding."""
        slots = self.slots.clamp_min(0)
        return slots // page_size, slots % page_size

    @once
    def completed(self, sizes: NSAConfig) -> Located:
        """Locate the blocks of ``compress_block_size`` tokens that the new tokens complete, by their last tokens.

        There may be spare entries, whose last token is -1.
        """
        request, position = self.tokens
        beyond = position - (sizes.compress_block_size - 1)
        ends = (beyond >= 0) & (beyond % sizes.compress_stride == 0) & (self.slots >= 0)
        if ends.device.type == "cpu":
            token = ends.nonzero()[:, 0]
            return Located(request[token], position[token])
        most = len(ends) // sizes.compress_stride + len(self.lengths)
        token = torch.nonzero_static(ends, size=most, fill_value=-1)[:, 0]
        return Located(request[token], position[token].where(token >= 0, -1))

    @cached_property
    def longest_decode(self) -> int:
        """Upper bound of the tokens of a request that decodes."""
        return int(self.host_lengths[: self.num_decodes].max())

    @cached_property
    def decodes(self) -> tuple[Tensor, Tensor]:
        """Where the new tokens of requests that decode are in the batch, and their positions, each int64 ``(R, T)``.

        A request with fewer than ``T`` new tokens has others in the place of what it lacks.
        """
        count = int(self.host_starts[: self.num_decodes + 1].diff().max())
        first, end = self.starts[: self.num_decodes, None], self.starts[1 : self.num_decodes + 1, None]
        row = first + torch.arange(count, dtype=torch.int64, device=self.starts.device)
        position = (row - end + self.lengths[: self.num_decodes, None]).clamp_min(0)
        return row.clamp_max(len(self.slots) - 1), position

    @cached_property
    def decoded_tokens(self) -> Tensor:
        """Positions of :attr:`decodes`, at most each request's last, and zeros for the kernels, int32 ``(3, R, T)``."""
        last = self.lengths[: self.num_decodes, None] - 1
        position = torch.minimum(self.decodes[1], last).clamp_min(0).to(torch.int32)
        return torch.stack((position, *[torch.zeros_like(position)] * 2))

    @cached_property
    def decoded_rows(self) -> Tensor:
        """Which entry of :attr:`decodes` each new token of requests that decode is, int64 ``(T,)``."""
        token = torch.arange(self.num_decode_tokens, device=self.starts.device)
        request = self.tokens.request[: len(token)]
        return request * self.decodes[0].shape[1] + token - self.starts[request]

    def _pack(self, count: Callable[[Tensor, Tensor], Tensor], *, last: bool = False) -> Packed:
        """Pack ``count(lengths, new tokens)`` entries of each request that does not decode, its first or last ones."""
        of = slice(self.num_decodes, None)
        total = int(count(self.host_lengths[of], self.host_starts[of].diff()).sum())
        counts = count(self.lengths[of], self.starts[of].diff())
        ends = counts.cumsum(0)
        starts = ends - (self.lengths[of] if last else counts)
        entry = torch.arange(total, device=ends.device)
        request = torch.searchsorted(ends, entry, right=True).clamp_max(len(ends) - 1)
        return Packed(Located(request + self.num_decodes, entry - starts[request]), starts)

    @once
    def pack_tokens(self, window: int | None) -> Packed:
        """Pack the tokens of the requests that do not decode, or those that their new tokens see in a window."""
        if window is None:
            return self._pack(lambda lengths, _: lengths)
        return self._pack(lambda lengths, new: torch.minimum(lengths, new + window - 1), last=True)

    @once
    def pack_compressed(self, sizes: NSAConfig) -> Packed:
        """Pack their compressed tokens."""

        def count(lengths: Tensor, _: Tensor) -> Tensor:
            beyond = lengths - sizes.compress_block_size
            return (beyond // sizes.compress_stride + 1).clamp_min(0)

        return self._pack(count)

    @once
    def positions(self, sizes: NSAConfig, window: int | None = None) -> Positions:
        """Locate the new tokens of requests that do not decode among tokens, and, if these are all, compressed ones."""
        request, token = (x[self.num_decode_tokens : self.num_tokens] for x in self.tokens)
        packed = [self.pack_tokens(window), *([self.pack_compressed(sizes)] if window is None else [])]
        start, *cmp_start = (each.starts[request - self.num_decodes] for each in packed)
        rows = (x.to(torch.int32)[None] for x in (start + token, start, *(cmp_start or [torch.zeros_like(start)])))
        longest = int(self.host_lengths[self.num_decodes :].max()) if window is None else None
        return Positions(*rows, consecutive=False, longest=longest)
