"""An NSA layer in the place of a dense one: its projections, norms and rotary embedding, three times its keys."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from flexnsa.attention.decoding import StepInputs
from flexnsa.attention.table import choose_implementation
from flexnsa.cache.cache import NSACache
from flexnsa.cache.steps import Step
from flexnsa.config import INDEX_FIELDS
from flexnsa.layers.compression import LinearCompressor, MeanCompressor
from flexnsa.layers.config import check_indexer
from flexnsa.layers.core import Compressors, Heads
from flexnsa.layers.decoding import fits_step, lay_out_step
from flexnsa.layers.forward import Read, WholeStep, attend_branches, run_layer
from flexnsa.layers.gating import in_columns
from flexnsa.layers.indexer import Indexer, SelectionLoss
from flexnsa.layers.layouts import KeySource, RowLayout, lay_out_cached, lay_out_rows
from flexnsa.layers.projection import computed_dtype, project, split_heads
from flexnsa.layers.rope import RopeTables
from flexnsa.masks.user_mods import Mods
from flexnsa.transformers.cache import layer_of
from flexnsa.transformers.marks import Alignment, check_past, read_mask
from flexnsa.transformers.options import LayerOptions
from flexnsa.transformers.packs import demand_no_pack, demand_one_document, document_begins, document_ids
from flexnsa.transformers.starting import GATE_LIMIT, StartingGate

MADE_FOR = ("branches", "index_rank", "compress_block_size", "compress_stride", *INDEX_FIELDS)
"""Options that parameters are made for; all others may change at any time."""
OPEN = 40.0
"""A logit whose sigmoid is 1."""


class ConvertedAttention(nn.Module):
    """Native Sparse Attention that replaces a dense layer of transformers.

    Each branch has keys and values of its own, made as the dense layer makes them, biases and norms included. An
    indexer reads queries and the selected branch's keys as they are before rotation. Positions are rotated by the
    model's own rotary embedding, of whatever type, counted from each sequence's first token.

    Args:
        dense: the layer, of a model like Llama.
        rotary: the model's rotary embedding.
        options: how to attend.

    Raises:
        ValueError: an option of the indexer does not fit the layer.
    """

    def __init__(self, dense: Any, rotary: nn.Module, options: LayerOptions) -> None:
        super().__init__()
        config = dense.config
        self.config, self.layer_idx, self.options = config, dense.layer_idx, options
        self.head_dim, self.scaling = dense.head_dim, dense.scaling
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        sizes, rank = options.sizes, options.index_rank
        check_indexer(sizes, rank, options.branches, self.num_heads // self.num_kv_heads)
        self.q_proj, self.o_proj = dense.q_proj, dense.o_proj
        self.q_norm, self.k_norm = getattr(dense, "q_norm", None), getattr(dense, "k_norm", None)
        for tag in options.branches:
            self.add_module(f"k_proj_{tag}", deepcopy(dense.k_proj))
            self.add_module(f"v_proj_{tag}", deepcopy(dense.v_proj))
        shape = self.num_kv_heads, self.head_dim
        self.compress_k = self.compress_v = None
        if "cmp" in options.branches:
            self.compress_k, self.compress_v = (LinearCompressor(*shape, config=sizes) for _ in "kv")
        elif "slc" in options.branches and sizes.index_heads is None:
            self.compress_k = MeanCompressor(*shape, config=sizes)
        several = len(options.branches) > 1  # else it is the dense layer's own weight
        self.gate = StartingGate(config.hidden_size, self.num_heads, options.branches) if several else None
        self.rotary_emb = deepcopy(rotary)
        self.indexer: Indexer | None = None
        if sizes.index_heads is not None:  # last, as in the library's own layer
            self.indexer = Indexer(config.hidden_size, *shape, config=sizes, compression="linear", rank=rank)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,  # noqa: ARG002  (of the tokens alone; blocks are rotated too)
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        tells_of_packs: bool = True,
        new_lengths: Tensor | None = None,
        selection: SelectionLoss | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Attend within sequences ``(B, T, dim)``, or from tokens that follow those of a cache; see the dense layer.

        Raises:
            TypeError: ``past_key_values`` is no :class:`FlexNSACache`.
            ValueError: packed sequences come with a cache.
        """
        x, num_tokens = hidden_states, hidden_states.shape[1]
        layer = None if past_key_values is None else layer_of(past_key_values, self.layer_idx)
        marks, found = read_mask(attention_mask, len(x), num_tokens + (0 if layer is None else layer.seen))
        found = found if tells_of_packs else None
        position_ids = position_ids if tells_of_packs and found is None else None
        alignment, real = None, new_lengths
        if marks is not None:
            alignment = Alignment.of(marks, num_tokens)
            x, real = alignment.align_queries(x, dim=1), alignment.real
            if position_ids is not None:
                position_ids = alignment.align_queries(position_ids.expand(len(x), -1), dim=1)
        begins = document_begins(position_ids, num_tokens, real, gaps="refuse")
        if layer is None:
            documents = document_ids(begins, cu_seq_lens_q, len(x), num_tokens, found=found, alignment=alignment)
            out = run_layer(self, x, document_ids=documents, selection=selection)
        else:
            demand_no_pack(begins, cu_seq_lens_q)
            cache = layer.prepare(partial(self._new_cache, x), len(x), num_tokens)
            cache.require(**self._kept(x))
            check_past(marks, cache.lengths)
            demand_one_document(position_ids, cache.lengths[:, None], real)
            out = run_layer(self, x, cache=cache, lengths=real)
            layer.seen += num_tokens
        out = self.o_proj(out)
        return (out if alignment is None else alignment.restore_queries(out, dim=1)), None

    def follow(self, options: LayerOptions) -> None:
        """Attend by other options from now on.

        Raises:
            ValueError: the layer's parameters were made for others.
        """
        if options != self.options:
            for name in MADE_FOR:
                has, wanted = (getattr(x if hasattr(x, name) else x.sizes, name) for x in (self.options, options))
                if has != wanted:
                    raise ValueError(f"config.flexnsa: expected {name}={has}, for which layers were made, got {wanted}")
            self.options = options

    def attend(
        self, x: Tensor, heads: Heads, layout: RowLayout, source: KeySource, mods: Mods, *, cached: bool
    ) -> tuple[Tensor, Read]:
        """Attend from projected heads; see :class:`flexnsa.layers.forward.Layer`."""
        return attend_branches(
            x,
            heads,
            layout,
            source,
            mods,
            cached=cached,
            config=self.options.sizes,
            branches=self.options.branches,
            compressors=self._compressors(),
            scale=self.scaling,
            impl=self.options.impl,
            recompute=self.options.recompute,
        )

    def whole_step(self, x: Tensor, cache: NSACache, mods: Mods) -> WholeStep | None:
        """Return what computes these tokens at once, if kernels can; see :class:`flexnsa.layers.forward.Layer`."""
        assert mods == (None, None)
        take_step = choose_implementation(self.options.impl, x, modded=False, cached=True).step
        if take_step is None or not self.takes_step(x, cache):
            return None
        factor = 1.0 if self.gate is None else GATE_LIMIT
        return lambda lengths: take_step(self.step_inputs(x, cache, lengths))[0] * factor

    def project(self, x: Tensor) -> Heads:
        """Project to the heads of all branches, and their gates."""
        branches = self.options.branches
        q, *keys = project(x, [self.q_proj, *(self._map("k", tag) for tag in branches)])
        v = project(x, [self._map("v", tag) for tag in branches])
        values = {tag: split_heads(one, self.num_kv_heads) for tag, one in zip(branches, v, strict=True)}
        heads = self._normed(self.q_norm, q, self.num_heads)
        k = {tag: self._normed(self.k_norm, one, self.num_kv_heads) for tag, one in zip(branches, keys, strict=True)}
        index = None if self.indexer is None else self.indexer(x, heads, k["slc"])
        return Heads(heads, k, values, self._gates(x), index)

    def _normed(self, norm: nn.Module | None, x: Tensor, num_heads: int) -> Tensor:
        heads = split_heads(x, num_heads)
        return heads if norm is None else norm(heads).to(x.dtype)  # under autocast a norm gives float32

    def _gates(self, x: Tensor) -> Tensor:
        """Weigh the branches, ``(B, Hq, T, 3)``; what there is not has 0."""
        branches = self.options.branches
        if self.gate is None:
            each = x.new_ones(()).expand(len(x), self.num_heads, x.shape[1], 1)
        else:
            each = GATE_LIMIT * split_heads(self.gate(x), self.num_heads).sigmoid()
        gates = dict(zip(branches, each.unbind(-1), strict=True))
        return in_columns({tag: gate if tag == "slc" else self.options.opening * gate for tag, gate in gates.items()})

    def row_layout(self, x: Tensor, documents: Tensor | None) -> RowLayout:
        """Lay out whole sequences, or sequences packed with the documents ``(B, S)``."""
        return lay_out_rows(x.shape[1], documents, self.options.sizes, partial(self._rotary_tables, x), x.device)

    def step_layout(self, x: Tensor, step: Step) -> RowLayout:
        """Lay out tokens that follow a cache."""
        return lay_out_cached(step, partial(self._rotary_tables, x))

    def _rotary_tables(self, x: Tensor, *positions: Tensor) -> list[RopeTables]:
        """Tabulate angles as the model would; see :class:`flexnsa.layers.layouts.Rotate`."""
        wide = x.new_empty(0, dtype=torch.promote_types(x.dtype, torch.float32))
        rows = [torch.atleast_2d(each) for each in positions]
        counts = [each.shape[1] for each in rows]
        tables = self.rotary_emb(wide, torch.cat(rows, dim=1))
        halves = (table[:, None, :, : self.head_dim // 2] for table in tables)  # the other half repeats it
        return [RopeTables(*pair) for pair in zip(*(half.split(counts, dim=2) for half in halves), strict=True)]

    def _compressors(self) -> Compressors:
        return Compressors(self.compress_k, self.compress_v, None if self.indexer is None else self.indexer.phi)

    def _map(self, kind: str, tag: str) -> nn.Linear:
        return cast("nn.Linear", self.get_submodule(f"{kind}_proj_{tag}"))

    def _kept(self, x: Tensor) -> dict[str, Any]:
        """Return the sizes of a cache for tokens like these."""
        return {
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "config": self.options.sizes,
            "branches": self.options.branches,
            "dtype": computed_dtype(x),
            "device": x.device,
        }

    def _new_cache(self, x: Tensor, batch_size: int, max_seq_len: int, max_rewind: int) -> NSACache:
        return NSACache(batch_size, max_seq_len, max_rewind=max_rewind, **self._kept(x))

    def takes_step(self, x: Tensor, cache: NSACache) -> bool:
        """Return whether kernels that take a whole step rotate heads and weigh branches as this model does."""
        rotary: Any = self.rotary_emb
        rotates = not looks_at_positions(rotary) and rotary.inv_freq.numel() == self.head_dim // 2
        return rotates and self.options.opening == 1 and fits_step(x, cache, self._compressors())

    def step_inputs(self, x: Tensor, cache: NSACache, lengths: Tensor | None) -> StepInputs:
        """Project new tokens; what a kernel that takes a whole step wants to know."""
        heads, branches, rotary = self.project(x), self.options.branches, cast("Any", self.rotary_emb)
        gates = x.new_full((), OPEN).expand(*x.shape[:2], self.num_heads) if self.gate is None else self.gate(x)

        def flat(each: Tensor) -> Tensor:
            return each.transpose(1, 2).flatten(2)

        return lay_out_step(
            cache,
            lengths,
            self._compressors(),
            q=flat(heads.q),
            k={tag: flat(heads.k[tag]) for tag in branches},
            v={tag: flat(heads.v[tag]) for tag in branches},
            gates=gates,
            gate="sigmoid",
            index=heads.index,
            num_heads=self.num_heads,
            scale=self.scaling,
            frequencies=rotary.inv_freq,
            rope_scale=rotary.attention_scaling,
        )


def looks_at_positions(module: nn.Module) -> bool:
    """Return whether angles of a rotary embedding depend on the largest position, for which it synchronizes."""
    kind = getattr(module, "rope_type", "")
    return "dynamic" in kind or kind == "longrope"
