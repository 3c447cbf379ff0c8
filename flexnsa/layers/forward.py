"""The one way into a layer: whole sequences, the first tokens of a cache, and those that follow them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from flexnsa.attention.all_tokens import with_all_tokens
from flexnsa.attention.dispatch import attend, choose_implementation, prepare_mods
from flexnsa.attention.interface import Call, Scorer, given
from flexnsa.attention.sampling import QuerySample, Sample, at_sample
from flexnsa.attention.sinks import returns_lse, with_sinks
from flexnsa.cache.cache import NSACache, PrefillKeys, StepKeys
from flexnsa.cache.step_cache import StepCache, check_pack
from flexnsa.cache.steps import Step
from flexnsa.checks.calls import check_document_ids
from flexnsa.checks.scorers import check_masses
from flexnsa.config import NSAConfig
from flexnsa.layers.core import Compressors, Heads, Read, collect_keys
from flexnsa.layers.indexer import Indexer, SelectionLoss, SharedIndex, untaught
from flexnsa.layers.layouts import KeySource, Layout, RowKeys, RowLayout
from flexnsa.layers.rope import RopeTables, apply_rope
from flexnsa.masks.positions import Positions, positions_of
from flexnsa.masks.user_mods import Mods, cap_of
from flexnsa.primitives import describe

C = TypeVar("C", bound=StepCache, contravariant=True)
L = TypeVar("L", bound=Layout)


WholeStep = Callable[[Tensor | None, Tensor | None], tuple[Tensor, Tensor | None]]
"""``(lengths, block_indices)``: put tokens into a cache and attend from them, without waiting for the device.

It returns the heads' outputs ``(B, T, Hq * Dv)``, NaN for tokens without capacity, and the selected blocks.
"""


class Layer(Protocol[C, L]):
    """What :func:`run_layer` asks of a layer: its projections and rotation, how it attends, and follows a cache."""

    training: bool
    dense_branches: tuple[str, ...] | None

    @property
    def indexer(self) -> Indexer | None:
        """Of the layer, if it has one."""
        ...

    def row_layout(self, x: Tensor, document_ids: Tensor | None, /) -> L:
        """Lay out whole sequences ``x (B, S, dim)``, or packed ones."""
        ...

    def attend(
        self,
        x: Tensor,
        heads: Heads,
        layout: L,
        source: KeySource,
        mods: Mods,
        *,
        cached: bool,
        index: SharedIndex | None = None,
    ) -> tuple[Tensor, Read | None]:
        """Rotate, and attend to the keys of the source, those of a cache if ``cached``, and to the index's blocks.

        Returns:
            The heads' outputs ``(B, Hq, T, Dv)``, and what was read, if it can be counted.
        """
        ...

    def step_layout(self, x: Tensor, step: Step) -> L:
        """Lay out tokens ``x (B, T, dim)`` that follow a cache."""
        ...

    def project(self, x: Tensor, *, rows: bool = False) -> Heads:
        """Project to heads, not yet rotated. In a dense stage whole sequences (``rows``) need only its branches."""
        ...

    def whole_step(self, x: Tensor, cache: C, mods: Mods) -> WholeStep | None:
        """Return the function that computes all of a step ``x (B, T, dim)`` on a cache; None where no kernel does."""
        ...


class LossOverRanks(Protocol):
    """A group of ranks that share a layer: each compares a part of its queries or heads."""

    def share(self, sample: QuerySample, local: Positions) -> QuerySample:
        """Return the part of a sample that this rank compares, given the positions of its own queries."""
        ...

    def add(self, loss: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums over ranks."""
        ...


