"""An NSA layer in the place of a dense one: its projections, norms and rotary embedding, three times its keys."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from flexnsa.attention.dispatch import choose_implementation
from flexnsa.attention.interface import given
from flexnsa.attention.step import StepInputs
from flexnsa.cache.cache import NSACache
from flexnsa.cache.steps import Step
from flexnsa.config import INDEX_FIELDS
from flexnsa.layers.compression import LinearCompressor, MeanCompressor
from flexnsa.layers.config import check_indexer
from flexnsa.layers.core import Compressors, Heads
from flexnsa.layers.forward import Attention, SparseLayer, WholeStep, run_layer
from flexnsa.layers.gating import gates_of
from flexnsa.layers.indexer import Indexer, PassedIndex, SelectionLoss
from flexnsa.layers.key_indexer import INDEXERS
from flexnsa.layers.layouts import RowLayout, lay_out_cached, lay_out_rows
from flexnsa.layers.presets import GATE_LIMIT, StartingGate, start
from flexnsa.layers.projection import computed_dtype, project, split_heads, weight_of
from flexnsa.layers.step import fits_step, lay_out_step
from flexnsa.masks.user_mods import Mods, SoftCap, cap_of
from flexnsa.transformers.cache import layer_of, take_cache
from flexnsa.transformers.local_layers import layer_type
from flexnsa.transformers.options import LayerOptions
from flexnsa.transformers.padding import Rows
from flexnsa.transformers.rotary import Rotary
from flexnsa.transformers.structure import Parts, copy_module, normed_heads

MADE_FOR = ("branches", "index_rank", "share_index", "rotary", "softcap", *INDEX_FIELDS)
MADE_FOR += ("compress_block_size", "compress_stride")
"""Options that parameters are made for; all others may change at any time."""


class ConvertedAttention(SparseLayer):
    """Native Sparse Attention that replaces a dense layer of transformers.

    Each branch has keys and values of its own, made as the dense layer makes them, biases and norms included. An
    indexer reads queries and the selected branch's keys as they are before rotation. Positions are rotated by the
    model's own rotary embedding, of whatever type, counted from each sequence's first token.

    Args:
        dense: the layer. Its modules become those of the new one; see :class:`flexnsa.transformers.structure.Parts`.
        rotary: the model's rotary embedding, if it has one.
        options: how to attend.
        leader: the ``layer_idx`` of the layer whose index it reads, if not its own.

    Raises:
        ValueError: an option of the indexer does not fit the layer.
    """

    def __init__(self, dense: Any, rotary: nn.Module | None, options: LayerOptions, leader: int | None = None) -> None:
        super().__init__()
        config, parts = dense.config, Parts.of(dense)
        self.config, self.layer_idx, self.options = config, dense.layer_idx, options
        self.leader, self.follows = leader, leader not in (None, dense.layer_idx)
        self.head_dim, self.scaling = parts.head_dim, parts.scale
        self.num_heads, self.num_kv_heads = parts.num_heads, parts.num_kv_heads
        sizes, rank = options.sizes, options.index_rank
        check_indexer(sizes, rank, options.branches, self.num_heads // self.num_kv_heads)
        self.q_proj, self.o_proj = parts.q_proj, parts.o_proj
        self.q_norm, self.k_norm, self.sinks, self.out_gate = parts.q_norm, parts.k_norm, parts.sinks, parts.out_gate
        for tag in options.branches:
            is_dense = tag == ("slc" if "slc" in options.branches else options.branches[0])
            self.add_module(f"k_proj_{tag}", parts.k_proj if is_dense else copy_module(parts.k_proj))
            self.add_module(f"v_proj_{tag}", parts.v_proj if is_dense else copy_module(parts.v_proj))
        dim, shape = config.hidden_size, (self.num_kv_heads, self.head_dim)
        self.compress_k = self.compress_v = None
        if "cmp" in options.branches:
            self.compress_k, self.compress_v = (LinearCompressor(*shape, config=sizes) for _ in "kv")
        elif "slc" in options.branches and sizes.index_heads is None:
            self.compress_k = MeanCompressor(*shape, config=sizes)
        several = len(options.branches) > 1  # else it is the dense layer's own weight
        self.gate = StartingGate(dim, self.num_heads, options.branches) if several else None
        self.rotary_emb = Rotary(rotary, options.rotary_of(dense.layer_idx), layer_type(dense), self.head_dim)
        self.indexer: Indexer | None = None
        if sizes.index_heads is not None and not self.follows:  # last, as in the library's own layer
            self.indexer = INDEXERS[sizes.index_score](dim, *shape, config=sizes, compression="linear", rank=rank)
            self.indexer.order = self.rotary_emb.order
        like = weight_of(dense)
        self.training = dense.training  # its modules keep what each of them has
        for new in (self.compress_k, self.compress_v, self.gate, self.indexer):
            if new is not None:
                start(new)
                new.to(like).train(dense.training)
        if parts.indexer is not None and self.indexer is not None:
            self.indexer._modules.update(parts.indexer)
            if (sizes.index_head_dim or self.head_dim) < (rotated := self.rotary_emb.num_rotated):
                got = sizes.index_head_dim
                raise ValueError(f"index_head_dim: expected the {rotated} dims that are rotated, or more, got {got}")

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,  # noqa: ARG002  (of the tokens alone; blocks are rotated too)
        attention_mask: Tensor | None = None,
        cache: Any = None,
        given_positions: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        new_lengths: Tensor | None = None,
        selection: SelectionLoss | None = None,
        shared_index: Any = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Attend within sequences ``(B, T, dim)``, or from tokens that follow those of a cache; see the dense layer.

        Raises:
            TypeError: ``cache`` is no :class:`FlexNSACache`.
            ValueError: packed sequences come with a cache.
        """
        batch_size, num_tokens = hidden_states.shape[:2]
        layer = None if (cache := take_cache(others, cache)) is None else layer_of(cache, self.layer_idx)
        rows = Rows.of(
            attention_mask,
            given_positions,
            cu_seq_lens_q,
            (batch_size, num_tokens, num_tokens + (0 if layer is None else layer.seen)),
            cached=layer is not None,
            gaps="refuse",
            num_valid=new_lengths,
        )
        x = rows.align(hidden_states, dim=1)
        mods = None if self.options.softcap is None else SoftCap(self.options.softcap), None
        index = (shared_index or {}).get(self.leader, PassedIndex()).get(x) if self.follows else None
        if layer is None:
            packed = given_positions is not None or cu_seq_lens_q is not None  # the model's own positions never restart
            documents = rows.documents if packed else None
            out, chosen = run_layer(self, x, mods=mods, document_ids=documents, selection=selection, index=index)
        else:
            kept = self._kept(x)
            cache = layer.prepare(partial(NSACache, **kept), batch_size, num_tokens)
            cache.require(**kept)
            rows.check_cache(cache.lengths)
            out, chosen = run_layer(self, x, mods=mods, cache=cache, lengths=rows.num_valid, index=index)
            layer.seen += num_tokens
        if shared_index and self.layer_idx in shared_index:
            shared_index[self.layer_idx].index = chosen
        out = out if self.out_gate is None else out * self.out_gate(x).sigmoid()
        return rows.restore(self.o_proj(out), dim=1), None

    def follow(self, options: LayerOptions) -> None:
        """Attend by other options from now on.

        Raises:
            ValueError: the layer's parameters were made for others.
        """
        if not options.is_like(self.options):
            for name in MADE_FOR:
                old, new = (getattr(x if hasattr(x, name) else x.sizes, name) for x in (self.options, options))
                if old != new:
                    raise ValueError(f"config.flexnsa: expected {name}={old}, for which layers were made, got {new}")
            self.options = options

    def attention(self) -> Attention:
        """Describe the layer as it is now; see :class:`flexnsa.layers.forward.SparseLayer`."""
        options = self.options
        return Attention(
            config=options.sizes,
            branches=options.branches,
            compressors=self._compressors(),
            scale=self.scaling,
            impl=options.impl,
            recompute=options.recompute,
            sinks=self.sinks,
        )

    def whole_step(self, x: Tensor, cache: NSACache, mods: Mods) -> WholeStep | None:
        """Return what computes these tokens at once, if kernels can; see :class:`flexnsa.layers.forward.Layer`."""
        take_step = choose_implementation(self.options.impl, x, modded=cap_of(*mods) is None, cached=True).step
        if take_step is None or not self.takes_step(x, cache):
            return None
        factor = 1.0 if self.gate is None else GATE_LIMIT

        def run(lengths: Tensor | None, blocks: Tensor | None) -> tuple[Tensor, Tensor | None]:
            out, chosen = take_step(replace(self.step_inputs(x, cache, lengths, blocks), score_mod=mods[0]))
            return out * factor, chosen

        return run

    def project(self, x: Tensor, *, rows: bool = False) -> Heads:
        """Project to the heads of all branches, or of those of a dense stage, and to their gates."""
        branches = self.dense_branches if rows and self.dense_branches else self.options.branches
        q, *keys = project(x, [self.q_proj, *(self._map("k", tag) for tag in branches)])
        v = project(x, [self._map("v", tag) for tag in branches])
        values = {tag: split_heads(one, self.num_kv_heads) for tag, one in zip(branches, v, strict=True)}
        heads = self.rotary_emb.order(normed_heads(self.q_norm, q, self.num_heads))
        normed = (normed_heads(self.k_norm, one, self.num_kv_heads) for one in keys)
        k = {tag: self.rotary_emb.order(one) for tag, one in zip(branches, normed, strict=True)}
        index = None if self.indexer is None else self.indexer(x, heads, k["slc"])
        return Heads(heads, k, values, self._gates(x), index, signed=self.options.opening < 0)

    def _gates(self, x: Tensor) -> dict[str, Tensor]:
        """Weigh the branches, ``(B, Hq, T)``; a single one has weight 1."""
        if self.gate is None:
            return {}
        gates = gates_of(self.gate(x), self.num_heads, self.options.branches)
        limits = {tag: GATE_LIMIT if tag == "slc" else GATE_LIMIT * self.options.opening for tag in gates}
        return {tag: limits[tag] * gate for tag, gate in gates.items()}

    def row_layout(self, x: Tensor, documents: Tensor | None) -> RowLayout:
        """Lay out whole sequences, or sequences packed with the documents ``(B, S)``."""
        return lay_out_rows(x.shape[1], documents, self.options.sizes, partial(self.rotary_emb, x), x.device)

    def step_layout(self, x: Tensor, step: Step) -> RowLayout:
        """Lay out tokens that follow a cache."""
        return lay_out_cached(step, partial(self.rotary_emb, x))

    def _compressors(self) -> Compressors:
        return Compressors(self.compress_k, self.compress_v, None if self.indexer is None else self.indexer.phi)

    def _map(self, kind: str, tag: str) -> nn.Linear:
        return cast("nn.Linear", self.get_submodule(f"{kind}_proj_{tag}"))

    def _kept(self, x: Tensor) -> dict[str, Any]:
        """Return the sizes of a cache for tokens like these."""
        of_layer = {"num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim, "config": self.options.sizes}
        of_layer |= {"branches": self.options.branches, "follows": self.follows}
        return of_layer | {"dtype": computed_dtype(x), "device": x.device}

    def takes_step(self, x: Tensor, cache: NSACache) -> bool:
        """Return whether kernels that take a whole step rotate heads and weigh scores and branches as this layer."""
        plain = self.sinks is None and self.options.opening == 1
        rotates = self.rotary_emb.step_frequencies(x) is not None
        return plain and rotates and fits_step(x, cache, self._compressors())

    def step_inputs(self, x: Tensor, cache: NSACache, lengths: Tensor | None, blocks: Tensor | None) -> StepInputs:
        """Project new tokens; what a kernel that takes a whole step wants to know."""
        heads, branches = self.project(x), self.options.branches
        frequencies, rope_scale = given(self.rotary_emb.step_frequencies(x))
        open_gates = x.new_full((), 40.0).expand(*x.shape[:2], self.num_heads)  # whose sigmoid is 1
        gates = open_gates if self.gate is None else self.gate(x)

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
            frequencies=frequencies,
            rope_scale=rope_scale,
            block_indices=blocks,
        )
