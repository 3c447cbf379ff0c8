"""The tokens of a sequence that one rank has, and those that it reads from other ranks: chunks and halos.

A sequence is split into ``2 R`` chunks, and rank ``r`` of ``R`` has chunks ``r`` and ``2 R - 1 - r``: its queries are
those of its chunks. The picture shows rank 0 of two, and the keys and values that its branches read. ``<<`` are the
``w - 1`` tokens before a chunk and ``>>`` the ``l - d`` tokens after it: its halos, from the neighbouring chunks::

    the sequence              |  chunk 0  |  chunk 1  |  chunk 2  |  chunk 3  |
    rank 0                    |  chunk 0  |                       |  chunk 3  |
    its queries               |  chunk 0  |  chunk 3  |

    selected branch           |  chunk 0  |  chunk 1  |  chunk 2  |  chunk 3  |
    window                  <<|  chunk 0  |<<|  chunk 3  |
    what it compresses        |  chunk 0  |>>|  chunk 3  |>>
    compressed branch         the compressed tokens of all ranks, in the order of the sequence

There is nothing before chunk 0 and after the last chunk. These halos are zeros, which no query sees. Index keys are
compressed and gathered in the same way, with halos of their own sizes. Blocks of packed documents may start anywhere:
then each rank gathers what is compressed, and compresses the whole row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flexnsa.attention.interface import given
from flexnsa.checks.calls import check_document_ids
from flexnsa.config import NSAConfig, kind_of, num_compressed
from flexnsa.layers.layouts import BlockLayout, LayoutSizes, Rotate, RowLayout, lay_out_rows
from flexnsa.layers.rope import RopeTables
from flexnsa.masks.positions import Positions
from flexnsa.parallel.chunks import block_halo, check_chunks, window_halo
from flexnsa.parallel.collectives import gather
from flexnsa.primitives import check_type


@dataclass(frozen=True, slots=True)
class SharingRanks:
    """The ranks that share a sequence: this rank, their number, and the name of their group."""

    rank: int
    size: int
    group: str

    @classmethod
    def of(cls, mesh: DeviceMesh) -> SharingRanks:
        """Return the ranks of a mesh of one dimension.

        Raises:
            TypeError: not a mesh.
            ValueError: the mesh has more than one dimension.
        """
        check_type("mesh", mesh, DeviceMesh)
        if mesh.ndim != 1:
            raise ValueError(f"mesh: expected one dimension, got {mesh.ndim}; take a part of it, mesh['cp']")
        return cls(mesh.get_local_rank(), mesh.size(), mesh.get_group().group_name)

    @property
    def chunks(self) -> tuple[int, int]:
        """The indices of this rank's chunks."""
        return self.rank, 2 * self.size - 1 - self.rank

    def whole(self, x: Tensor) -> Tensor:
        """Gather ``x (B, T, ...)``, of the tokens of each rank, in the order of the sequence."""
        return torch.cat(self.gather(x.chunk(2, 1)), 1)

    def gather(self, pair: Sequence[Tensor]) -> list[Tensor]:
        """Gather one tensor per chunk from all ranks, in the order of the chunks."""
        gathered = gather(torch.stack(list(pair)), self.size, self.group).unbind(0)
        return [*gathered[::2], *reversed(gathered[1::2])]


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """The keys that the queries of a rank read; see :class:`flexnsa.layers.layouts.KeySource`."""

    ranks: SharingRanks
    config: NSAConfig

    def of_tokens(self, name: str, new: Tensor) -> Tensor:  # noqa: ARG002
        """Gather the keys of all ranks."""
        return torch.cat(self.ranks.gather(new.chunk(2, 2)), 2)

    def of_window(self, name: str, new: Tensor) -> Tensor:  # noqa: ARG002
        """Concatenate both chunks, each with its halo before it."""
        first, second = new.chunk(2, 2)
        halo = window_halo(self.config)
        if halo == 0:
            return new
        tails = [torch.zeros_like(first[:, :, :halo]), *self.ranks.gather([x[:, :, -halo:] for x in (first, second)])]
        before = [tails[number] for number in self.ranks.chunks]
        return torch.cat([before[0], first, before[1], second], 2)

    def of_blocks(self, name: str, new: Tensor, compress: Callable[[Tensor], Tensor]) -> Tensor:
        """Compress the rank's own chunks, each with its halo after it, and gather the results of all ranks."""
        sizes = self.config.compressed[kind_of(name)]
        halo, raw = block_halo(sizes), new
        first, second = new.chunk(2, 2)
        if halo:
            ends = torch.zeros_like(first[:, :, :halo])
            heads = [*self.ranks.gather([x[:, :, :halo] for x in (first, second)]), ends]
            after = [heads[number + 1] for number in self.ranks.chunks]
            raw = torch.cat([first, after[0], second, after[1]], 2)
        blocks, count = compress(raw), first.shape[2] // sizes.compress_stride
        # Blocks in between start in the first halo and reach into the second chunk; no rank needs them.
        every = torch.cat(self.ranks.gather([blocks[:, :, :count], blocks[:, :, -count:]]), 2)
        return every[:, :, : num_compressed(new.shape[2] * self.ranks.size, sizes)]


