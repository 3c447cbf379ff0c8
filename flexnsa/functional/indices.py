"""Record which blocks the layers of a model choose, and have the same tokens attend to the same blocks later.

Reinforcement learning needs both: one pass draws a token, often with other kernels, precision or weights than the pass
that trains it, which would choose other blocks where scores are nearly equal. What does it is attached to layers from
outside, as methods that stand in for their own, so that without it a model is what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexnsa.attention.interface import Call, given
from flexnsa.cache.cache import NSACache, PrefillKeys, StepKeys
from flexnsa.checks.calls import check_block_indices
from flexnsa.config import NSAConfig
from flexnsa.layers.core import Heads, Read
from flexnsa.layers.forward import SparseLayer, WholeStep
from flexnsa.layers.indexer import SharedIndex
from flexnsa.layers.layouts import KeySource, RowKeys, RowLayout
from flexnsa.layers.projection import weight_of
from flexnsa.masks.positions import Positions
from flexnsa.masks.user_mods import Mods
from flexnsa.primitives import check_tensor, check_type, may_look


def record_indices(model: nn.Module) -> IndexHandle:
    """Record the blocks that layers choose, until ``remove()`` or the end of a ``with`` block.

    A pass over whole rows begins a new record. With a cache, tokens are recorded at their places in their sequences, so
    that what follows a crop overwrites what was rejected. A :class:`flexnsa.NSACache` keeps the blocks with the keys,
    also where rows move or are copied. In the drop-in, beam search would move rows that the record does not. A CUDA
    graph that was captured without a handle records nothing.

    Example:
        >>> with record_indices(model) as handle:
        ...     texts = model.generate(prompts, 100)
        >>> with replay_indices(model, handle.indices()):
        ...     model(tokens, targets=targets).backward()

    Args:
        model: any module with layers of NSA that have the selected branch, or whose layers attend by
            ``attn_implementation="flexnsa"``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: it has no such layer, or has a handle already; or, in a pass, ranks share the tokens of a row,
            layers attend densely, or transformers batches continuously.
    """
    return IndexHandle([_attachment(module, None) for module in _choosing(model)])


def replay_indices(model: nn.Module, indices: Sequence[Tensor]) -> IndexHandle:
    """Attend to recorded blocks in passes over whole rows, until ``remove()`` or the end of a ``with`` block.

    Gradients are those of :func:`flexnsa.native_sparse_attention` with ``block_indices``. Activation checkpointing
    needs the handle in backward too. A token without recorded blocks, such as the last one of a generated text, which
    no pass has read, gets nothing from the selected branch.

    Args:
        model: as in :func:`record_indices`.
        indices: of :meth:`IndexHandle.indices`, for each layer that chooses. Document ``b`` of packed rows, counted
            over all rows, takes row ``b`` of the indices, unless these are packed as the tokens are.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: as :func:`record_indices`; or indices are of another shape, dtype or device; or, in a pass, of other
            rows, heads, sizes or, where a CPU can see it, documents or blocks; or there is a cache.
    """
    modules = _choosing(model)
    check_type("indices", indices, Sequence)
    if len(indices) != len(modules):
        raise ValueError(f"indices: expected those of {len(modules)} layers that choose blocks, got {len(indices)}")
    for number, (module, blocks) in enumerate(zip(modules, indices, strict=True)):
        name, like = f"indices[{number}]", weight_of(module)
        check_tensor(name, blocks, ("B", "Hkv", "S", "n"), like=like, as_of="the layer", dtype=torch.int32)
    return IndexHandle([_attachment(*each) for each in zip(modules, indices, strict=True)])


class IndexHandle:
    """Attached to the layers of a model that choose blocks; a context manager, which removes it."""

    def __init__(self, attachments: Sequence[_Attachment]) -> None:
        self._attachments = attachments
        for each in attachments:
            each.attach()

    def indices(self) -> list[Tensor]:
        """Return the recorded blocks, int32 ``(B, Hkv, S, n)`` for each layer that chooses, in the model's order.

        Row ``b`` has the tokens of sequence ``b``, without padding before them, or of row ``b`` of packed rows. It may
        be longer than they are; -1 stands where nothing was recorded.

        Raises:
            ValueError: no pass was recorded.
        """
        blocks = [each.kept for each in self._attachments if each.kept is not None]
        if not blocks:
            raise ValueError("indices: expected a recorded pass of the model, got none")
        return [each[:, :, :-1] - 1 for each in blocks]

    def remove(self) -> None:
        """Leave the model as it was; what was recorded stays."""
        for each in self._attachments:
            each.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _Attachment:
    """What records the blocks that a module chooses, or replays others, by methods in the place of the module's own.

    ``kept`` are recorded blocks, int32 ``(B, Hkv, C + 1, n)`` for ``C`` tokens, plus 1; 0 where there is none. As in
    caches, one slot more takes padding.
    """

    METHODS: ClassVar[tuple[str, ...]]

    def __init__(self, module: nn.Module, replayed: Tensor | None) -> None:
        self.module, self.replayed = module, replayed
        self.kept: Tensor | None = None

    def attach(self) -> None:
        for name in self.METHODS:
            setattr(self.module, name, getattr(self, name))

    def detach(self) -> None:
        for name in self.METHODS:
            vars(self.module).pop(name, None)


class _LayerAttachment(_Attachment):
    """Attached to a layer of the library, or one that is converted."""

    METHODS = ("attend", "whole_step")

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
        """Attend to recorded blocks, or record those that the layer chooses; see :class:`SparseLayer`."""
        layer, stored = cast("SparseLayer", self.module), source if isinstance(source, PrefillKeys | StepKeys) else None
        if stored is None and (layer.dense_branches is not None or not isinstance(source, RowKeys)):
            reason = "tokens that ranks share" if layer.dense_branches is None else "a dense stage"
            raise ValueError(f"model: expected layers that choose blocks of whole rows, got {reason}")
        if self.replayed is not None:
            if stored is not None:
                raise ValueError("cache: expected None where blocks are replayed, got one")
            blocks = _blocks_of(self.replayed, heads.k["slc"].shape[:3], layout.positions, layer.attention().config)
            index = SharedIndex(blocks)
        out, read = type(layer).attend(layer, x, heads, layout, source, mods, cached=cached, index=index)
        if stored is not None:
            self.kept = cast("NSACache", stored.cache).keep_blocks()
            stored.cache.store("blocks", given(read.block_indices) + 1, stored.step)
        elif self.replayed is None:
            self.kept = F.pad(given(read.block_indices) + 1, (0, 0, 0, 1))
        return out, read

    def whole_step(self, x: Tensor, cache: NSACache, mods: Mods) -> WholeStep | None:
        """Return what computes a step at once, and records its blocks."""
        layer = cast("SparseLayer", self.module)
        take_step = type(layer).whole_step(layer, x, cache, mods)
        if take_step is None or self.replayed is not None:
            return None

        def run(lengths: Tensor | None, blocks: Tensor | None) -> tuple[Tensor, Tensor | None]:
            self.kept, before, count = cache.keep_blocks(), cache.lengths[:, None], x.shape[1]
            token = before + torch.arange(count, device=x.device)
            end = before + (count if lengths is None else lengths[:, None])
            slots = token.where(token < end.clamp_max(cache.max_seq_len), cache.max_seq_len)
            out, chosen = take_step(lengths, blocks)
            self.kept[cache.rows[:, None], :, slots] = (given(chosen) + 1).transpose(1, 2)
            return out, chosen

        return run


class _DropInAttachment(_Attachment):
    """Attached to an attention module of transformers, for which :mod:`flexnsa.transformers.dropin` attends."""

    METHODS = ("choose_blocks",)

    def choose_blocks(
        self, select: Callable[..., Tensor], q: Tensor, k_cmp: Tensor, call: Call, *scores: Tensor | None
    ) -> Tensor:
        """Return recorded blocks, or record those that ``select`` chooses with the other arguments."""
        where, config = call.positions, call.config
        of_cache = where is not None and where.document is None
        if where is not None and not where.consecutive:
            raise ValueError("generate_batch: expected none where blocks are recorded or replayed, got one")
        if self.replayed is not None:
            if of_cache:
                raise ValueError("cache: expected no tokens of a cache where blocks are replayed, got some")
            return _blocks_of(self.replayed, (*k_cmp.shape[:2], q.shape[2]), where, config)
        blocks = select(q, k_cmp, call, *scores)
        if where is None or not of_cache:
            self.kept = F.pad(blocks + 1, (0, 0, 0, 1))
            return blocks
        most = k_cmp.shape[2] * config.compress_stride + config.compress_block_size  # more tokens than the cache has
        kept = blocks[:, :, :0] if self.kept is None or len(self.kept) != len(q) else self.kept
        if kept.shape[2] < most:
            with torch.inference_mode(False):  # so that later passes outside of it can write, too
                self.kept = kept = F.pad(kept, (0, 0, 0, 2 * most - kept.shape[2]))
        kept[torch.arange(len(q), device=q.device)[:, None], :, where.token.long()] = (blocks + 1).transpose(1, 2)
        return blocks


def _choosing(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that choose blocks, for themselves or for others that follow them."""
    check_type("model", model, nn.Module)
    modules = [module for module in model.modules() if _chooses(module)]
    if not modules:
        raise ValueError(f"model: expected layers of NSA with the selected branch, got a {type(model).__name__}")
    if any({*_LayerAttachment.METHODS, *_DropInAttachment.METHODS} & vars(module).keys() for module in modules):
        raise ValueError("model: expected one without a handle that records or replays blocks, got one before remove()")
    return modules


