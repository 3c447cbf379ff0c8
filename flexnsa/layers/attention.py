"""The attention layer: projections, compressors and gates around :mod:`flexnsa.layers.core`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from flexnsa.argument_checks import check_branches, check_document_ids, check_option, check_recompute
from flexnsa.attention.decoding import StepInputs
from flexnsa.attention.implementations import IMPLEMENTATIONS, choose_implementation, prepare_mods
from flexnsa.attention.seam import Call, Implementation
from flexnsa.config import NSAConfig
from flexnsa.decoding.cache import NSACache
from flexnsa.decoding.cached_keys import CachedKeys, KeptKeys
from flexnsa.geometry import BRANCHES
from flexnsa.layers.compression import COMPRESSORS, MeanCompressor
from flexnsa.layers.core import Compressors, Heads, RowKeys, RowLayout, attend_heads, row_layout, step_layout
from flexnsa.layers.decoding import check_cache, step_inputs, takes_step
from flexnsa.layers.gating import Gate, in_columns
from flexnsa.layers.projection import project, split_heads, weight_of
from flexnsa.masks.user_mods import MaskMod, Mods, ScoreMod
from flexnsa.validation import (
    check_choice,
    check_heads,
    check_layer_input,
    check_positive_int,
    check_positive_number,
    check_type,
    describe,
)


class NativeSparseAttention(nn.Module):
    """Causal self-attention layer (NSA paper, section 3): ``(B, S, dim)`` to ``(B, S, dim)``.

    Each branch has keys and values of its own, if the keys of two are not shared. q, k_slc and k_win are turned at
    their token's position; k_cmp is compressed first and turned at the position of its block's first token. Only the
    branches asked for have parameters. Without the compressed branch nothing would train its keys, so blocks are then
    scored by the mean of the selected branch's own keys.

    Args:
        dim: width of the input.
        num_heads: query heads ``Hq``.
        num_kv_heads: key/value heads ``Hkv``; divides ``num_heads``.
        head_dim: ``Dk`` of queries and keys; even, because RoPE turns pairs.
        v_head_dim: ``Dv``, by default ``head_dim``.
        config: sizes of the branches.
        compression: ``"mean"``, ``"linear"`` or ``"mlp"``.
        gate: ``"sigmoid"`` or ``"softmax"``.
        rope_base: base of the rotary frequencies; text of 8k is learned better with 1e8 (docs/language.md).
        shared_keys: the compressed branch compresses the selected one's keys, rather than keys of its own.
        begin_as_mean: compressors begin as the mean of a block, and learn from there.
        branches: any of ``cmp``, ``slc``, ``win``.
        impl: as in :func:`flexnsa.native_sparse_attention`.
        recompute: as in :func:`flexnsa.native_sparse_attention`; no number depends on it.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: an argument does not fit the others; the message names it.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        config: NSAConfig = NSAConfig(),  # noqa: B008  (frozen)
        compression: str = "mlp",
        gate: str = "sigmoid",
        rope_base: float = 10_000.0,
        shared_keys: bool = False,
        begin_as_mean: bool = False,
        branches: Sequence[str] = BRANCHES,
        impl: str = "auto",
        recompute: Sequence[str] = (),
    ) -> None:
        super().__init__()
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        check_positive_int("dim", dim)
        check_heads(num_heads, num_kv_heads, head_dim, v_head_dim)
        check_type("config", config, NSAConfig)
        check_choice("compression", compression, tuple(COMPRESSORS))
        check_choice("impl", impl, ("auto", *IMPLEMENTATIONS))
        check_positive_number("rope_base", rope_base)
        self.dim = dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.v_head_dim = v_head_dim
        self.config = config
        self.rope_base = rope_base
        self.branches = check_branches(branches)
        self.shared_keys = check_option("shared_keys", shared_keys, ("cmp", "slc"), self.branches)
        check_option("begin_as_mean", begin_as_mean, ("cmp",), self.branches)
        self.recompute = check_recompute(recompute, self.branches)
        self.impl = impl
        self.lay_out = row_layout  # another one where ranks share the tokens of a row

        self.w_q = nn.Linear(dim, num_heads * head_dim, bias=False)
        for tag in self.branches:
            if not (shared_keys and tag == "cmp"):
                self.add_module(f"w_k_{tag}", nn.Linear(dim, num_kv_heads * head_dim, bias=False))
            self.add_module(f"w_v_{tag}", nn.Linear(dim, num_kv_heads * v_head_dim, bias=False))
        if "cmp" in self.branches:
            self.phi_k = COMPRESSORS[compression](num_kv_heads, head_dim, config=config)
            self.phi_v = COMPRESSORS[compression](num_kv_heads, v_head_dim, config=config)
            if begin_as_mean:
                self.phi_k.begin_as_mean()
                self.phi_v.begin_as_mean()
        elif "slc" in self.branches:
            self.phi_k = MeanCompressor(num_kv_heads, head_dim, config=config)
        self.gate = Gate(dim, num_heads, len(self.branches), kind=gate)
        self.w_o = nn.Linear(num_heads * v_head_dim, dim, bias=False)

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
    ) -> Tensor:
        """Attend within each sequence of ``x (B, S, dim)``, or within each document of packed sequences.

        Args:
            x: whole sequences; with a cache, the tokens that follow those in the cache, any number of them.
            document_ids: as in :func:`flexnsa.native_sparse_attention`; rotary positions restart with each document.
                With an empty cache, document ``b`` of ``x (1, S, dim)`` goes into row ``b``, one for each row.
            score_mod: as in :func:`flexnsa.native_sparse_attention`.
            mask_mod: as in :func:`flexnsa.native_sparse_attention`.
            cache: of :meth:`new_cache`; it then holds x as well. Needs ``torch.no_grad()``.
            lengths: int ``(B,)``, with a cache only: the first ``lengths[b]`` tokens of row ``b`` are real, the others
                padding that the cache forgets and whose output means nothing.
            layout: of :meth:`layout`, in place of ``document_ids``: made once for the layers of a model.

        Raises:
            TypeError: an argument is not of its kind.
            ValueError: an argument does not fit the others; the message names it. The cache is then as it was.
        """
        check_layer_input(x, self.dim, weight_of(self))
        if layout is not None:
            check_type("layout", layout, RowLayout)
            layout.require(x, document_ids, head_dim=self.head_dim, cached=cache is not None)
        mods = score_mod, mask_mod
        packed = document_ids is not None or (layout is not None and layout.positions is not None)
        if cache is not None:
            check_cache(self, x, cache, packed=packed, lengths=lengths)
        elif lengths is not None:
            raise ValueError(f"lengths: expected None without a cache, got {describe(lengths)}")
        if cache is not None and not (packed or cache.takes_rows(x.shape[1])):
            out = self._attend_step(x, mods, cache, lengths)
            return self.w_o(out.transpose(1, 2).flatten(2))
        if layout is None:
            if document_ids is not None:
                check_document_ids(document_ids, *x.shape[:2], like=x)
            layout = self.layout(x.shape[1], document_ids)
        out = self._attend_row(x, layout, mods) if cache is None else self._prefill(x, layout, mods, cache, lengths)
        return self.w_o(out.transpose(1, 2).flatten(2))

    def new_cache(
        self, batch_size: int, max_seq_len: int, *, max_rewind: int = 1, dtype: torch.dtype | None = None
    ) -> NSACache:
        """Make an empty cache for this layer, by default in the dtype of its weights; see :class:`flexnsa.NSACache`."""
        weight = weight_of(self)
        return NSACache(
            batch_size,
            max_seq_len,
            self.num_kv_heads,
            self.head_dim,
            v_head_dim=self.v_head_dim,
            config=self.config,
            branches=self.branches,
            max_rewind=max_rewind,
            dtype=weight.dtype if dtype is None else dtype,
            device=weight.device,
        )

    def step_inputs(self, x: Tensor, cache: NSACache, lengths: Tensor | None = None) -> StepInputs:
        """Project new tokens; what a kernel that takes a whole step wants to know."""
        return step_inputs(x, cache, lengths, self._maps(), self.gate, self._compressors(), rope_base=self.rope_base)

    def layout(self, seq_len: int, document_ids: Tensor | None = None) -> RowLayout:
        """Lay out rows of ``seq_len`` tokens for :meth:`forward`; layers of the same sizes can share one.

        Args:
            seq_len: ``S``.
            document_ids: as in :meth:`forward`.

        Raises:
            TypeError: ``document_ids`` is no tensor.
            ValueError: it is of another shape or dtype, or decreases.
        """
        weight = weight_of(self)
        if document_ids is not None:
            check_document_ids(document_ids, "B", seq_len, like=weight)
        return self.lay_out(
            seq_len,
            document_ids,
            config=self.config,
            head_dim=self.head_dim,
            rope_base=self.rope_base,
            dtype=torch.promote_types(weight.dtype, torch.float32),
            device=weight.device,
        )

    def _attend_row(self, x: Tensor, layout: RowLayout, mods: Mods) -> Tensor:
        """Attend within whole rows; the heads' outputs ``(B, Hq, S, Dv)``."""
        implementation, call = self._row_call(x, layout, mods)
        shared = layout.source or RowKeys(), implementation, call, self.branches, self.recompute
        return attend_heads(self._project(x), layout, self._compressors(), *shared)[0]

    def _prefill(self, x: Tensor, layout: RowLayout, mods: Mods, cache: NSACache, lengths: Tensor | None) -> Tensor:
        """Attend within whole rows and put them into an empty cache; the heads' outputs ``(B, Hq, S, Dv)``."""
        implementation, call = self._row_call(x, layout, mods)
        step = cache.begin_rows(x.shape[1], lengths, layout.positions, layout.first_tokens)
        heads, compressors = self._project(x), self._compressors()
        cache.require(dtype=heads.q.dtype)
        kept = KeptKeys(cache, step)
        out, keys, aux = attend_heads(heads, layout, compressors, kept, implementation, call, self.branches)
        if cache.reads is not None:
            call = replace(call, positions=step.positions, window_positions=step.positions)
            cache.reads.record(keys, call, aux.block_indices)
        cache.end(step)
        return out

    def _row_call(self, x: Tensor, layout: RowLayout, mods: Mods) -> tuple[Implementation, Call]:
        """Choose who attends within whole rows, and say what its branches share."""
        implementation = choose_implementation(self.impl, x, modded=mods != (None, None))
        if not torch.compiler.is_compiling():
            implementation.check(x=x, **dict(self.named_parameters()))
        mod = prepare_mods(*mods, x, self.num_heads, implementation)
        return implementation, Call(self.config, self.head_dim**-0.5, mod, layout.positions, layout.window_positions)

    def _attend_step(self, x: Tensor, mods: Mods, cache: NSACache, lengths: Tensor | None) -> Tensor:
        """Put tokens into the cache and attend from them to all of it; the heads' outputs ``(B, Hq, T, Dv)``."""
        modded = mods != (None, None)
        implementation = choose_implementation(self.impl, x, modded=modded, cached=True)
        implementation.check(x=x)
        take_step = None if modded else implementation.step
        if take_step is not None and takes_step(x, cache, self._maps().values(), self.gate, self._compressors()):
            cache.make_room(x.shape[1], lengths)
            out, _ = take_step(self.step_inputs(x, cache, lengths))
            return split_heads(out, self.num_heads)
        mod = prepare_mods(*mods, x, self.num_heads, implementation)
        step = cache.begin(x.shape[1], lengths, ordered=mod is not None)
        heads, compressors = self._project(x), self._compressors()
        cache.require(dtype=heads.q.dtype)
        layout = step_layout(step, config=self.config, head_dim=self.head_dim, rope_base=self.rope_base, dtype=x.dtype)
        call = Call(self.config, self.head_dim**-0.5, mod, step.positions, step.window_positions)
        source = CachedKeys(cache, step)
        out, keys, aux = attend_heads(heads, layout, compressors, source, implementation, call, self.branches)
        if cache.reads is not None:
            cache.reads.record(keys, call, aux.block_indices)
        cache.end(step)
        return out.masked_fill(step.lost[:, None, :, None], torch.nan)

    def _compressors(self) -> Compressors:
        return Compressors(getattr(self, "phi_k", None), getattr(self, "phi_v", None))

    def _project(self, x: Tensor) -> Heads:
        """Project to the heads of all branches, and their gates."""
        maps = self._maps()
        # These values are kept for backward as they are. All else is turned, compressed or squashed first, and in one
        # product with them would be kept too.
        kept = [name for name in maps if name in ("v_slc", "v_win")]
        projected: dict[str, Tensor] = {}
        for names in filter(None, ([name for name in maps if name not in kept], kept)):
            projected |= zip(names, project(x, [maps[name] for name in names]), strict=True)
        q, gates = split_heads(projected["q"], self.num_heads), self.gate(x, projected["gate"]).unbind(-1)
        k, v = (
            {tag: split_heads(projected[f"{kind}_{tag}"], self.num_kv_heads) for tag in self.branches} for kind in "kv"
        )
        return Heads(q, k, v, in_columns(dict(zip(self.branches, gates, strict=True))))

    def _maps(self) -> dict[str, nn.Linear]:
        """Name the maps of the input; one may have two names."""
        kinds = [f"{kind}_{tag}" for kind in "kv" for tag in self.branches]
        owners = {} if hasattr(self, "w_k_cmp") else {"k_cmp": "k_slc"}
        maps = {name: cast("nn.Linear", self.get_submodule(f"w_{owners.get(name, name)}")) for name in ("q", *kinds)}
        return maps | {"gate": self.gate.linear}  # last, because its columns are of no round number