def run_layer(
    layer: Layer[C, L],
    x: Tensor,
    *,
    mods: Mods = (None, None),
    document_ids: Tensor | None = None,
    layout: L | None = None,
    heads: Heads | None = None,
    cache: C | None = None,
    lengths: Tensor | None = None,
    selection: SelectionLoss | None = None,
    losses_over: Sequence[LossOverRanks] = (),
    index: SharedIndex | None = None,
) -> tuple[Tensor, SharedIndex | None]:
    """Attend from tokens that have been checked; a layer only maps what this returns to its output.

    There are four cases: whole sequences; whole sequences that an empty cache keeps; a few tokens that follow a cache,
    which kernels compute at once; and any other tokens that follow a cache.

    Args:
        layer: the layer.
        x: ``(B, T, dim)``.
        mods: a score_mod and a mask_mod.
        document_ids: int ``(B, T)`` of packed sequences.
        layout: of the layer, in place of ``document_ids``.
        heads: of whole sequences, where the layer has projected them.
        cache: the cache that stores the tokens, if any.
        lengths: int ``(B,)``, how many tokens of each sequence the cache keeps; by default all.
        selection: gets the loss that teaches the layer's indexer, in training without a cache.
        losses_over: groups of ranks that share the layer, and so its loss.
        index: of the layer that this one follows, if it does.

    Returns:
        The heads' outputs ``(B, T, Hq * Dv)``, and what layers that follow this one need. Outputs are NaN for tokens
        for which the cache has no capacity, which only a compiled or captured call gets: any other one is refused.
    """
    if cache is None:
        layout = layer.row_layout(x, document_ids) if layout is None else layout
        if selection is not None and layout.source is not None and not losses_over:
            raise ValueError("layout: expected one of whole rows, of which alone the layer has the loss, got a part")
        heads = layer.project(x, rows=layout.source is None) if heads is None else heads
        out, read = layer.attend(x, heads, layout, layout.source or RowKeys(), mods, cached=False, index=index)
        out, shared = _teach(layer, x, out, read, selection, losses_over)
        return _join(out), shared
    cached = not (is_packed(document_ids, layout) or cache.takes_rows(x.shape[1]))
    take_step = layer.whole_step(x, cache, mods) if cached else None
    if take_step is not None:
        longest = cache.check_room(x.shape[1], lengths)
        out, blocks = take_step(lengths, None if index is None else index.block_indices)
        cache.room.longest = longest
        return out, None if blocks is None else SharedIndex(blocks)
    if cached:
        step = cache.begin(x.shape[1], lengths, ordered=mods != (None, None))
        layout, source = layer.step_layout(x, step), StepKeys(cache, step)
    else:
        layout = layer.row_layout(x, document_ids) if layout is None else layout
        step = cache.begin_rows(x.shape[1], lengths, layout.positions, layout.block_starts)
        source = PrefillKeys(cache, step)
    heads = layer.project(x)
    cache.check_dtypes(heads.q, *heads.k.values(), *heads.v.values())
    out, read = layer.attend(x, heads, layout, source, mods, cached=cached, index=index)
    if isinstance(cache, NSACache) and cache.reads is not None and read is not None:
        window_positions = step.window_positions if cached else step.positions
        call = replace(read.call, positions=step.positions, window_positions=window_positions)
        cache.reads.record(read.keys, call, read.block_indices, read.scorer)
    cache.end(step)
    return _join(out.masked_fill(step.lost[:, None, :, None], torch.nan) if cached else out), _shared(read)