def _chooses(module: nn.Module) -> bool:
    """Return whether a module is a layer of NSA that chooses blocks, or calls the attention that does in its place."""
    if isinstance(module, SparseLayer):
        return "slc" in module.attention().branches and not getattr(module, "follows", False)
    config = getattr(module, "config", None)
    if getattr(config, "_attn_implementation", None) != "flexnsa" or not getattr(module, "is_causal", False):
        return False
    index, kinds = getattr(module, "layer_idx", None), getattr(config, "layer_types", None)
    options = getattr(config, "flexnsa", None) or {}
    if index is None or not {*list(kinds or ())[index : index + 1]} <= {"full_attention", "hybrid"}:
        return False
    return "slc" in options.get("branches", ("slc",))


def _attachment(module: nn.Module, replayed: Tensor | None) -> _Attachment:
    return (_LayerAttachment if isinstance(module, SparseLayer) else _DropInAttachment)(module, replayed)


def _blocks_of(blocks: Tensor, shape: Sequence[int], where: Positions | None, by: NSAConfig) -> Tensor:
    """Return the replayed blocks of tokens, ``(*shape, n)``, given a ``shape`` of ``(B, Hkv, T)``."""
    (batch, heads, count), (rows, _, length, _) = shape, blocks.shape
    if blocks.shape[1::2] != (heads, by.num_selected_blocks):
        expected = f"{by.num_selected_blocks} blocks of {heads} key heads"
        raise ValueError(f"indices: expected {expected}, got a shape {tuple(blocks.shape)}")
    token = torch.arange(count, device=blocks.device)[None] if where is None else where.token - where.start
    token = token.expand(batch, -1)
    if (rows, length) != (batch, count):  # else they are packed as the tokens are, if these are packed
        starts, documents, longest = token == 0, batch, count
        if where is not None:  # there are batch documents or more, which only a CPU counts
            known = may_look(token)
            documents, longest = (int(starts.sum()), int(token.max()) + 1) if known else (max(batch, rows), 0)
        if documents != rows or longest > length + 1:
            expected = f"{documents} documents of up to {longest} tokens"
            raise ValueError(f"indices: expected those of {expected}, got {rows} rows of {length}")
        document = starts.flatten().cumsum(0).view_as(token) - 1
        blocks = F.pad(blocks, (0, 0, 0, 1), value=-1)  # of a token that was drawn last and never read
        blocks = blocks[document.clamp_max(rows - 1), :, token.clamp_max(length)].transpose(1, 2).contiguous()
    if may_look(blocks):
        _check_own_blocks(blocks, token, by)
    return blocks


def _check_own_blocks(blocks: Tensor, token: Tensor, by: NSAConfig) -> None:
    """Check that the blocks of each token ``(B, T)`` end with its own, if that is forced, and never after it."""
    check_block_indices(blocks, config=by, seq_len=token.shape[1])
    last, (own, forced) = blocks.amax(-1), ((token + d)[:, None] // by.select_block_size for d in (0, by.ahead))
    wrong = (last > own) | ((last >= 0) & (last < own) & (forced == own) & (by.num_local_blocks > 0))
    if wrong.any():
        row, head, at = wrong.nonzero()[0].tolist()
        expected = f"blocks of {by.select_block_size} tokens that end with {int(own[row, 0, at])}"
        got = f"{blocks[row, head, at].tolist()} at token {at} of row {row}"
        raise ValueError(f"indices: expected {expected}, got {got}")
