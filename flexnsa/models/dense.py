"""The dense twin: causal attention with the same heads and RoPE, to compare NSA with."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flexnsa.argument_checks import check_document_ids
from flexnsa.attention.implementations import choose_implementation, prepare_mods
from flexnsa.attention.seam import Call
from flexnsa.config import NSAConfig
from flexnsa.decoding.documents import check_pack
from flexnsa.layers.projection import split_heads, weight_of
from flexnsa.layers.rope import RopeTables, apply_rope, stored_rope_tables
from flexnsa.masks.document import document_positions
from flexnsa.masks.user_mods import MaskMod, ScoreMod
from flexnsa.models.dense_cache import DenseCache
from flexnsa.models.dense_step import attend_cached, compiled_place
from flexnsa.positions import Positions
from flexnsa.validation import (
    check_heads,
    check_layer_input,
    check_lengths,
    check_positive_int,
    check_positive_number,
    check_type,
    describe,
)


class DenseLayout(NamedTuple):
    """Where tokens stand, the same in every layer: rotary tables, and positions in the documents of packed rows."""

    tokens: RopeTables
    positions: Positions | None


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
        """Make an empty cache for this layer, by default in the dtype of its weights."""
        weight = weight_of(self)
        heads = (self.num_kv_heads, self.head_dim, self.v_head_dim)
        dtype = weight.dtype if dtype is None else dtype
        return DenseCache(batch_size, max_seq_len, *heads, dtype=dtype, device=weight.device)

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
        mods = {"score_mod": score_mod, "mask_mod": mask_mod}
        packed = document_ids is not None or (layout is not None and layout.positions is not None)
        if cache is not None:
            given = [name for name, mod in mods.items() if mod is not None]
            if given:
                raise ValueError(f"{', '.join(given)}: expected None with a cache of dense attention")
            self._check_cache(x, cache, lengths, packed=packed)
        elif lengths is not None:
            raise ValueError(f"lengths: expected None without a cache, got {describe(lengths)}")
        if cache is not None and not (packed or cache.takes_rows(x.shape[1])):
            out = self._attend_next(x, cache, lengths)
            return self.w_o(out.transpose(1, 2).flatten(2))
        if layout is None:
            if document_ids is not None:
                check_document_ids(document_ids, *x.shape[:2], like=x)
            layout = self.layout(x.shape[1], document_ids)
        q, k, v = self._project(x, layout.tokens)
        if cache is not None:
            cache.fill(k, v, lengths, layout.positions)
        if layout.positions is not None or score_mod is not None or mask_mod is not None:
            out = self._attend_in_window(q, k, v, layout.positions, **mods)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.w_o(out.transpose(1, 2).flatten(2))

    def layout(self, seq_len: int, document_ids: Tensor | None = None) -> DenseLayout:
        """Lay out rows of ``seq_len`` tokens, for all layers of a model."""
        weight = weight_of(self)
        if document_ids is None:
            positions, position = None, torch.arange(seq_len, device=weight.device)
        else:
            check_document_ids(document_ids, "B", seq_len, like=weight)
            positions = document_positions(document_ids, NSAConfig())
            position = positions.token - positions.start
        tables = stored_rope_tables(position, self.head_dim, self.rope_base, dtype=self._table_dtype())
        return DenseLayout(tables, positions)

    def _table_dtype(self) -> torch.dtype:
        return torch.promote_types(weight_of(self).dtype, torch.float32)

    def _check_cache(self, x: Tensor, cache: DenseCache, lengths: Tensor | None, *, packed: bool) -> None:
        check_type("cache", cache, DenseCache)
        if packed:
            check_pack(x, cache, lengths)
        weight = weight_of(self)
        shape = cache.batch_size if packed else len(x), self.num_kv_heads, cache.max_seq_len + 1
        expected = [(*shape, dim) for dim in (self.head_dim, self.v_head_dim)]
        if [tuple(cache.k.shape), tuple(cache.v.shape)] != expected or cache.k.device != weight.device:
            came = f"{describe(cache.k)} and {describe(cache.v)}"
            raise ValueError(f"cache: expected keys and values {expected} on {weight.device}, got {came}")
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            raise ValueError("cache: expected torch.no_grad(), because what it holds has no gradient, got training")
        if lengths is not None:
            check_lengths(lengths, x)

    def _attend_in_window(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Positions | None,
        score_mod: ScoreMod | None,
        mask_mod: MaskMod | None,
    ) -> Tensor:
        """Attend by a window of all tokens: unlike flash attention, it knows documents and mods, in linear memory."""
        implementation = choose_implementation("auto", q, modded=score_mod is not None or mask_mod is not None)
        mod = prepare_mods(score_mod, mask_mod, q, self.num_heads, implementation)
        implementation.check(q=q, k=k, v=v)
        call = Call(NSAConfig(window_size=q.shape[2]), self.head_dim**-0.5, mod, window_positions=positions)
        return implementation.window(q, k, v, call).out

    def _attend_next(self, x: Tensor, cache: DenseCache, lengths: Tensor | None) -> Tensor:
        """Attend from tokens that follow those of the cache, which then holds them too."""
        cache.make_room(x.shape[1], lengths)
        q, position = compiled_place(*self._heads(x), cache.k, cache.v, cache.lengths, lengths, self.rope_base)
        return attend_cached(q, cache.k, cache.v, position)

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Give q, k and v ``(B, H, S, D)``."""
        k, v = (split_heads(linear(x), self.num_kv_heads) for linear in (self.w_k, self.w_v))
        return split_heads(self.w_q(x), self.num_heads), k, v

    def _project(self, x: Tensor, tables: RopeTables) -> tuple[Tensor, Tensor, Tensor]:
        """Give q, k and v ``(B, H, S, D)``, the first two turned at their positions."""
        q, k, v = self._heads(x)
        return apply_rope(q, tables), apply_rope(k, tables), v
