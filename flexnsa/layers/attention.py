"""The attention layer: projections, compression, gates and rotary embedding around :mod:`flexnsa.functional`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flexnsa.attention.flex import branches as flex
from flexnsa.attention.flex.kernels import check_inputs
from flexnsa.config import NSAConfig
from flexnsa.decoding.cache import NSACache
from flexnsa.decoding.steps import Step
from flexnsa.functional import IMPLEMENTATIONS, attend, implementation, native_sparse_attention, prepare_mods
from flexnsa.geometry import BRANCHES, num_compressed
from flexnsa.layers.compression import COMPRESSORS, MeanCompressor
from flexnsa.layers.gating import Gate
from flexnsa.layers.rope import rotate, rotation, turn
from flexnsa.masks.document import check_document_ids, document_positions, first_tokens
from flexnsa.masks.intervals import MaskMod
from flexnsa.masks.user_mods import ScoreMod
from flexnsa.validation import (
    check_choice,
    check_heads,
    check_layer_input,
    check_positive_int,
    check_positive_number,
    check_type,
    describe,
)
from flexnsa.validation_of_arguments import check_branches


class NativeSparseAttention(nn.Module):
    """Causal self-attention layer (NSA paper, section 3): ``(B, S, dim)`` to ``(B, S, dim)``.

    Each branch has keys and values of its own. q, k_slc and k_win are turned at their token's position; k_cmp is
    compressed first and turned at the position of its block's first token. Only the branches asked for have
    parameters. Without the compressed branch nothing would train its keys, so blocks are then scored by the mean of
    the selected branch's own keys.

    Args:
        dim: width of the input.
        num_heads: query heads ``Hq``.
        num_kv_heads: key/value heads ``Hkv``; divides ``num_heads``.
        head_dim: ``Dk`` of queries and keys; even, because RoPE turns pairs.
        v_head_dim: ``Dv``, by default ``head_dim``.
        config: sizes of the branches.
        compression: ``"mean"``, ``"linear"`` or ``"mlp"``.
        gate: ``"sigmoid"`` or ``"softmax"``.
        rope_base: base of the rotary frequencies.
        branches: any of ``cmp``, ``slc``, ``win``.
        impl: as in :func:`flexnsa.native_sparse_attention`.

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
        branches: Sequence[str] = BRANCHES,
        impl: str = "auto",
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
        self.impl = impl

        self.w_q = nn.Linear(dim, num_heads * head_dim, bias=False)
        for tag in self.branches:
            self.add_module(f"w_k_{tag}", nn.Linear(dim, num_kv_heads * head_dim, bias=False))
            self.add_module(f"w_v_{tag}", nn.Linear(dim, num_kv_heads * v_head_dim, bias=False))
        if "cmp" in self.branches:
            self.phi_k = COMPRESSORS[compression](num_kv_heads, head_dim, config=config)
            self.phi_v = COMPRESSORS[compression](num_kv_heads, v_head_dim, config=config)
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
    ) -> Tensor:
        """Attend within each sequence of ``x (B, S, dim)``, or within each document of packed sequences.

        Args:
            x: whole sequences; with a cache, the tokens that follow those in the cache, any number of them.
            document_ids: as in :func:`flexnsa.native_sparse_attention`; rotary positions restart with each document.
            score_mod: as in :func:`flexnsa.native_sparse_attention`.
            mask_mod: as in :func:`flexnsa.native_sparse_attention`.
            cache: of :meth:`new_cache`; it then holds x as well. Needs ``torch.no_grad()``.
            lengths: int ``(B,)``, with a cache only: the first ``lengths[b]`` tokens of row ``b`` are real, the others
                padding that the cache forgets and whose output means nothing.

        Raises:
            TypeError: an argument is not of its kind.
            ValueError: an argument does not fit the others; the message names it. The cache is then as it was.
        """
        check_layer_input(x, self.w_q.weight)
        if cache is None:
            if lengths is not None:
                raise ValueError(f"lengths: expected None without a cache, got {describe(lengths)}")
            out = self._attend_whole(x, document_ids, score_mod, mask_mod)
        else:
            self._check_cache(x, cache, document_ids)
            out = self._attend_next(x, cache, lengths, score_mod, mask_mod)
        return self.w_o(out.transpose(1, 2).flatten(2))

    def new_cache(
        self, batch_size: int, max_seq_len: int, *, max_rewind: int = 1, dtype: torch.dtype | None = None
    ) -> NSACache:
        """Make an empty cache for this layer, by default in the dtype of its weights; see :class:`flexnsa.NSACache`."""
        weight = self.w_q.weight
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

    def _attend_whole(
        self, x: Tensor, document_ids: Tensor | None, score_mod: ScoreMod | None, mask_mod: MaskMod | None
    ) -> Tensor:
        """Attend within whole sequences; the heads' outputs ``(B, Hq, S, Dv)``."""
        if implementation(self.impl, x) is flex and not torch.compiler.is_compiling():
            check_inputs(x=x, **dict(self.named_parameters()))
        token, block, blocks = self._places(x, document_ids)
        q = rotate(self._heads("w_q", x), token, self.rope_base)
        k = {tag: self._heads(f"w_k_{tag}", x) for tag in self.branches}
        v = {tag: self._heads(f"w_v_{tag}", x) for tag in self.branches}
        scored = k.get("cmp", k.get("slc"))
        k_cmp = None if scored is None else rotate(self.phi_k(scored, blocks), block, self.rope_base)
        v_cmp = self.phi_v(v["cmp"], blocks) if "cmp" in v else None
        k = {tag: rotate(k[tag], token, self.rope_base) for tag in k if tag != "cmp"}
        out = native_sparse_attention(
            q,
            k.get("slc"),
            v.get("slc"),
            self._gates(x),
            k_cmp=k_cmp,
            v_cmp=v_cmp,
            k_win=k.get("win"),
            v_win=v.get("win"),
            config=self.config,
            document_ids=document_ids,
            score_mod=score_mod,
            mask_mod=mask_mod,
            branches=self.branches,
            impl=self.impl,
        )
        assert isinstance(out, Tensor)
        return out

    def _attend_next(
        self,
        x: Tensor,
        cache: NSACache,
        lengths: Tensor | None,
        score_mod: ScoreMod | None,
        mask_mod: MaskMod | None,
    ) -> Tensor:
        """Put tokens into the cache and attend from them to all of it; the heads' outputs ``(B, Hq, T, Dv)``."""
        attention = implementation(self.impl, x, cached=True)
        mod = prepare_mods(score_mod, mask_mod, x, self.num_heads, attention)
        step = cache.begin(x.shape[1], lengths, ordered=mod is not None)
        here = rotation(step.positions.token, self.head_dim, self.rope_base)
        q = turn(self._heads("w_q", x), *here)
        k = {tag: self._heads(f"w_k_{tag}", x) for tag in self.branches}
        v = {tag: self._heads(f"w_v_{tag}", x) for tag in self.branches}
        cache.require(dtype=q.dtype)
        kept: dict[str, Tensor] = {}
        if "cmp" in k or "slc" in k:
            kept["k_cmp"] = self._compress_next("k", k["cmp" if "cmp" in k else "slc"], cache, step)
        if "cmp" in k:
            kept["v_cmp"] = self._compress_next("v", v["cmp"], cache, step)
        if "slc" in k:
            cache.store("k_slc", turn(k["slc"], *here), step)
            cache.store("v_slc", v["slc"], step)
            kept |= {name: cache.all(name) for name in ("k_slc", "v_slc")}
        if "win" in k:
            kept["k_win"] = cache.extend("k_win", turn(k["win"], *here), step)
            kept["v_win"] = cache.extend("v_win", v["win"], step)
        out, aux = attend(
            attention,
            q,
            kept.get("k_slc"),
            kept.get("v_slc"),
            self._gates(x),
            k_cmp=kept.get("k_cmp"),
            v_cmp=kept.get("v_cmp"),
            k_win=kept.get("k_win"),
            v_win=kept.get("v_win"),
            positions=step.positions,
            window_positions=step.window_positions,
            config=self.config,
            scale=self.head_dim**-0.5,
            score_mod=mod,
            branches=self.branches,
        )
        if cache.reads is not None:
            cache.reads.record(kept, step.positions, step.window_positions, aux.block_indices, self.config)
        cache.end(step)
        return out.masked_fill(step.lost[:, None, :, None], torch.nan)

    def _compress_next(self, letter: str, raw: Tensor, cache: NSACache, step: Step) -> Tensor:
        """Add tokens to the raw tail, compress the blocks that they complete, and give all compressed ones."""
        if not step.emits:
            cache.keep(f"{letter}_tail", raw, step)
        else:
            tail = cache.extend(f"{letter}_tail", raw, step)
            new = self.get_submodule(f"phi_{letter}")(tail, step.first_tokens)
            if letter == "k":
                new = rotate(new, step.block * self.config.compress_stride, self.rope_base)
            cache.store(f"{letter}_cmp", new, step)
        return cache.all(f"{letter}_cmp")

    def _check_cache(self, x: Tensor, cache: NSACache, document_ids: Tensor | None) -> None:
        check_type("cache", cache, NSACache)
        if document_ids is not None:
            raise ValueError(f"document_ids: expected None with a cache, got {describe(document_ids)}")
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters())):
            raise ValueError("cache: expected torch.no_grad(), because what it holds has no gradient, got training")
        cache.require(
            config=self.config,
            branches=self.branches,
            batch_size=x.shape[0],
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            device=x.device,
        )

    def _heads(self, projection: str, x: Tensor) -> Tensor:
        """Project and split into heads, ``(B, H, S, D)``."""
        heads = self.num_heads if projection == "w_q" else self.num_kv_heads
        return self.get_submodule(projection)(x).unflatten(-1, (heads, -1)).transpose(1, 2)

    def _places(self, x: Tensor, document_ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Locate tokens and compressed tokens in their documents, for RoPE; and, in packed rows, among all tokens."""
        length = num_compressed(x.shape[1], self.config)
        if document_ids is None:
            token = torch.arange(x.shape[1], device=x.device)
            return token, torch.arange(length, device=x.device) * self.config.compress_stride, None
        check_document_ids(document_ids, *x.shape[:2], like=x)
        positions = document_positions(document_ids, self.config)
        blocks = first_tokens(positions, length, self.config)
        token = positions.token - positions.start
        return token, token.gather(1, blocks.to(torch.int64)), blocks

    def _gates(self, x: Tensor) -> Tensor:
        """Put the gates of the layer's branches in their columns; a branch that does not exist has 0."""
        gates = dict(zip(self.branches, self.gate(x).unbind(-1), strict=True))
        shut = torch.zeros_like(gates[self.branches[0]])
        return torch.stack([gates.get(tag, shut) for tag in BRANCHES], dim=-1)
