"""The attention layer: projections, compressors and gates around :mod:`flexnsa.layers.core`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Self, cast

import torch
from torch import Tensor, nn

from flexnsa.attention.dispatch import choose_implementation
from flexnsa.attention.step import StepInputs
from flexnsa.cache.cache import NSACache
from flexnsa.cache.steps import Step
from flexnsa.checks.calls import check_branches, check_document_ids, check_recompute
from flexnsa.config import BRANCHES, NSAConfig
from flexnsa.layers.compression import COMPRESSORS, MeanCompressor
from flexnsa.layers.config import LayerConfig
from flexnsa.layers.core import Compressors, Heads
from flexnsa.layers.forward import Attention, LossOverRanks, SparseLayer, WholeStep, check_call, run_layer
from flexnsa.layers.gating import Gate
from flexnsa.layers.indexer import Indexer, SelectionLoss, SharedIndex, check_index, check_selection
from flexnsa.layers.key_indexer import INDEXERS
from flexnsa.layers.layouts import LayoutSizes, RowLayout, check_layout, row_layout, step_layout
from flexnsa.layers.presets import describe_layer
from flexnsa.layers.projection import computed_dtype, project_few, project_named, split_heads, weight_of
from flexnsa.layers.step import lay_out_step, takes_step
from flexnsa.masks.user_mods import MaskMod, Mods, ScoreMod, cap_of
from flexnsa.primitives import check_layer_input, check_lengths, check_positive_int, check_type


class NativeSparseAttention(SparseLayer):
    """Causal self-attention layer (NSA paper, section 3): ``(B, S, dim)`` to ``(B, S, dim)``.

    Each branch has keys and values of its own, unless two share their keys. RoPE rotates q, k_slc and k_win by the
    position of their token; k_cmp is compressed first and rotated by the position of its block's first token. Only the
    branches asked for have parameters. An indexer scores the blocks if ``config`` has one, else the compressed branch.
    Without either, blocks are scored by the mean of the selected branch's own keys.

    The arguments are the fields of :class:`flexnsa.layers.config.LayerConfig`, which explains each; ``config`` is its
    ``nsa``, the sizes of the branches. Those that are None come from a preset: ``text``, what learned text best
    (docs/learning.md), which has an indexer; or ``paper``, the default where ``config`` is given. So ``config``
    alone changes gates, RoPE, compressors and the indexer too: with sizes of your own, say which ``preset`` you mean.
    A layer that ``follows`` another has no indexer: it attends to the blocks that the other one chose, and teaches its
    indexer.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: an argument does not fit the others; the message names it.
    """

    cache_class = NSACache

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        config: NSAConfig | None = None,
        compression: str = "mlp",
        gate: str | None = None,
        rope_base: float | None = None,
        shared_keys: bool | None = None,
        begin_as_mean: bool | None = None,
        branches: Sequence[str] = BRANCHES,
        impl: str = "auto",
        recompute: Sequence[str] = (),
        index_rank: int | None = None,
        preset: str | None = None,
        follows: bool = False,
    ) -> None:
        super().__init__()
        if config is not None:
            check_type("config", config, NSAConfig)
        branches = check_branches(branches)
        options = {
            "v_head_dim": v_head_dim,
            "nsa": config,
            "compression": compression,
            "gate": gate,
            "rope_base": rope_base,
            "shared_keys": shared_keys,
            "begin_as_mean": begin_as_mean,
            "impl": impl,
            "recompute": check_recompute(recompute, branches),
            "index_rank": index_rank,
        }
        built_from = describe_layer(preset, dim, num_heads, num_kv_heads, head_dim, branches, options)
        self._built_from = built_from
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.dim, self.num_heads, self.num_kv_heads = dim, num_heads, num_kv_heads
        self.head_dim, self.v_head_dim = head_dim, v_head_dim
        self.config = config = built_from.nsa
        self.branches, self.impl, self.rope_base = branches, impl, built_from.rope_base
        self.shared_keys, self.recompute = built_from.shared_keys, built_from.recompute
        check_type("follows", follows, bool)
        if follows and config.index_heads is None:
            raise ValueError("follows: expected False without an indexer (index_heads of the config), got True")
        self.follows = follows
        self.lay_out = row_layout  # another one where ranks share the tokens of a row
        self.losses_over: tuple[LossOverRanks, ...] = ()  # groups of ranks that share its heads or tokens

        self.w_q = nn.Linear(dim, num_heads * head_dim, bias=False)
        for tag in self.branches:
            if not (self.shared_keys and tag == "cmp"):
                self.add_module(f"w_k_{tag}", nn.Linear(dim, num_kv_heads * head_dim, bias=False))
            self.add_module(f"w_v_{tag}", nn.Linear(dim, num_kv_heads * v_head_dim, bias=False))
        if "cmp" in self.branches:
            self.phi_k = COMPRESSORS[compression](num_kv_heads, head_dim, config=config)
            self.phi_v = COMPRESSORS[compression](num_kv_heads, v_head_dim, config=config)
            if built_from.begin_as_mean:
                self.phi_k.begin_as_mean()
                self.phi_v.begin_as_mean()
        elif "slc" in self.branches and config.index_heads is None:
            self.phi_k = MeanCompressor(num_kv_heads, head_dim, config=config)
        self.gate = Gate(dim, num_heads, self.branches, kind=built_from.gate)
        self.w_o = nn.Linear(num_heads * v_head_dim, dim, bias=False)
        self.indexer: Indexer | None = None
        if config.index_heads is not None and not follows:  # last: what is drawn before does not depend on it
            self.indexer = INDEXERS[config.index_score](
                dim, num_kv_heads, head_dim, config=config, compression=compression, rank=index_rank
            )

    @classmethod
    def of(cls, config: LayerConfig, *, follows: bool = False) -> Self:
        """Build the layer that a config describes; one of a class with more fields, such as a model's, will do.

        Raises:
            TypeError: ``config`` is not a :class:`LayerConfig`.
        """
        check_type("config", config, LayerConfig)
        arguments = {field.name: getattr(config, field.name) for field in fields(LayerConfig)}
        arguments["config"] = arguments.pop("nsa")
        return cls(**arguments, follows=follows)

    @property
    def layer_config(self) -> LayerConfig:
        """Description of the layer as it is now: ``impl``, ``config`` and the numbers of heads can be set."""
        now = {field.name: vars(self)[field.name] for field in fields(LayerConfig) if field.name in vars(self)}
        return replace(self._built_from, nsa=self.config, **now)

    def reset_parameters(self) -> None:
        """Draw all parameters anew, as after construction; also after ``to_empty`` from the meta device."""
        for child in self.children():
            child.reset_parameters()  # pyright: ignore[reportCallIssue]

    def forward(
        self,
        x: Tensor,
        *,
        document_ids: Tensor | None = None,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
        cache: NSACache | None = None,
        lengths: Tensor | None = None,
        layout: RowLayout | None = None,
        selection: SelectionLoss | None = None,
        index: SharedIndex | None = None,
        return_index: bool = False,
    ) -> Tensor | tuple[Tensor, SharedIndex | None]:
        """Attend within each sequence of ``x (B, S, dim)``, or within each document of packed sequences.

        Args:
            x: whole sequences; with a cache, the tokens that follow those in the cache, any number of them.
            document_ids: as in :func:`flexnsa.native_sparse_attention`; rotary positions restart with each document.
                With an empty cache, document ``b`` of ``x (1, S, dim)`` goes into row ``b``, one for each row. Ids
                may skip numbers: with ids 0 and 2, row 1 stays empty.
            score_mod: as in :func:`flexnsa.native_sparse_attention`.
            mask_mod: as in :func:`flexnsa.native_sparse_attention`.
            cache: of :meth:`new_cache`; it then holds x as well. Needs ``torch.no_grad()``.
            lengths: int ``(B,)``, with a cache only: the first ``lengths[b]`` tokens of row ``b`` are real, the others
                padding that the cache forgets and whose output means nothing.
            layout: of :meth:`layout`, in place of ``document_ids``: made once for the layers of a model.
            selection: gets the loss that teaches an indexer, in training; see :class:`flexnsa.SelectionLoss`.
            index: what the layer that this one ``follows`` returned for the same tokens, in training with the same
                selection loss.
            return_index: return a pair: the output, and the ``index`` for layers that follow this one.

        Raises:
            TypeError: an argument is not of its kind.
            ValueError: an argument does not fit the others; the message names it. The cache is then as it was.
        """
        check_layer_input(x, self.dim, weight_of(self))
        if layout is not None:
            check_type("layout", layout, RowLayout)
            check_layout(layout, x, document_ids, self.layout_sizes)
        check_call(self, x, NSACache, document_ids=document_ids, layout=layout, cache=cache, lengths=lengths)
        if selection is not None:
            check_selection(selection, self.follows or self.indexer is not None)
        check_index(self, x, index, taught=selection is not None and cache is None, returned=return_index)
        out, shared = run_layer(
            self,
            x,
            mods=(score_mod, mask_mod),
            document_ids=document_ids,
            layout=layout,
            cache=cache,
            lengths=lengths,
            selection=selection,
            losses_over=self.losses_over,
            index=index,
        )
        return (self.w_o(out), shared) if return_index else self.w_o(out)

    def new_cache(
        self, batch_size: int, max_seq_len: int, *, max_rewind: int = 1, dtype: torch.dtype | None = None
    ) -> NSACache:
        """Make an empty cache, by default in the dtype of its keys: that of the weights, or the one of autocast."""
        weight = weight_of(self)
        return NSACache(
            batch_size,
            max_seq_len,
            self.num_kv_heads,
            self.head_dim,
            v_head_dim=self.v_head_dim,
            config=self.config,
            branches=self.branches,
            follows=self.follows,
            max_rewind=max_rewind,
            rope_base=self.rope_base,
            dtype=computed_dtype(weight) if dtype is None else dtype,
            device=weight.device,
        )

    def step_inputs(
        self, x: Tensor, cache: NSACache, lengths: Tensor | None = None, block_indices: Tensor | None = None
    ) -> StepInputs:
        """Project new tokens, and return the arguments of a kernel that computes the whole step."""
        if lengths is not None:
            check_lengths(lengths, x)
        maps = self._maps(self.branches)
        rows = dict(zip(maps, project_few(x, list(maps.values())), strict=True))
        index = None
        if self.indexer is not None:
            heads = split_heads(rows["q"], self.num_heads), split_heads(rows["k_slc"], self.num_kv_heads)
            index = self.indexer.changed(project_few(x, self.indexer.maps), *heads)
        return lay_out_step(
            cache,
            lengths,
            self._compressors(),
            q=rows["q"],
            k={tag: rows[f"k_{tag}"] for tag in self.branches},
            v={tag: rows[f"v_{tag}"] for tag in self.branches},
            gates=rows["gate"],
            gate=self.gate.kind,
            index=index,
            num_heads=self.num_heads,
            scale=self.head_dim**-0.5,
            rope_base=self.rope_base,
            block_indices=block_indices,
        )

    @property
    def layout_sizes(self) -> LayoutSizes:
        """What layers must have in common to share a :meth:`layout`."""
        return LayoutSizes.of(weight_of(self), self.head_dim, self.rope_base, self.config)

    def layout(self, seq_len: int, document_ids: Tensor | None = None) -> RowLayout:
        """Lay out rows of ``seq_len`` tokens for :meth:`forward`; layers with the same ``layout_sizes`` can share one.

        Args:
            seq_len: ``S``.
            document_ids: as in :meth:`forward`.

        Raises:
            TypeError: ``seq_len`` is no int, or ``document_ids`` no tensor.
            ValueError: one is out of range; ``document_ids`` are of another shape or dtype, or decrease.
        """
        check_positive_int("seq_len", seq_len)
        if document_ids is not None:
            check_document_ids(document_ids, "B", seq_len, like=weight_of(self))
        return self.lay_out(seq_len, document_ids, self.layout_sizes)

    def row_layout(self, x: Tensor, document_ids: Tensor | None) -> RowLayout:
        """Lay out whole sequences; see :class:`flexnsa.layers.forward.Layer`."""
        return self.lay_out(x.shape[1], document_ids, self.layout_sizes)

    def step_layout(self, x: Tensor, step: Step) -> RowLayout:
        """Lay out tokens that follow a cache."""
        return step_layout(step, head_dim=self.head_dim, rope_base=self.rope_base, dtype=x.dtype)

    def project(self, x: Tensor, *, rows: bool = False) -> Heads:
        """Project to the heads of all branches, or of those of a dense stage, and to their gates."""
        branches = self.dense_branches if rows and self.dense_branches else self.branches
        projected = project_named(x, self._maps(branches))
        q = split_heads(projected["q"], self.num_heads)
        k, v = ({tag: split_heads(projected[f"{kind}_{tag}"], self.num_kv_heads) for tag in branches} for kind in "kv")
        if self.shared_keys and "cmp" in k:
            # A graph that ends before a mod in sdpa returns both. Of two views of a product, PyTorch would write freed
            # memory into its cache on disk (tests/compatibility/inductor_faults.py).
            k["cmp"] = k["slc"]
        index = None if self.indexer is None else self.indexer(x, q, k["slc"])
        return Heads(q, k, v, self.gate(x, projected["gate"]), index)

    def attention(self) -> Attention:
        """Describe the layer as it is now; see :class:`flexnsa.layers.forward.SparseLayer`."""
        return Attention(
            config=self.config,
            branches=self.branches,
            compressors=self._compressors(),
            scale=self.head_dim**-0.5,
            impl=self.impl,
            recompute=self.recompute,
            check_parameters=True,
        )

    def whole_step(self, x: Tensor, cache: NSACache, mods: Mods) -> WholeStep | None:
        """Return what computes these tokens at once, if kernels can; see :class:`flexnsa.layers.forward.Layer`."""
        implementation = choose_implementation(self.impl, x, modded=cap_of(*mods) is None, cached=True)
        implementation.check(x=x)
        take_step = implementation.step
        if take_step is None or cap_of(*mods) is None:
            return None
        if not takes_step(x, cache, self._maps(self.branches).values(), self.gate, self._compressors(), self.indexer):
            return None
        mod, _ = mods
        return lambda lengths, blocks: take_step(replace(self.step_inputs(x, cache, lengths, blocks), score_mod=mod))

    def _compressors(self) -> Compressors:
        index = None if self.indexer is None else self.indexer.phi
        return Compressors(getattr(self, "phi_k", None), getattr(self, "phi_v", None), index)

    def _maps(self, branches: Sequence[str]) -> dict[str, nn.Linear]:
        """Name the maps of the input; one may have two names."""
        kinds = [f"{kind}_{tag}" for kind in "kv" for tag in branches]
        owners = {} if hasattr(self, "w_k_cmp") else {"k_cmp": "k_slc"}
        maps = {name: cast("nn.Linear", self.get_submodule(f"w_{owners.get(name, name)}")) for name in ("q", *kinds)}
        return maps | {"gate": self.gate.linear}  # last, because its columns are of no round number
