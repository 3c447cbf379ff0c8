"""The dense baseline: causal attention with the same heads and RoPE, to compare NSA with."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flexnsa.attention.compilation import compile_once
from flexnsa.attention.dispatch import choose_implementation, prepare_mods
from flexnsa.attention.interface import Call, given
from flexnsa.cache.steps import Step
from flexnsa.checks.calls import check_document_ids
from flexnsa.config import NSAConfig
from flexnsa.layers.core import Heads
from flexnsa.layers.forward import WholeStep, check_call, run_layer
from flexnsa.layers.indexer import SharedIndex
from flexnsa.layers.layouts import KeySource, Layout, LayoutSizes, check_layout
from flexnsa.layers.projection import computed_dtype, split_heads, weight_of
from flexnsa.layers.rope import apply_rope, rope_tables
from flexnsa.lm.dense.cache import DenseCache, attend_cached, place
from flexnsa.masks.document import document_positions
from flexnsa.masks.user_mods import MaskMod, Mods, ScoreMod, cap_of
from flexnsa.primitives import check_heads, check_layer_input, check_positive_int, check_positive_number, check_type


class DenseLayout(Layout):
    """Positions of tokens, as :class:`flexnsa.layers.layouts.RowLayout` has them, without blocks."""


class DenseAttention(nn.Module):
    """Grouped-query causal attention, ``(B, S, dim) -> (B, S, dim)``.

    Args:
        dim: width of input and output.
        num_heads: query heads ``Hq``.
        num_kv_heads: key/value heads ``Hkv``; divides ``num_heads``.
        head_dim: ``Dk``.
        v_head_dim: ``Dv``; ``None`` means ``head_dim``.
        rope_base: base of the rotary frequencies.
    """

    cache_class = DenseCache
    indexer = None
    dense_branches: tuple[str, ...] | None = None

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        rope_base: float = 10_000.0,
    ) -> None:
        super().__init__()
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        check_positive_int("dim", dim)
        check_heads(num_heads, num_kv_heads, head_dim, v_head_dim)
        check_positive_number("rope_base", rope_base)
        self.dim, self.num_heads, self.num_kv_heads, self.rope_base = dim, num_heads, num_kv_heads, rope_base
        self.head_dim, self.v_head_dim = head_dim, v_head_dim
        self.w_q = nn.Linear(dim, num_heads * head_dim, bias=False)
        self.w_k = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.w_v = nn.Linear(dim, num_kv_heads * v_head_dim, bias=False)
        self.w_o = nn.Linear(num_heads * v_head_dim, dim, bias=False)

    def reset_parameters(self) -> None:
        """Draw all parameters anew, as after construction; also after ``to_empty`` from the meta device."""
        for linear in (self.w_q, self.w_k, self.w_v, self.w_o):
            linear.reset_parameters()

    def new_cache(self, batch_size: int, max_seq_len: int, *, dtype: torch.dtype | None = None) -> DenseCache:
        """Make an empty cache for this layer, by default in the dtype that its keys have, under autocast or not."""
        weight = weight_of(self)
        heads = (self.num_kv_heads, self.head_dim, self.v_head_dim)
        dtype = computed_dtype(weight) if dtype is None else dtype
        return DenseCache(batch_size, max_seq_len, *heads, rope_base=self.rope_base, dtype=dtype, device=weight.device)

    def forward(
        self,
        x: Tensor,
        *,
        document_ids: Tensor | None = None,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
        cache: DenseCache | None = None,
        lengths: Tensor | None = None,
        layout: DenseLayout | None = None,
    ) -> Tensor:
        """Attend from every token to itself and all before it; arguments as :class:`flexnsa.NativeSparseAttention`."""
        check_layer_input(x, self.dim, weight_of(self))
        if layout is not None:
            check_type("layout", layout, DenseLayout)
            check_layout(layout, x, document_ids, self.layout_sizes)
        modded = [name for name, mod in {"score_mod": score_mod, "mask_mod": mask_mod}.items() if mod is not None]
        if cache is not None and modded:
            raise ValueError(f"{', '.join(modded)}: expected None with a cache of dense attention")
        check_call(self, x, DenseCache, document_ids=document_ids, layout=layout, cache=cache, lengths=lengths)
        mods = score_mod, mask_mod
        out, _ = run_layer(self, x, mods=mods, document_ids=document_ids, layout=layout, cache=cache, lengths=lengths)
        return self.w_o(out)

    @property
    def layout_sizes(self) -> LayoutSizes:
        """What layers must have in common to share a :meth:`layout`."""
        return LayoutSizes.of(weight_of(self), self.head_dim, self.rope_base)

    def layout(self, seq_len: int, document_ids: Tensor | None = None) -> DenseLayout:
        """Lay out sequences of ``seq_len`` tokens, for all layers of the same :attr:`layout_sizes`."""
        check_positive_int("seq_len", seq_len)
        if document_ids is not None:
            check_document_ids(document_ids, "B", seq_len, like=weight_of(self))
        return self._lay_out(seq_len, document_ids)

    def _lay_out(self, seq_len: int, document_ids: Tensor | None) -> DenseLayout:
        sizes = self.layout_sizes
        if document_ids is None:
            return DenseLayout(sizes.rotate(torch.arange(seq_len, device=sizes.device))[0], sizes=sizes)
        positions = document_positions(document_ids, NSAConfig())
        return DenseLayout(sizes.rotate(positions.token - positions.start)[0], positions=positions, sizes=sizes)

    def row_layout(self, x: Tensor, document_ids: Tensor | None) -> DenseLayout:
        """Lay out whole sequences; see :class:`flexnsa.layers.forward.Layer`."""
        return self._lay_out(x.shape[1], document_ids)

    def step_layout(self, x: Tensor, step: Step) -> DenseLayout:
        """Lay out tokens that follow a cache."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        tables = rope_tables(step.positions.token, self.head_dim, self.rope_base, dtype=dtype)
        return DenseLayout(tables, positions=step.positions)

    def project(self, x: Tensor, *, rows: bool = False) -> Heads:  # noqa: ARG002
        """Project to heads: of one branch, without a gate."""
        k, v = (split_heads(linear(x), self.num_kv_heads) for linear in (self.w_k, self.w_v))
        return Heads(split_heads(self.w_q(x), self.num_heads), {"all": k}, {"all": v}, {})

    def attend(
        self,
        x: Tensor,  # noqa: ARG002
        heads: Heads,
        layout: DenseLayout,
        source: KeySource,
        mods: Mods,
        *,
        cached: bool,
        index: SharedIndex | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, None]:
        """Attend from projected heads; see :class:`flexnsa.layers.forward.Layer`."""
        q, positions = apply_rope(heads.q, layout.tokens), layout.positions
        k = source.of_tokens("k", apply_rope(heads.k["all"], layout.tokens))
        v = source.of_tokens("v", heads.v["all"])
        if cached:
            # Padding of an empty sequence is at no position; what it attends to must be finite all the same.
            return attend_cached(q, k, v, given(positions).token.clamp_min(0)), None
        if positions is None and mods == (None, None):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), None
        # A window of all tokens: unlike flash attention, it takes documents and mods, in linear memory.
        implementation = choose_implementation("auto", q, modded=cap_of(*mods) is None, v_dim=v.shape[-1])
        mod = prepare_mods(*mods, q, self.num_heads, implementation)
        implementation.check(q=q, k=k, v=v)
        call = Call(NSAConfig(window_size=q.shape[2]), self.head_dim**-0.5, mod, window_positions=positions)
        return implementation.window(q, k, v, call).out, None

    def whole_step(self, x: Tensor, cache: DenseCache, mods: Mods) -> WholeStep | None:  # noqa: ARG002
        """Return what computes one token of each sequence, on CUDA in few kernels."""
        return partial(self._take_step, x, cache) if x.shape[1] == 1 else None

    def _take_step(
        self, x: Tensor, cache: DenseCache, lengths: Tensor | None, _blocks: Tensor | None
    ) -> tuple[Tensor, None]:
        heads = self.project(x)
        q, k, v = heads.q, heads.k["all"], heads.v["all"]
        cache.check_dtypes(q, k, v)
        kept = cache.buffers["k"], cache.buffers["v"]
        put = compile_once(place) if q.is_cuda else place  # in few kernels
        q, position = put(q, k, v, *kept, cache.lengths, lengths, self.rope_base)
        return attend_cached(q, *kept, position).transpose(1, 2).flatten(2), None
