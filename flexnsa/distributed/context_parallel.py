"""Rows whose tokens are spread over ranks: queries stay where they are, and keys travel to them.

A row is cut into ``2 R`` chunks, and rank ``r`` of ``R`` has chunks ``r`` and ``2 R - 1 - r``. Late queries see more
compressed keys than early ones; in this order, called head-tail, every rank has as much to do as any other.

Any block may be selected, so keys and values of the selected branch are gathered on every rank, and so are the
compressed ones, which are ``d`` times fewer. What the window and the compressors want of other ranks are *halos*: the
``w - 1`` tokens before a chunk, and the ``l - d`` tokens behind it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flexnsa.config import NSAConfig
from flexnsa.distributed.chunks import check_chunks
from flexnsa.distributed.collectives import gather
from flexnsa.geometry import num_compressed
from flexnsa.layers.attention import NativeSparseAttention
from flexnsa.layers.core import RowLayout
from flexnsa.layers.rope import stored_rope_tables
from flexnsa.models import DecoderLM
from flexnsa.models.decoder import DecoderLayer
from flexnsa.positions import Positions
from flexnsa.validation import check_type, describe


def shard(x: Tensor, mesh: DeviceMesh, *, seq_dim: int = 1) -> Tensor:
    """Take this rank's tokens of rows that every rank has: its two chunks, one after the other.

    Args:
        x: tokens, targets or hidden states, ``(B, S, ...)`` by default.
        mesh: of one dimension.
        seq_dim: the dimension of the tokens.

    Raises:
        TypeError: not a tensor, or no mesh.
        ValueError: the tokens cannot be cut into ``2 R`` chunks, or ``mesh`` has more than one dimension.
    """
    ranks = _Ranks.of(mesh)
    _check_rows(x, seq_dim)
    if x.shape[seq_dim] % (2 * ranks.size):
        expected = f"a multiple of 2 * {ranks.size} ranks tokens in dimension {seq_dim}"
        raise ValueError(f"x: expected {expected}, got {describe(x)}")
    chunks = x.chunk(2 * ranks.size, seq_dim)
    return torch.cat([chunks[number] for number in ranks.chunks], seq_dim)


def unshard(x: Tensor, mesh: DeviceMesh, *, seq_dim: int = 1) -> Tensor:
    """Put the tokens of all ranks back into the order of the row; the inverse of :func:`shard`.

    Args:
        x: this rank's tokens, as :func:`shard` gives them, of the same shape on every rank.
        mesh: of one dimension.
        seq_dim: the dimension of the tokens.

    Raises:
        TypeError: not a tensor, or no mesh.
        ValueError: the rank's tokens are no two chunks, or ``mesh`` has more than one dimension.
    """
    ranks = _Ranks.of(mesh)
    _check_rows(x, seq_dim)
    if x.shape[seq_dim] % 2:
        raise ValueError(f"x: expected an even number of tokens in dimension {seq_dim}, got {describe(x)}")
    return torch.cat(ranks.gather(x.chunk(2, seq_dim)), seq_dim)


def parallelize_model(model: DecoderLM, mesh: DeviceMesh) -> DecoderLM:
    """Have a model take the tokens of its rank, in place: those that :func:`shard` gives of whole rows.

    Logits are those of these tokens, and a loss of ``reduction="sum"`` is the rank's part of the sum. So are gradients
    of parameters: DDP or FSDP2 over the same ranks adds them up.

    Args:
        model: with NSA in all layers.
        mesh: of one dimension.

    Raises:
        TypeError: not such a model, or its attention is not NSA, or no mesh.
        ValueError: ``mesh`` has more than one dimension. No layer has been touched.
    """
    check_type("model", model, DecoderLM)
    layers = [cast("DecoderLayer", layer) for layer in model.layers]
    for layer in layers:
        _check(layer.attention, mesh)
    for layer in layers:
        parallelize_attention(cast("NativeSparseAttention", layer.attention), mesh)
    return model


def parallelize_attention(layer: NativeSparseAttention, mesh: DeviceMesh) -> NativeSparseAttention:
    """Have a layer take the tokens of its rank, in place: ``(B, S / R, dim)`` to the same of the layer's output.

    Called with whole rows, as :func:`shard` cuts them: chunks of at least ``w - 1`` and ``l - d`` tokens, in multiples
    of ``d``. Mods see the tokens' positions in the row. Packed documents, whose blocks begin anywhere, and caches are
    refused by name, when the layer is called. Gradients of parameters are of the rank's tokens alone.

    Args:
        layer: of any branches, compression and implementation.
        mesh: of one dimension.

    Raises:
        TypeError: not such a layer, or no mesh.
        ValueError: ``mesh`` has more than one dimension.
    """
    _check(layer, mesh)
    layer.lay_out = functools.partial(_lay_out, ranks=_Ranks.of(mesh), branches=layer.branches)
    layer.register_forward_pre_hook(_refuse_caches, with_kwargs=True)
    return layer


@dataclass(frozen=True, slots=True)
class _Ranks:
    """The ranks that share a row: this one, how many there are, and the name of their group."""

    rank: int
    size: int
    group: str

    @classmethod
    def of(cls, mesh: DeviceMesh) -> _Ranks:
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
class _ShardedKeys:
    """Which keys the queries of a rank read; see :class:`flexnsa.layers.core.KeySource`."""

    ranks: _Ranks
    config: NSAConfig

    def of_tokens(self, name: str, new: Tensor) -> Tensor:  # noqa: ARG002
        """Gather all."""
        return torch.cat(self.ranks.gather(new.chunk(2, 2)), 2)

    def of_window(self, name: str, new: Tensor) -> Tensor:  # noqa: ARG002
        """Lay the halo in front of each chunk, and the second chunk behind the first."""
        first, second = new.chunk(2, 2)
        halo = self.config.window_size - 1
        if halo == 0:
            return new
        tails = [torch.zeros_like(first[:, :, :halo]), *self.ranks.gather([x[:, :, -halo:] for x in (first, second)])]
        before = [tails[number] for number in self.ranks.chunks]
        return torch.cat([before[0], first, before[1], second], 2)

    def of_blocks(self, name: str, new: Tensor, compress: Callable[[Tensor], Tensor]) -> Tensor:  # noqa: ARG002
        """Compress the rank's own tokens, each chunk with the halo behind it, and gather what they give."""
        first, second = new.chunk(2, 2)
        stride = self.config.compress_stride
        halo, count = self.config.compress_block_size - stride, first.shape[2] // stride
        raw = new
        if halo:
            heads = [
                *self.ranks.gather([x[:, :, :halo] for x in (first, second)]),
                torch.zeros_like(first[:, :, :halo]),
            ]
            after = [heads[number + 1] for number in self.ranks.chunks]
            raw = torch.cat([first, after[0], second, after[1]], 2)
        blocks = compress(raw)  # between those of the first chunk and those of the second some cross the seam
        every = torch.cat(self.ranks.gather([blocks[:, :, :count], blocks[:, :, -count:]]), 2)
        return every[:, :, : num_compressed(new.shape[2] * self.ranks.size, self.config)]