class SharedPackKeys(SharedKeys):
    """The keys that queries of packed documents read."""

    def of_blocks(self, name: str, new: Tensor, compress: Callable[[Tensor], Tensor]) -> Tensor:
        """Gather the tokens of all ranks, and compress the whole row."""
        return compress(self.of_tokens(name, new))


def lay_out_chunks(
    seq_len: int, document_ids: Tensor | None, sizes: LayoutSizes, *, ranks: SharingRanks, branches: Sequence[str]
) -> RowLayout:
    """Return the layout of the ``seq_len`` tokens of a rank, as :func:`flexnsa.layers.layouts.row_layout`."""
    ids = None if document_ids is None else ranks.whole(document_ids)
    if ids is not None:  # those that ranks count for themselves decrease from chunk to chunk
        check_document_ids(ids, "B", seq_len * ranks.size)
    return lay_out_shared_rows(seq_len, ids, given(sizes.config), sizes.rotate, sizes.device, ranks, branches, sizes)


def lay_out_shared_rows(
    seq_len: int,
    document_ids: Tensor | None,
    config: NSAConfig,
    rotate: Rotate,
    device: torch.device,
    ranks: SharingRanks,
    branches: Sequence[str],
    sizes: LayoutSizes | None = None,
) -> RowLayout:
    """Lay out the tokens of a rank as :func:`lay_out_chunks` does, of a layer that rotates in its own way.

    ``document_ids (B, S)`` are those of whole rows.
    """
    check_chunks("seq_len", seq_len, 2, config, branches)
    offset = torch.arange(seq_len // 2, device=device)
    first, second = (number * len(offset) + offset for number in ranks.chunks)
    token = torch.cat([first, second])
    if document_ids is not None:
        whole = lay_out_rows(seq_len * ranks.size, document_ids, config, rotate, device, sizes)
        return _of_chunks(whole, token, _among_window_keys(first, second, config), SharedPackKeys(ranks, config))
    positions = Positions.of_queries(token)
    starts = {kind: _block_starts(first, second, of_kind) for kind, of_kind in config.compressed.items()}
    tokens, *tables = rotate(token, *starts.values())
    return RowLayout(
        tokens,
        blocks={kind: BlockLayout(table, None, positions) for kind, table in zip(starts, tables, strict=True)},
        positions=positions,
        window_positions=_among_window_keys(first, second, config),
        source=SharedKeys(ranks, config),
        sizes=sizes,
        num_ranks=ranks.size,
    )


def _of_chunks(whole: RowLayout, token: Tensor, window: Positions, source: SharedPackKeys) -> RowLayout:
    """Return the layout of the tokens ``(T,)`` of a rank, given that of whole rows."""
    blocks = {kind: x._replace(positions=given(x.positions).at_tokens(token)) for kind, x in whole.blocks.items()}
    positions = given(blocks["cmp"].positions)
    return replace(
        whole,
        tokens=RopeTables(*(table.index_select(-2, token) for table in whole.tokens)),
        blocks=blocks,
        positions=positions,
        window_positions=replace(window, start=window.start + positions.start),
        source=source,
        num_ranks=source.ranks.size,
    )


def _block_starts(first: Tensor, second: Tensor, config: NSAConfig) -> Tensor:
    """Return the first tokens of the blocks of ``| first |>>| second |>>``, those in between included."""
    stride = config.compress_stride
    halo = first[-1] + 1 + torch.arange(block_halo(config), device=first.device)
    return torch.cat([first[::stride], halo[::stride], second[::stride]])


def _among_window_keys(first: Tensor, second: Tensor, config: NSAConfig) -> Positions:
    """Return the positions of both chunks' queries among the keys ``<<| first |<<| second |``.

    A query's start is its index among these keys minus its position in the sequence: negative if tokens are missing.
    """
    before = window_halo(config)
    offset = torch.arange(len(first), device=first.device)
    key = torch.cat([before + offset, before + len(offset) + before + offset]).to(torch.int32)[None]
    start = key - torch.cat([first, second]).to(torch.int32)
    return Positions(key, start, torch.zeros_like(start), consecutive=False)