def _teach(
    layer: Layer[C, L],
    x: Tensor,
    out: Tensor,
    read: Read | None,
    selection: SelectionLoss | None,
    ranks: Sequence[LossOverRanks],
) -> tuple[Tensor, SharedIndex | None]:
    """Compare scores and true shares in training, if an indexer chose; return ``out``, and what others need."""
    indexer = layer.indexer
    if read is None or read.scorer is None or not layer.training or not torch.is_grad_enabled():
        return out, _shared(read)
    if selection is None:
        if indexer is not None and layer.dense_branches is None:
            out = untaught(out, indexer)
        return out, _shared(read)
    k, scorer = given(read.keys.k_slc), read.scorer
    sample: QuerySample = Sample(selection.tokens(x, k.shape[2]))
    for group in ranks:
        sample = group.share(sample, positions_of(read.q, read.call.positions))
    index = scorer.q  # of the same sample, where another layer's indexer chose
    if indexer is not None:
        # Index queries of the sample alone are differentiated: a few of each sequence, where all were needed to select.
        index = indexer.queries(sample.take(x.detach()[:, None])[:, 0], sample.take(read.raw_q.detach()))
        tables = (table if table.dim() == 4 else table[None, None] for table in read.tables)  # (B, 1, T, D / 2)
        index = apply_rope(index, RopeTables(*map(sample.take, tables)))
        index = sample.compared(index)
    scorer = Scorer(index, scorer.k, at_sample(scorer.call, read.q, sample))
    q, call = sample.compared(sample.take(read.q.detach())), at_sample(read.call, read.q, sample)
    parts = read.implementation.selection_loss(q, k, scorer, call, selection.query_weights)
    for group in ranks:
        parts = group.add(*parts)
    selection.add(*parts)
    return out, SharedIndex(given(read.block_indices), scorer.q, scorer.k)


def _shared(read: Read | None) -> SharedIndex | None:
    """Return what layers that follow need where nothing is taught."""
    return None if read is None or read.block_indices is None else SharedIndex(read.block_indices)


class Attention(NamedTuple):
    """What a layer of NSA attends with.

    Args:
        config: sizes of the branches.
        branches: of the layer.
        compressors: of the layer.
        scale: factor on the scores.
        impl: as in :func:`flexnsa.native_sparse_attention`.
        recompute: as in :func:`flexnsa.native_sparse_attention`.
        sinks: ``(Hq,)``, see :func:`flexnsa.attention.sinks.with_sinks`.
        check_parameters: whether the implementation has to be able to take the layer's parameters.
    """

    config: NSAConfig
    branches: Sequence[str]
    compressors: Compressors
    scale: float
    impl: str
    recompute: Sequence[str] = ()
    sinks: Tensor | None = None
    check_parameters: bool = False


