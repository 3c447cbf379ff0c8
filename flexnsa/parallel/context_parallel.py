"""Context parallelism: the tokens of a sequence are sharded over ranks, and keys are communicated, not queries.

A sequence is split into ``2 R`` chunks, and rank ``r`` of ``R`` has chunks ``r`` and ``2 R - 1 - r``. Late queries see
more compressed keys than early ones; in this order, called head-tail, every rank has the same amount of work.

Any block may be selected, so keys and values of the selected branch are gathered on every rank, and so are compressed
ones, which are ``d`` times fewer. The window and the compressors need only a few tokens of the neighbouring chunks, see
the picture in :mod:`flexnsa.parallel.shared_rows`. The few queries that teach an indexer travel too: see
:mod:`flexnsa.parallel.shared_losses`.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flexnsa.layers.attention import NativeSparseAttention
from flexnsa.layers.layouts import RowLayout
from flexnsa.parallel.layers_of import attention_layers, check_layer, check_not_shared
from flexnsa.parallel.shared_losses import OverTokens
from flexnsa.parallel.shared_rows import SharingRanks, lay_out_chunks
from flexnsa.primitives import check_type, describe

M = TypeVar("M", bound=nn.Module)


def shard(x: Tensor, mesh: DeviceMesh, *, seq_dim: int = 1) -> Tensor:
    """Return this rank's tokens of sequences that every rank has: its two chunks, one after the other.

    Args:
        x: tokens, targets or hidden states, ``(B, S, ...)`` by default.
        mesh: of one dimension.
        seq_dim: the dimension of the tokens.

    Raises:
        TypeError: ``x`` is not a tensor, or ``mesh`` not a mesh.
        ValueError: the tokens cannot be split into ``2 R`` chunks, or ``mesh`` has more than one dimension.
    """
    ranks = SharingRanks.of(mesh)
    _check_seq_dim(x, seq_dim)
    if x.shape[seq_dim] % (2 * ranks.size):
        expected = f"a multiple of 2 * {ranks.size} ranks tokens in dimension {seq_dim}"
        raise ValueError(f"x: expected {expected}, got {describe(x)}")
    chunks = x.chunk(2 * ranks.size, seq_dim)
    return torch.cat([chunks[number] for number in ranks.chunks], seq_dim)


def unshard(x: Tensor, mesh: DeviceMesh, *, seq_dim: int = 1) -> Tensor:
    """Gather the tokens of all ranks in the order of the sequence; the inverse of :func:`shard`.

    Args:
        x: this rank's tokens, as from :func:`shard`, of the same shape on every rank.
        mesh: of one dimension.
        seq_dim: the dimension of the tokens.

    Raises:
        TypeError: ``x`` is not a tensor, or ``mesh`` not a mesh.
        ValueError: the rank's tokens are not two chunks, or ``mesh`` has more than one dimension.
    """
    ranks = SharingRanks.of(mesh)
    _check_seq_dim(x, seq_dim)
    if x.shape[seq_dim] % 2:
        raise ValueError(f"x: expected an even number of tokens in dimension {seq_dim}, got {describe(x)}")
    return torch.cat(ranks.gather(x.chunk(2, seq_dim)), seq_dim)


def parallelize_model(model: M, mesh: DeviceMesh) -> M:
    """Change a model in place to take the tokens of its rank, as :func:`shard` returns them.

    Logits are those of these tokens. A loss of ``reduction="sum"`` and the gradients of parameters are the rank's part
    of the sum: DDP or FSDP2 over the same ranks adds them up. The total of a :class:`flexnsa.SelectionLoss` is that of
    whole sequences, and its gradients are the rank's part.

    Args:
        model: any module with NSA in all of its attention layers.
        mesh: of one dimension.

    Raises:
        TypeError: ``model`` is not a module or has no NSA layer, or ``mesh`` is not a mesh.
        ValueError: ``mesh`` has more than one dimension, or a layer is parallelized already. The model is unchanged.
    """
    layers = attention_layers(model)
    for layer in layers:
        check_not_shared(layer, OverTokens, "tokens")
    ranks = SharingRanks.of(mesh)  # one for all layers, which torch.compile then finds alike
    for layer in layers:
        _share(layer, ranks)
    return model


def parallelize_attention(layer: NativeSparseAttention, mesh: DeviceMesh) -> NativeSparseAttention:
    """Change a layer in place to take the tokens of its rank, ``(B, S / R, dim)``, and to return their outputs.

    Its input is what :func:`shard` returns: chunks of at least ``w - 1`` and ``l - d`` tokens, in multiples of ``d``,
    with an indexer also by the sizes of its keys. Mods see positions in the whole sequence. ``document_ids`` of packed
    documents are those of the rank's tokens, from :func:`shard`; with them all keys that are compressed are gathered,
    too. A call with a cache raises ``ValueError``. Gradients of parameters are those of the rank's tokens only.

    Args:
        layer: with any branches, compression and implementation.
        mesh: of one dimension.

    Raises:
        TypeError: ``layer`` is not an NSA layer, or ``mesh`` not a mesh.
        ValueError: ``mesh`` has more than one dimension, or the layer is parallelized already.
    """
    check_layer(layer)
    check_not_shared(layer, OverTokens, "tokens")
    _share(layer, SharingRanks.of(mesh))
    return layer


def _share(layer: NativeSparseAttention, ranks: SharingRanks) -> None:
    layer.lay_out = functools.partial(lay_out_chunks, ranks=ranks, branches=layer.branches)
    layer.losses_over += (OverTokens(ranks),)
    layer.register_forward_pre_hook(_check_sharded, with_kwargs=True)


def _check_seq_dim(x: Tensor, seq_dim: int) -> None:
    check_type("x", x, Tensor)
    check_type("seq_dim", seq_dim, int)
    if not -x.dim() <= seq_dim < x.dim():
        raise ValueError(f"seq_dim: expected a dimension of {describe(x)}, got {seq_dim}")


def _check_sharded(_layer: nn.Module, _inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Check that there is no cache, and no layout of whole sequences: both know one rank's tokens only."""
    if options.get("cache") is not None:
        raise ValueError("cache: expected None of a layer whose tokens are spread over ranks, got one")
    layout = options.get("layout")
    if isinstance(layout, RowLayout) and layout.source is None:
        raise ValueError("layout: expected one of tokens that are spread over ranks, as the layer has, got whole rows")
