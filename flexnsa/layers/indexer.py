"""The indexer of a layer: queries and keys of its own that score blocks, and the loss that teaches them.

Nothing is differentiated through a selection. The compressed branch's scores learn what that branch itself needs. Those
of an indexer learn which blocks the selected branch needs, from :class:`SelectionLoss`. An indexer reads its layer
without a gradient, and begins as the mean of the layer's own keys.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from flexnsa.attention.sampling import sampled_tokens
from flexnsa.config import NSAConfig
from flexnsa.layers.compression import COMPRESSORS
from flexnsa.layers.projection import split_heads
from flexnsa.layers.sharding import own
from flexnsa.primitives import check_choice, check_int64, check_integers, check_positive_int, check_type, describe

SAMPLED_QUERIES = 256
"""Queries of each sequence that teach an indexer, by default."""


class IndexHeads(NamedTuple):
    """Index queries ``(B, Hkv * index_heads, T, D)`` and raw index keys ``(B, Hkv or 1, T, D)``, before rotation."""

    q: Tensor
    k: Tensor


class SharedIndex(NamedTuple):
    """What a layer with an indexer tells the layers that follow it, which attend to its blocks and teach its indexer.

    Args:
        block_indices: int32 ``(B, Hkv, T, n)``, the blocks that it chose.
        q: its index queries ``(B, Hkv * index_heads, m, D)``, rotated, at the tokens that its selection loss compares,
            which those that follow compare too; None where nothing is taught.
        k: its index keys ``(B, Hkv, N, D)``, rotated; None likewise.
    """

    block_indices: Tensor
    q: Tensor | None = None
    k: Tensor | None = None


class PassedIndex:
    """Where a layer leaves its index for those that follow it, in a model that hands on hidden states alone."""

    index: SharedIndex | None = None

    def get(self, x: Tensor) -> SharedIndex:
        """Return the index, on the device of ``x``."""
        if self.index is None:
            raise ValueError("index: expected that of the layer that this one follows, got None")
        return SharedIndex._make(each if each is None else each.to(x.device) for each in self.index)


class Indexer(nn.Module):
    """Maps a layer's input, queries and keys to index queries and raw index keys, without a gradient to any of them.

    An index key summarises ``index_block_size`` tokens: the layer's keys plus a learned change, compressed by ``phi``.
    An index query is the mean of its share of a group's queries plus a learned change. The changes begin at 0, and
    ``phi`` as the mean.

    Args:
        dim: width of the layer's input.
        num_kv_heads: ``Hkv``.
        head_dim: ``D``.
        config: provides ``index_heads`` and the sizes of index keys.
        compression: how blocks are compressed: ``mean``, ``linear`` or ``mlp``.
        rank: of the changes; ``None``: full matrices.
    """

    order: Callable[[Tensor], Tensor] | None = None
    """Puts channels of heads in the order in which a layer rotates them, where its own heads are not in that order."""

    def __init__(
        self, dim: int, num_kv_heads: int, head_dim: int, *, config: NSAConfig, compression: str, rank: int | None
    ) -> None:
        super().__init__()
        assert config.index_heads is not None
        self.num_kv_heads, self.num_index_heads = num_kv_heads, num_kv_heads * config.index_heads
        self.change_q = Change(dim, self.num_index_heads * head_dim, rank)
        self.change_k = Change(dim, num_kv_heads * head_dim, rank)
        self.phi = COMPRESSORS[compression](num_kv_heads, head_dim, config=config.scoring)
        self.phi.begin_as_mean()

    def reset_parameters(self) -> None:
        """Begin anew, as the mean of the layer's keys."""
        for child in self.children():
            child.reset_parameters()  # pyright: ignore[reportCallIssue]

    @property
    def maps(self) -> list[nn.Linear]:
        """The maps of the layer's input."""
        return [self.change_q.first, self.change_k.first]

    def forward(self, x: Tensor, q: Tensor, k: Tensor) -> IndexHeads:
        """Map ``x (B, T, dim)``, ``q (B, Hq, T, D)`` and ``k (B, Hkv, T, D)``, which are not rotated.

        Index queries have no gradient: those that are compared are mapped again, by :meth:`queries`.
        """
        return IndexHeads(self.queries(x, q).detach(), self._changed_k(k, self.change_k(x.detach())))

    def queries(self, x: Tensor, q: Tensor) -> Tensor:
        """Map ``x (B, T, dim)`` and ``q (B, Hq, T, D)`` to index queries ``(B, Hkv * index_heads, T, D)``."""
        return self._changed_q(q, self.change_q(x.detach()))

    def changed(self, projected: Sequence[Tensor], q: Tensor, k: Tensor) -> IndexHeads:
        """Change queries and keys, given what :attr:`maps` map the layer's input to."""
        of_q, of_k = self.change_q.finish(projected[0]), self.change_k.finish(projected[1])
        return IndexHeads(self._changed_q(q, of_q), self._changed_k(k, of_k))

    def _changed_q(self, q: Tensor, change: Tensor) -> Tensor:
        q = q.detach()
        if q.shape[1] != self.num_index_heads:
            q = torch.unflatten(q, 1, (self.num_index_heads, -1)).mean(2)
        return q + split_heads(change, self.num_index_heads)

    def _changed_k(self, k: Tensor, change: Tensor) -> Tensor:
        return k.detach() + split_heads(change, self.num_kv_heads)