def _lay_out(
    seq_len: int,
    document_ids: Tensor | None,
    *,
    config: NSAConfig,
    head_dim: int,
    rope_base: float,
    dtype: torch.dtype,
    device: torch.device,
    ranks: _Ranks,
    branches: Sequence[str],
) -> RowLayout:
    """Lay out ``seq_len`` tokens of a rank; as :func:`flexnsa.layers.core.row_layout`."""
    if document_ids is not None:
        got = describe(document_ids)
        raise ValueError(f"document_ids: expected None of a layer whose tokens are spread over ranks, got {got}")
    check_chunks("seq_len", seq_len, 2, config, branches)
    before, behind = config.window_size - 1, config.compress_block_size - config.compress_stride
    chunk, stride = seq_len // 2, config.compress_stride
    firsts = [number * chunk for number in ranks.chunks]
    own = torch.arange(chunk, device=device)
    token = torch.cat([first + own for first in firsts])
    # As the halos lie: some blocks cross the seam between the chunks, and some keys stand before each chunk.
    counts = (chunk + behind) // stride, chunk // stride
    block = torch.cat(
        [first + torch.arange(count, device=device) * stride for first, count in zip(firsts, counts, strict=True)]
    )
    place = torch.cat([before + own, before + chunk + before + own]).to(torch.int32)[None]
    start = place - token.to(torch.int32)
    tokens, blocks = (stored_rope_tables(x, head_dim, rope_base, dtype=dtype) for x in (token, block))
    return RowLayout(
        tokens,
        blocks,
        positions=Positions.of_queries(token),
        window_positions=Positions(place, start, torch.zeros_like(start), consecutive=False),
        source=_ShardedKeys(ranks, config),
    )


def _check_rows(x: Tensor, seq_dim: int) -> None:
    check_type("x", x, Tensor)
    check_type("seq_dim", seq_dim, int)
    if not -x.dim() <= seq_dim < x.dim():
        raise ValueError(f"seq_dim: expected a dimension of {describe(x)}, got {seq_dim}")


def _check(layer: nn.Module, mesh: DeviceMesh) -> None:
    if not isinstance(layer, NativeSparseAttention):
        raise TypeError(f"layer: expected NativeSparseAttention, got {type(layer).__name__}")
    _Ranks.of(mesh)


def _refuse_caches(_layer: nn.Module, _inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Demand whole rows: a cache has one rank's tokens only."""
    if options.get("cache") is not None:
        raise ValueError("cache: expected None of a layer whose tokens are spread over ranks, got one")
