"""What a rank has of a row, and what it reads of others: chunks and halos.

A row is cut into ``2 R`` chunks, and rank ``r`` of ``R`` has chunks ``r`` and ``2 R - 1 - r``: its queries are those of
its chunks. Here is what rank 0 of two has, and which keys and values its branches read. ``<<`` are the ``w - 1`` tokens
before a chunk and ``>>`` the ``l - d`` tokens behind it: its halos, which come from the chunks next to it::

    the row                   |  chunk 0  |  chunk 1  |  chunk 2  |  chunk 3  |
    rank 0                    |  chunk 0  |                       |  chunk 3  |
    its queries               |  chunk 0  |  chunk 3  |

    selected branch           |  chunk 0  |  chunk 1  |  chunk 2  |  chunk 3  |
    window                  <<|  chunk 0  |<<|  chunk 3  |
    what it compresses        |  chunk 0  |>>|  chunk 3  |>>
    compressed branch         what all ranks have compressed, in the order of the row

Before chunk 0 and behind the last one there is nothing: these halos are zeros, which no query sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flexnsa.config import NSAConfig
from flexnsa.distributed.chunks import check_chunks, halos
from flexnsa.distributed.collectives import gather
from flexnsa.geometry import num_compressed
from flexnsa.layers.core import RowLayout
from flexnsa.layers.rope import stored_rope_tables
from flexnsa.positions import Positions
from flexnsa.validation import check_type, describe


@dataclass(frozen=True, slots=True)
class SharingRanks:
    """The ranks that share a row: this one, how many there are, and the name of their group."""

    rank: int
    size: int
    group: str

    @classmethod
    def of(cls, mesh: DeviceMesh) -> SharingRanks:
        """Give those of a mesh of one dimension.

        Raises:
            TypeError: no mesh.
            ValueError: it has more than one dimension.
        """
        check_type("mesh", mesh, DeviceMesh)
        if mesh.ndim != 1:
            raise ValueError(f"mesh: expected one dimension, got {mesh.ndim}; take a part of it, mesh['cp']")
        return cls(mesh.get_local_rank(), mesh.size(), mesh.get_group().group_name)

    @property
    def chunks(self) -> tuple[int, int]:
        """The numbers of this rank's chunks."""
        return self.rank, 2 * self.size - 1 - self.rank

    def gather(self, pair: Sequence[Tensor]) -> list[Tensor]:
        """Give what every rank has of its two chunks, in the order of the chunks."""
        gathered = gather(torch.stack(list(pair)), self.size, self.group).unbind(0)
        return [*gathered[::2], *reversed(gathered[1::2])]


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Which keys the queries of a rank read; see :class:`flexnsa.layers.core.KeySource`."""

    ranks: SharingRanks
    config: NSAConfig

    def of_tokens(self, name: str, new: Tensor) -> Tensor:  # noqa: ARG002
        """Gather all."""
        return torch.cat(self.ranks.gather(new.chunk(2, 2)), 2)

    def of_window(self, name: str, new: Tensor) -> Tensor:  # noqa: ARG002
        """Lay the halo in front of each chunk, and the second chunk behind the first."""
        first, second = new.chunk(2, 2)
        halo, _ = halos(self.config)
        if halo == 0:
            return new
        tails = [torch.zeros_like(first[:, :, :halo]), *self.ranks.gather([x[:, :, -halo:] for x in (first, second)])]
        before = [tails[number] for number in self.ranks.chunks]
        return torch.cat([before[0], first, before[1], second], 2)

    def of_blocks(self, name: str, new: Tensor, compress: Callable[[Tensor], Tensor]) -> Tensor:  # noqa: ARG002
        """Compress the rank's own tokens, each chunk with the halo behind it, and gather what they give."""
        first, second = new.chunk(2, 2)
        _, halo = halos(self.config)
        raw = new
        if halo:
            ends = torch.zeros_like(first[:, :, :halo])
            heads = [*self.ranks.gather([x[:, :, :halo] for x in (first, second)]), ends]
            after = [heads[number + 1] for number in self.ranks.chunks]
            raw = torch.cat([first, after[0], second, after[1]], 2)
        blocks, count = compress(raw), first.shape[2] // self.config.compress_stride
        # Those between, which begin in the first halo, cross the seam and are nobody's.
        every = torch.cat(self.ranks.gather([blocks[:, :, :count], blocks[:, :, -count:]]), 2)
        return every[:, :, : num_compressed(new.shape[2] * self.ranks.size, self.config)]


def lay_out_chunks(
    seq_len: int,
    document_ids: Tensor | None,
    *,
    config: NSAConfig,
    head_dim: int,
    rope_base: float,
    dtype: torch.dtype,
    device: torch.device,
    ranks: SharingRanks,
    branches: Sequence[str],
) -> RowLayout:
    """Lay out the ``seq_len`` tokens that a rank has; as :func:`flexnsa.layers.core.row_layout`."""
    if document_ids is not None:
        got = describe(document_ids)
        raise ValueError(f"document_ids: expected None of a layer whose tokens are spread over ranks, got {got}")
    check_chunks("seq_len", seq_len, 2, config, branches)
    own = torch.arange(seq_len // 2, device=device)
    first, second = (number * len(own) + own for number in ranks.chunks)
    token = torch.cat([first, second])
    tokens, blocks = (
        stored_rope_tables(x, head_dim, rope_base, dtype=dtype) for x in (token, _blocks(first, second, config))
    )
    return RowLayout(
        tokens,
        blocks,
        positions=Positions.of_queries(token),
        window_positions=_among_window_keys(first, second, config),
        source=SharedKeys(ranks, config),
    )


def _blocks(first: Tensor, second: Tensor, config: NSAConfig) -> Tensor:
    """Give the first tokens of the blocks of ``| first |>>| second |>>``, those across the seam included."""
    _, behind = halos(config)
    stride = config.compress_stride
    halo = first[-1] + 1 + torch.arange(behind, device=first.device)
    return torch.cat([first[::stride], halo[::stride], second[::stride]])


def _among_window_keys(first: Tensor, second: Tensor, config: NSAConfig) -> Positions:
    """Say where the queries of both chunks stand among the keys ``<<| first |<<| second |``.

    A row starts where its token 0 would be if all tokens before the query's own lay there, one after the other.
    """
    before, _ = halos(config)
    own = torch.arange(len(first), device=first.device)
    place = torch.cat([before + own, before + len(own) + before + own]).to(torch.int32)[None]
    start = place - torch.cat([first, second]).to(torch.int32)
    return Positions(place, start, torch.zeros_like(start), consecutive=False)