class Change(nn.Module):
    """A linear map ``(..., dim)`` to ``(..., out_dim)`` that begins at 0, of full rank or as a product of two."""

    def __init__(self, dim: int, out_dim: int, rank: int | None) -> None:
        super().__init__()
        self.down = None if rank is None else nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(dim if rank is None else rank, out_dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Begin anew at 0."""
        if self.down is not None:
            self.down.reset_parameters()
        nn.init.zeros_(self.up.weight)

    @property
    def first(self) -> nn.Linear:
        """The map of the input."""
        return self.up if self.down is None else self.down

    def forward(self, x: Tensor) -> Tensor:
        """Return the change."""
        return self.finish(self.first(x))

    def finish(self, projected: Tensor) -> Tensor:
        """Return the change, given what :attr:`first` maps the input to."""
        return projected if self.down is None else self.up(projected)


class SelectionLoss:
    """The selection losses of one forward pass: ``loss + weight * selection.total`` teaches the indexers of a model.

    Give a new one to every call of a layer or of a model that has indexers. Each layer adds the divergence of its
    scores from the true shares of blocks at a few queries, see :func:`flexnsa.selection_loss`. A layer that follows
    another adds the divergence of the other's scores from its own true shares. ``seed``, ``step`` and ``sequence_ids``
    alone choose the queries. Nothing is added in ``eval`` or under ``torch.no_grad``, nor when activation
    checkpointing runs a layer again. Call ``torch.utils.checkpoint`` with ``use_reentrant=False``: otherwise it runs
    forward under ``torch.no_grad``.

    Example:
        >>> selection = SelectionLoss(seed=0, step=step)
        >>> loss = model(tokens, targets=targets, selection=selection)
        >>> (loss + selection.total).backward()

    Args:
        seed: chooses the queries, with ``step``: an int, or an int64 tensor ``()``.
        step: of the training; a tensor spares ``torch.compile`` one more compilation.
        sequence_ids: int ``(B,)``, the index of each sequence in the global batch; by default 0 to ``B - 1``.
        num_queries: queries of each sequence.
        query_weights: ``"mass"`` or ``"mean"``.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        *,
        seed: int | Tensor = 0,
        step: int | Tensor = 0,
        sequence_ids: Tensor | None = None,
        num_queries: int = SAMPLED_QUERIES,
        query_weights: str = "mass",
    ) -> None:
        for name, number in (("seed", seed), ("step", step)):
            check_int64(name, number)
        if sequence_ids is not None:
            check_integers("sequence_ids", sequence_ids, ("B",))
        check_positive_int("num_queries", num_queries)
        check_choice("query_weights", query_weights, ("mass", "mean"))
        self.seed, self.step, self.sequence_ids = seed, step, sequence_ids
        self.num_queries, self.query_weights = num_queries, query_weights
        self._tokens: Tensor | None = None
        self._sequences: Tensor | None = None  # (B, S, 0), as compiled code need not be made again for other sizes
        self._made_in = backward_pass()
        self.sums: list[Tensor] = []
        """The weighted sum of divergences of each layer, scalars with a gradient, fp32 or wider."""
        self.weights: list[Tensor] = []
        """What to divide each sum by."""

    @property
    def total(self) -> Tensor | float:
        """The sum over layers of their mean divergences, in nats; 0.0 where no layer has added one."""
        if not self.sums:
            return 0.0
        weights = torch.stack(self.weights)
        return (torch.stack(self.sums) / weights.where(weights > 0, 1)).sum()

    def tokens(self, x: Tensor, seq_len: int, real: Tensor | None = None) -> Tensor:
        """Choose the tokens whose queries are compared, int64 ``(B, m)``, of the whole sequences of ``x (B, ...)``.

        Padding follows the first ``real (B,)`` tokens of each sequence, which teach what they do alone; -1 is no token.

        Raises:
            ValueError: they were chosen for sequences of another number or length.
        """
        if self._sequences is not None and self._sequences.shape[:2] != (x.shape[0], seq_len):
            used = "that of {} sequences of {}".format(*self._sequences.shape)
            raise ValueError(
                f"selection: expected a new SelectionLoss for each pass, got {used} tokens for {len(x)} of {seq_len}"
            )
        if self._tokens is None:
            ids = torch.arange(x.shape[0], device=x.device) if self.sequence_ids is None else self.sequence_ids
            if self.sequence_ids is not None:
                check_integers("sequence_ids", ids, (x.shape[0],), like=x, as_of="x")
            self._tokens = sampled_tokens(seq_len, self.num_queries, self.seed, self.step, ids, real)
            self._sequences = x.detach().new_empty(x.shape[0], seq_len, 0)
        return self._tokens

    def of_rows(self, x: Tensor, real: Tensor | None) -> SelectionLoss:
        """Return one for a pass of ``x (B, S, ...)``, padded after ``real (B,)`` tokens; then :meth:`include` it.

        What layers add to it when backward runs them again is left out.
        """
        return SelectionLoss.at(self.tokens(x, x.shape[1], real), self.query_weights)

    def include(self, other: SelectionLoss) -> None:
        """Add what another one has."""
        self.sums += other.sums
        self.weights += other.weights

    @classmethod
    def at(cls, tokens: Tensor, query_weights: str) -> SelectionLoss:
        """Return one that compares the queries of the given tokens ``(B, m)``."""
        made = cls(query_weights=query_weights)
        made._tokens = tokens
        return made

    def add(self, loss: Tensor, weight: Tensor) -> None:
        """Add the weighted sum of a layer's divergences, and its weight, in forward.

        Raises:
            ValueError: backward runs a layer again of which forward added nothing.
        """
        if backward_pass() not in (-1, self._made_in):
            if not self.sums:
                raise ValueError(
                    "selection: expected checkpoint(..., use_reentrant=False), got a loss in backward only"
                )
            return
        self.sums.append(loss)
        self.weights.append(weight)