class SparseLayer(nn.Module):
    """How every layer of NSA attends: choose an implementation, compress, and run the branches.

    In a dense stage (:meth:`attend_densely`) the selected branch attends to all past tokens of whole rows.
    """

    dense_branches: tuple[str, ...] | None = None
    """The branches of a dense stage; None outside of one."""

    def attend_densely(self, branches: Sequence[str] | None = ("slc",)) -> None:
        """Begin a dense stage, or end it with None: short rows then train with the same weights as fast as dense ones.

        The selected branch attends to all past tokens, as if it selected all blocks. The branches that are not named
        are left out and learn nothing: they get no gradient, for which DDP needs ``find_unused_parameters=True``. A
        selection loss compares the scores of an indexer with the true shares of all blocks; without one the indexer is
        left out, too. Calls with a cache, and ranks of context parallelism, attend sparsely.

        Raises:
            TypeError: they are no sequence.
            ValueError: the selected branch is not among them, or the layer lacks one.
        """
        has = self.attention().branches
        if isinstance(branches, str) or not isinstance(branches, Sequence | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"branches: expected a sequence of names, or None, got {describe(branches)}")
        if branches is not None and not {"slc"} <= {*branches} <= {*has}:
            raise ValueError(f"branches: expected slc and others of {tuple(has)}, or None, got {tuple(branches)}")
        self.dense_branches = None if branches is None else tuple(branches)

    def attention(self) -> Attention:
        """Describe the layer as it is now."""
        raise NotImplementedError

    def project(self, x: Tensor, *, rows: bool = False) -> Heads:
        """Project; see :class:`Layer`. A layer that has more to project gives its heads to :func:`run_layer`."""
        raise NotImplementedError

    def step_layout(self, x: Tensor, step: Step) -> RowLayout:
        """Lay out tokens that follow a cache; see :class:`Layer`. A layer that takes no cache has none."""
        raise NotImplementedError

    def whole_step(self, x: Tensor, cache: NSACache, mods: Mods) -> WholeStep | None:  # noqa: ARG002
        """Return what computes a step at once; see :class:`Layer`."""
        return None

    def attend(
        self,
        x: Tensor,
        heads: Heads,
        layout: RowLayout,
        source: KeySource,
        mods: Mods,
        *,
        cached: bool,
        index: SharedIndex | None = None,
    ) -> tuple[Tensor, Read]:
        """Attend from projected heads; see :class:`Layer`."""
        by = self.attention()
        if mods != (None, None):
            check_masses(by.config, "with a score_mod or mask_mod")
        v_dim, in_place = max(v.shape[-1] for v in heads.v.values()), cached and returns_lse(by.sinks, heads.q)
        modded = cap_of(*mods) is None
        implementation = choose_implementation(by.impl, heads.q, modded=modded, cached=in_place, v_dim=v_dim)
        if self.dense_branches is not None and isinstance(source, RowKeys):
            implementation = with_all_tokens(implementation, needs_lse=by.sinks is not None)
            by = by._replace(branches=self.dense_branches)
            # So torch.compile sees them vary before a graph reads them
            _ = [table.shape for table in layout.blocks["cmp"].tables]
        implementation = with_sinks(implementation, by.sinks)
        checked = by.check_parameters and not (cached or torch.compiler.is_compiling())
        implementation.check(x=x, **(dict(self.named_parameters()) if checked else {}))
        implementation.check(q=heads.q)  # before anything is stored
        for tag in by.branches:
            implementation.check(**{f"k_{tag}": heads.k[tag], f"v_{tag}": heads.v[tag]})
        mod = prepare_mods(*mods, x, heads.q.shape[1], implementation)
        call = Call(by.config, by.scale, mod, layout.positions, layout.window_positions)
        q, keys, scorer = collect_keys(heads, layout, by.compressors, source, call, by.branches, index)
        out, aux = attend(
            implementation,
            q,
            keys,
            heads.gates,
            call,
            block_indices=None if index is None else index.block_indices,
            indexer=scorer,
            branches=by.branches,
            recompute=() if cached else by.recompute,
            nonnegative=not heads.signed,
            by_token=True,
        )
        return out, Read(heads.q, layout.tokens, q, keys, call, aux.block_indices, scorer, implementation)


def check_call(
    layer: nn.Module,
    x: Tensor,
    cache_class: type[StepCache],
    *,
    document_ids: Tensor | None,
    layout: Layout | None,
    cache: StepCache | None,
    lengths: Tensor | None,
) -> None:
    """Check that documents fit the tokens, that a cache was made for the layer and that no gradient is needed with it.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: an argument does not fit the others; the message names it.
    """
    if document_ids is not None:
        check_document_ids(document_ids, *x.shape[:2], like=x)
    if cache is None:
        if lengths is not None:
            raise ValueError(f"lengths: expected None without a cache, got {describe(lengths)}")
        return
    cache_class.check_made_for(layer, cache)
    if layout is not None and layout.source is not None:
        raise ValueError("layout: expected one of whole rows with a cache, got tokens that are spread over ranks")
    packed = is_packed(document_ids, layout)
    if packed:
        check_pack(x, cache, lengths)
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in layer.parameters())):
        raise ValueError("cache: expected torch.no_grad(), because what it holds has no gradient, got training")
    cache.require(batch_size=cache.batch_size if packed else len(x), device=x.device)


def is_packed(document_ids: Tensor | None, layout: Layout | None) -> bool:
    """Return whether sequences are packed with documents."""
    return document_ids is not None or (layout is not None and layout.positions is not None)


def _join(out: Tensor) -> Tensor:
    """Return the heads' outputs ``(B, Hq, T, Dv)`` as ``(B, T, Hq * Dv)``."""
    return out.transpose(1, 2).flatten(2)
