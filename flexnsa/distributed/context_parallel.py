"""Rows whose tokens are spread over ranks: queries stay where they are, and keys travel to them.

A row is cut into ``2 R`` chunks, and rank ``r`` of ``R`` has chunks ``r`` and ``2 R - 1 - r``. Late queries see more
compressed keys than early ones; in this order, called head-tail, every rank has as much to do as any other.

Any block may be selected, so keys and values of the selected branch are gathered on every rank, and so are the
compressed ones, which are ``d`` times fewer. The window and the compressors want a few tokens of the neighbours alone;
:mod:`flexnsa.distributed.shared_rows` has the picture.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flexnsa.distributed.shared_rows import SharingRanks, lay_out_chunks
from flexnsa.layers.attention import NativeSparseAttention
from flexnsa.layers.core import RowLayout
from flexnsa.models import DecoderLM
from flexnsa.models.decoder import DecoderLayer
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
    ranks = SharingRanks.of(mesh)
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
    ranks = SharingRanks.of(mesh)
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
    layer.lay_out = functools.partial(lay_out_chunks, ranks=SharingRanks.of(mesh), branches=layer.branches)
    layer.register_forward_pre_hook(_demand_spread_rows, with_kwargs=True)
    return layer


def _check_rows(x: Tensor, seq_dim: int) -> None:
    check_type("x", x, Tensor)
    check_type("seq_dim", seq_dim, int)
    if not -x.dim() <= seq_dim < x.dim():
        raise ValueError(f"seq_dim: expected a dimension of {describe(x)}, got {seq_dim}")


def _check(layer: nn.Module, mesh: DeviceMesh) -> None:
    if not isinstance(layer, NativeSparseAttention):
        raise TypeError(f"layer: expected NativeSparseAttention, got {type(layer).__name__}")
    SharingRanks.of(mesh)


def _demand_spread_rows(_layer: nn.Module, _inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Demand rows of all ranks: a cache has one rank's tokens only, and a layout of whole rows sees no others."""
    if options.get("cache") is not None:
        raise ValueError("cache: expected None of a layer whose tokens are spread over ranks, got one")
    layout = options.get("layout")
    if isinstance(layout, RowLayout) and layout.source is None:
        raise ValueError("layout: expected one of tokens that are spread over ranks, as the layer has, got whole rows")