def backward_pass() -> int:
    """Return the number of the backward pass that runs this code again, -1 in forward and in compiled code."""
    if torch.compiler.is_compiling():
        return -1
    return torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]


class Following(Protocol):
    """What the check of an index asks of a layer."""

    follows: bool
    indexer: Indexer | None
    num_kv_heads: int
    config: NSAConfig
    dense_branches: tuple[str, ...] | None
    training: bool


def check_index(layer: Following, x: Tensor, index: SharedIndex | None, *, taught: bool, returned: bool) -> None:
    """Check that a layer has the index of ``x (B, T, dim)`` that it follows, and returns one only if it chooses.

    Raises:
        TypeError: ``index`` is no :class:`SharedIndex`, or ``returned`` no bool.
        ValueError: it is missing, not wanted, of other tokens or of a layer that was not taught along.
    """
    check_type("return_index", returned, bool)
    if returned and layer.indexer is None:
        raise ValueError("return_index: expected False of a layer without an indexer, got True")
    if not layer.follows:
        if index is not None:
            raise ValueError(f"index: expected None of a layer that follows no other, got {describe(index)}")
        return
    if index is None:
        raise ValueError("index: expected that of the layer that this one follows, got None")
    check_type("index", index, SharedIndex)
    blocks, selected = index.block_indices, layer.config.num_selected_blocks
    check_integers("index.block_indices", blocks, (x.shape[0], layer.num_kv_heads, x.shape[1], "n"), like=x, as_of="x")
    if blocks.shape[3] != selected and layer.dense_branches is None:
        got = f"{blocks.shape[3]}, as in a dense stage" if not blocks.shape[3] else blocks.shape[3]
        raise ValueError(f"index.block_indices: expected {selected} blocks of each query, got {got}")
    if taught and index.q is None and layer.training and torch.is_grad_enabled():
        raise ValueError("index: expected that of a layer in training with a selection loss, got one without queries")


def check_selection(selection: object, has_indexer: bool) -> None:
    """Check that ``selection`` is a loss, and that there is an indexer that it can teach."""
    check_type("selection", selection, SelectionLoss)
    if not has_indexer:
        raise ValueError("selection: expected None without an indexer (index_heads of the config), got a loss")


def warn_untaught() -> None:
    """Warn once of an indexer that learns nothing."""
    if not torch.compiler.is_compiling():
        message = "selection: expected a SelectionLoss to train a layer with an indexer, got None; it learns nothing"
        warnings.warn(message, stacklevel=1)  # of this line, so that it is shown once


def untaught(out: Tensor, indexer: nn.Module) -> Tensor:
    """Warn, and give an indexer that learns nothing gradients of 0 through ``out``, as DDP needs."""
    warn_untaught()
    return out + 0 * torch.stack([own(parameter).sum() for parameter in indexer.parameters()]).sum().to(out.dtype)
