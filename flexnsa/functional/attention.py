"""Native Sparse Attention: the gated sum of its branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

from torch import Tensor

from flexnsa.attention.dispatch import attend, by_branch
from flexnsa.attention.interface import Keys, NSAAux
from flexnsa.checks import calls
from flexnsa.checks.scorers import checked_scorer_keys
from flexnsa.config import BRANCHES, NSAConfig, num_compressed
from flexnsa.functional.calls import prepare, scorer_of
from flexnsa.masks.user_mods import MaskMod, ScoreMod
from flexnsa.primitives import check_floating, check_tensor, check_type, describe


@overload
def native_sparse_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    gates: Tensor,
    *,
    k_cmp: Tensor | None,
    v_cmp: Tensor | None,
    k_win: Tensor | None = None,
    v_win: Tensor | None = None,
    config: NSAConfig,
    scale: float | None = None,
    block_indices: Tensor | None = None,
    document_ids: Tensor | None = None,
    positions: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    branches: Sequence[str] = BRANCHES,
    q_index: Tensor | None = None,
    k_index: Tensor | None = None,
    index_scale: float | None = None,
    impl: str = "auto",
    recompute: Sequence[str] = (),
    nonnegative_gates: bool = False,
    return_aux: Literal[False] = False,
) -> Tensor: ...
@overload
def native_sparse_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    gates: Tensor,
    *,
    k_cmp: Tensor | None,
    v_cmp: Tensor | None,
    k_win: Tensor | None = None,
    v_win: Tensor | None = None,
    config: NSAConfig,
    scale: float | None = None,
    block_indices: Tensor | None = None,
    document_ids: Tensor | None = None,
    positions: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    branches: Sequence[str] = BRANCHES,
    q_index: Tensor | None = None,
    k_index: Tensor | None = None,
    index_scale: float | None = None,
    impl: str = "auto",
    recompute: Sequence[str] = (),
    nonnegative_gates: bool = False,
    return_aux: Literal[True],
) -> tuple[Tensor, NSAAux]: ...
def native_sparse_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    gates: Tensor,
    *,
    k_cmp: Tensor | None,
    v_cmp: Tensor | None,
    k_win: Tensor | None = None,
    v_win: Tensor | None = None,
    config: NSAConfig,
    scale: float | None = None,
    block_indices: Tensor | None = None,
    document_ids: Tensor | None = None,
    positions: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    branches: Sequence[str] = BRANCHES,
    q_index: Tensor | None = None,
    k_index: Tensor | None = None,
    index_scale: float | None = None,
    impl: str = "auto",
    recompute: Sequence[str] = (),
    nonnegative_gates: bool = False,
    return_aux: bool = False,
) -> Tensor | tuple[Tensor, NSAAux]:
    """Compute causal Native Sparse Attention: the gated sum of three branches (NSA paper, Eq. 5).

    Args:
        q: queries ``(B, Hq, S, Dk)``.
        k: keys of the selected branch ``(B, Hkv, S, Dk)``; ``Hkv`` divides ``Hq``. ``None`` if no branch reads them.
        v: values of the selected branch ``(B, Hkv, S, Dv)``, likewise.
        gates: ``(B, Hq, S, 3)``, any floating dtype; columns are compressed, selected, window.
        k_cmp: compressed keys ``(B, Hkv, N, Dk)``; ``None`` if neither ``cmp`` nor the selection reads them.
        v_cmp: compressed values ``(B, Hkv, N, Dv)``; ``None`` without the ``cmp`` branch.
        k_win: keys of the window, shaped as k; by default k.
        v_win: values of the window, shaped as v; by default v.
        config: sizes of the branches.
        scale: factor on the scores, by default ``Dk ** -0.5``.
        block_indices: int32 ``(B, Hkv, S, n)``, ascending, unique, padded with -1: attend to these blocks instead of
            selecting some.
        document_ids: int ``(B, S)``, never decreasing: the document of each token of packed sequences. Each document
            is attended to as if it were alone. k_cmp and v_cmp are then the compressed tokens of one document after the
            other, which start at :func:`flexnsa.masks.document.first_tokens`, and block indices count from the
            document's start.
        positions: int ``(T,)`` or ``(B, T)``, increasing: q and gates hold only the queries at these ``T`` of the ``S``
            tokens. Per-query tensors, output included, then have length ``T``. Outputs and gradients are those of the
            whole call. Values are not checked on CUDA; call :func:`flexnsa.check_positions` for that.
        score_mod: ``(score, b, h, q_idx, kv_idx)`` to a score, applied in every branch and when blocks are scored.
            ``score`` includes the scale, ``h`` is a query head, and the indices are token positions counted from the
            document's first token; that of a compressed token is its last token's. ``kv_idx <= q_idx`` always holds.
            Tensors that it captures get gradients, except from flex on a CPU, which has none. With flex, blocks are
            scored by plain products of chunks of queries, a loop that ``torch.compile`` unrolls; with sdpa no part of
            the attention is compiled.
        mask_mod: ``(b, h, q_idx, kv_idx)`` to bool, with the same indices: False bans a key that the branch would show.
            A query whose keys are all banned has output 0.
        branches: any of ``cmp``, ``slc``, ``win``; the others are neither computed nor added.
        q_index: index queries ``(B, Hkv * index_heads, S, Di)``, which score the blocks if ``config`` has an indexer;
            without a gradient, like all that selects.
        k_index: index keys ``(B, Hkv, N_index, Di)``, likewise: one for every ``index_stride`` tokens; with an
            ``index_score`` ``(B, 1, N_index, Di)``, which all heads share.
        index_scale: factor on the products of both, by default ``Di ** -0.5``.
        impl: ``"flex"``, ``"triton"``, ``"sdpa"`` or ``"reference"``. ``"auto"`` is sdpa without CUDA; on CUDA it is
            triton, or flex with another mod than a soft cap or a head dimension above 256.
        return_aux: return ``(out, NSAAux)``.
        recompute: any of ``branches``, to compute again in backward: only q, keys, values and gates are kept for it,
            neither outputs nor what kernels save (Triton with ``nonnegative_gates``: lse). Blocks are selected once.
        nonnegative_gates: no gate is negative, as after a sigmoid. Triton then computes the gradients of all branches
            in one pass, which is faster. Only ``out`` then has gradients, none of ``NSAAux`` does; with a negative gate
            they are NaN.

    Returns:
        ``out (B, Hq, S, Dv)`` in the dtype of q.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument does not fit the others; the message names it.
    """
    branches = calls.check_branches(branches)
    recompute = calls.check_recompute(recompute, branches)
    check_type("return_aux", return_aux, bool)
    check_type("nonnegative_gates", nonnegative_gates, bool)
    calls.check_queries(q, config)
    check_tensor("gates", gates, (*q.shape[:3], len(BRANCHES)), like=q, dtype=getattr(gates, "dtype", None))
    check_floating("gates", gates)
    windows = ("k" if k_win is None else "k_win", "v" if v_win is None else "v_win")
    k_win, v_win = k if k_win is None else k_win, v if v_win is None else v_win
    selecting = "slc" in branches and block_indices is None
    length = q.shape[2]
    if positions is not None:
        keys = ("k", k) if "slc" in branches else (windows[0], k_win) if "win" in branches else None
        length = calls.count_tokens(q, keys, k_cmp, document_ids, config)
        positions = calls.checked_positions(q, positions, length)
    num_keys = num_compressed(length, config)
    sizes = calls.Sizes()
    if "slc" in branches:
        sizes = calls.check_keys(q, k, v, ("k", "v"), length, sizes)
    if "win" in branches:
        sizes = calls.check_keys(q, k_win, v_win, windows, length, sizes)
    if "cmp" in branches:
        sizes = calls.check_keys(q, k_cmp, v_cmp, ("k_cmp", "v_cmp"), num_keys, sizes)
    if selecting:
        checked_scorer_keys(q, k_cmp, q_index, k_index, index_scale, sizes.heads, length, config)
    if block_indices is not None:
        if "slc" not in branches:
            raise ValueError(f"block_indices: expected None without the slc branch, got {describe(block_indices)}")
        block_indices = calls.checked_selection(q, block_indices, sizes.heads, length, config)
    v_any = next((x for x in (v, v_win, v_cmp) if x is not None), None)
    implementation, call = prepare(q, config, scale, document_ids, score_mod, mask_mod, impl, v_any, positions, length)
    indexer = None
    if selecting and q_index is not None and k_index is not None:
        indexer = scorer_of(q, q_index, k_index, call, index_scale, document_ids, positions, length)
        implementation.check(q_index=q_index.detach(), k_index=k_index.detach())
    out, aux = attend(
        implementation,
        q,
        Keys(k_cmp, v_cmp, k, v, k_win, v_win),
        by_branch(gates),
        call,
        block_indices=block_indices,
        indexer=indexer,
        branches=branches,
        recompute=recompute,
        nonnegative=nonnegative_gates,
    )
    return (out, aux) if return_aux else out
