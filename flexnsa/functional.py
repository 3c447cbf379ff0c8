"""The public functions: check the arguments, choose the implementation, let it attend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from flexnsa.argument_checks import (
    Sizes,
    check_branches,
    check_compressed_keys,
    check_document_ids,
    check_keys,
    check_queries,
    check_recompute,
    check_scale,
    checked_positions,
    checked_selection,
    count_tokens,
)
from flexnsa.attention.implementations import attend, choose_implementation, prepare_mods
from flexnsa.attention.scoring import block_scores, group_probabilities
from flexnsa.attention.seam import Call, Implementation, Keys, NSAAux
from flexnsa.config import NSAConfig
from flexnsa.geometry import BRANCHES, num_blocks, num_compressed
from flexnsa.masks.document import document_positions
from flexnsa.masks.user_mods import MaskMod, ScoreMod
from flexnsa.positions import Positions
from flexnsa.validation import check_floating, check_positive_int, check_tensor, check_type, describe


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
    impl: str = "auto",
    recompute: Sequence[str] = (),
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
    impl: str = "auto",
    recompute: Sequence[str] = (),
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
    impl: str = "auto",
    recompute: Sequence[str] = (),
    return_aux: bool = False,
) -> Tensor | tuple[Tensor, NSAAux]:
    """Causal Native Sparse Attention: the gated sum of three branches (NSA paper, Eq. 5).

    Args:
        q: queries ``(B, Hq, S, Dk)``.
        k: keys of the selected branch ``(B, Hkv, S, Dk)``; ``Hkv`` divides ``Hq``. ``None`` where no branch reads it.
        v: values of the selected branch ``(B, Hkv, S, Dv)``, likewise.
        gates: ``(B, Hq, S, 3)``, any floating dtype; columns are compressed, selected, window.
        k_cmp: compressed keys ``(B, Hkv, N, Dk)``; ``None`` where neither ``cmp`` nor a selection needs them.
        v_cmp: compressed values ``(B, Hkv, N, Dv)``; ``None`` without the ``cmp`` branch.
        k_win: keys of the window, as k, which is the default.
        v_win: values of the window, as v, which is the default.
        config: sizes of the branches.
        scale: factor on the scores, by default ``Dk ** -0.5``.
        block_indices: int32 ``(B, Hkv, S, n)``, ascending, unique, padded with -1: use these blocks, select none.
        document_ids: int ``(B, S)``, non-decreasing: the document of each token of a packed row. Each document is
            then attended to as if it stood alone; k_cmp and v_cmp list the documents' compressed tokens one after
            the other (:func:`flexnsa.masks.document.first_tokens` says where each begins), and block numbers count
            from the document's start.
        positions: int ``(T,)`` or ``(B, T)``, increasing: q and gates are of ``T`` queries only, which stand at these
            of the ``S`` tokens; ``T`` is then read for ``S`` in all that has a row for each query, the output too. Rows
            and gradients are those of the whole call. On CUDA the values are not looked at;
            :func:`flexnsa.check_positions` does.
        score_mod: ``(score, b, h, q_idx, kv_idx)`` to a score, for every pair in every branch and in the scoring of
            blocks. ``score`` has the scale in it, ``h`` is a query head, and the indices are token positions counted
            from the document's first token; a compressed token stands at its last. ``kv_idx <= q_idx`` always. Tensors
            that it captures get gradients, except from flex on a CPU, which has none. With flex, scoring is then plain
            products of a chunk of queries, a loop that ``torch.compile`` unrolls; with sdpa nothing of it is compiled.
        mask_mod: ``(b, h, q_idx, kv_idx)`` to bool, likewise: False bans a key that the branch would show. A query all
            of whose keys are banned has output 0.
        branches: any of ``cmp``, ``slc``, ``win``; the others are neither computed nor added.
        impl: ``"flex"``, ``"triton"``, ``"sdpa"`` or ``"reference"``; ``"auto"`` is sdpa where there is no CUDA, and
            there triton, or flex with a mod or a head dimension above 256.
        return_aux: return ``(out, NSAAux)``.
        recompute: any of ``branches``, to run once more in backward: neither their outputs nor what their kernels keep
            then waits for it, only q, keys, values and gates. Blocks are selected once all the same.

    Returns:
        ``out (B, Hq, S, Dv)`` in the dtype of q.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: an argument does not fit the others; the message names it.
    """
    check_type("config", config, NSAConfig)
    branches = check_branches(branches)
    recompute = check_recompute(recompute, branches)
    check_type("return_aux", return_aux, bool)
    check_queries(q)
    check_tensor("gates", gates, (*q.shape[:3], len(BRANCHES)), like=q, dtype=getattr(gates, "dtype", None))
    check_floating("gates", gates)
    windows = ("k" if k_win is None else "k_win", "v" if v_win is None else "v_win")
    k_win, v_win = k if k_win is None else k_win, v if v_win is None else v_win
    selecting = "slc" in branches and block_indices is None
    length = q.shape[2]
    if positions is not None:
        keys = ("k", k) if "slc" in branches else (windows[0], k_win) if "win" in branches else None
        length = count_tokens(q, keys, k_cmp, document_ids, config)
        positions = checked_positions(q, positions, length)
    num_keys = num_compressed(length, config)
    sizes = Sizes()
    if "slc" in branches:
        sizes = check_keys(q, k, v, ("k", "v"), length, sizes)
    if "win" in branches:
        sizes = check_keys(q, k_win, v_win, windows, length, sizes)
    if "cmp" in branches:
        sizes = check_keys(q, k_cmp, v_cmp, ("k_cmp", "v_cmp"), num_keys, sizes)
    elif selecting:
        check_tensor("k_cmp", k_cmp, (q.shape[0], sizes.heads, num_keys, q.shape[3]), like=q)
    if block_indices is not None:
        if "slc" not in branches:
            raise ValueError(f"block_indices: expected None without the slc branch, got {describe(block_indices)}")
        block_indices = checked_selection(q, block_indices, sizes.heads, length, config)
    where = _stand(q, config, document_ids, positions, length)
    implementation, call = _prepare(q, config, scale, where, score_mod, mask_mod, impl)
    keys = Keys(k_cmp, v_cmp, k, v, k_win, v_win)
    out, aux = attend(
        implementation, q, keys, gates, call, block_indices=block_indices, branches=branches, recompute=recompute
    )
    return (out, aux) if return_aux else out


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    *,
    config: NSAConfig,
    scale: float | None = None,
    document_ids: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Attend to the compressed tokens that lie wholly in the past (NSA paper, section 3.3.1).

    Args:
        q: ``(B, Hq, S, Dk)``.
        k_cmp: ``(B, Hkv, N, Dk)``, ``N = max(0, (S - l) // d + 1)``.
        v_cmp: ``(B, Hkv, N, Dv)``.
        config: gives ``l`` and ``d``.
        scale: factor on the scores, by default ``Dk ** -0.5``.
        document_ids: as in :func:`native_sparse_attention`.
        score_mod: as in :func:`native_sparse_attention`.
        mask_mod: as in :func:`native_sparse_attention`.
        impl: as in :func:`native_sparse_attention`.

    Returns:
        ``(out, lse)``: ``(B, Hq, S, Dv)`` and ``(B, Hq, S)``, natural log, fp32; 0 and ``-inf`` for the first
        ``l - 1`` queries, which see nothing. lse is ``None`` where flex runs on a CPU, which has none.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: an argument does not fit the others; the message names it.
    """
    check_type("config", config, NSAConfig)
    check_queries(q)
    check_keys(q, k_cmp, v_cmp, ("k_cmp", "v_cmp"), num_compressed(q.shape[2], config))
    implementation, call = _prepare(q, config, scale, _stand(q, config, document_ids), score_mod, mask_mod, impl)
    implementation.check(q=q, k_cmp=k_cmp, v_cmp=v_cmp)
    out, lse, _ = implementation.compressed(q, k_cmp, v_cmp, call)
    return out, lse


def block_importance(
    q: Tensor,
    k_cmp: Tensor,
    *,
    config: NSAConfig,
    seq_len: int | None = None,
    scale: float | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> Tensor:
    """Score every selection block for every query (NSA paper, Eq. 8 to 10): dense, for analysis and tests.

    Args:
        q: ``(B, Hq, T, Dk)``, the last ``T`` queries of the sequence.
        k_cmp: ``(B, Hkv, N, Dk)``, ``N`` as of ``seq_len``.
        config: gives ``l``, ``d`` and ``l'``.
        seq_len: tokens of the sequence, by default ``T``.
        scale: factor on the scores, by default ``Dk ** -0.5``.
        score_mod: as in :func:`native_sparse_attention`.
        mask_mod: as in :func:`native_sparse_attention`.

    Returns:
        fp32 ``(B, Hkv, T, M)``, ``M = ceil(seq_len / l')``; blocks that a query cannot see score 0.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: an argument does not fit the others; the message names it.
    """
    check_type("config", config, NSAConfig)
    check_queries(q)
    seq_len = q.shape[2] if seq_len is None else seq_len
    check_positive_int("seq_len", seq_len)
    if seq_len < q.shape[2]:
        raise ValueError(f"seq_len: expected at least the {q.shape[2]} tokens of q, got {seq_len}")
    check_compressed_keys(q, k_cmp, seq_len, config)
    whole = Positions.of_sequence(seq_len, q.device)
    last = whole.at(slice(seq_len - q.shape[2], None))
    _, call = _prepare(q, config, scale, None, score_mod, mask_mod, "sdpa")
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        probs = group_probabilities(q, k_cmp, None, last, call)
        return block_scores(probs, last, num_blocks=num_blocks(seq_len, config), config=config)


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    *,
    config: NSAConfig,
    lse: Tensor | None = None,
    scale: float | None = None,
    document_ids: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    impl: str = "auto",
) -> Tensor:
    """Choose the ``n`` blocks that each query will attend to (NSA paper, Eq. 8 to 12); never differentiated.

    Args:
        q: ``(B, Hq, S, Dk)``.
        k_cmp: ``(B, Hkv, N, Dk)``.
        config: gives the block sizes, ``n`` and the forced blocks.
        lse: of :func:`compressed_attention` with the same q, k_cmp and scale; saves computing it again.
        scale: factor on the scores, by default ``Dk ** -0.5``.
        document_ids: as in :func:`native_sparse_attention`.
        score_mod: as in :func:`native_sparse_attention`.
        mask_mod: as in :func:`native_sparse_attention`.
        impl: as in :func:`native_sparse_attention`.

    Returns:
        int32 ``(B, Hkv, S, n)``: block numbers ascending, padded with -1; the heads of a group share them. Forced are
        the first ``num_init_blocks`` and the last ``num_local_blocks``; a tie goes to the lower index.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: an argument does not fit the others; the message names it.
    """
    check_type("config", config, NSAConfig)
    check_queries(q)
    check_compressed_keys(q, k_cmp, q.shape[2], config)
    if lse is not None:
        check_tensor("lse", lse, tuple(q.shape[:3]), like=q, dtype=torch.promote_types(q.dtype, torch.float32))
    implementation, call = _prepare(q, config, scale, _stand(q, config, document_ids), score_mod, mask_mod, impl)
    return implementation.select(q, k_cmp, call, lse, None)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *,
    config: NSAConfig,
    scale: float | None = None,
    document_ids: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Attend to the past tokens of the selected blocks (NSA paper, section 3.3.2).

    Args:
        q: ``(B, Hq, S, Dk)``.
        k: ``(B, Hkv, S, Dk)``.
        v: ``(B, Hkv, S, Dv)``.
        block_indices: int32 ``(B, Hkv, S, n)``, ascending, unique, padded with -1, as :func:`select_blocks` gives.
        config: gives ``l'``.
        scale: factor on the scores, by default ``Dk ** -0.5``.
        document_ids: as in :func:`native_sparse_attention`.
        score_mod: as in :func:`native_sparse_attention`.
        mask_mod: as in :func:`native_sparse_attention`.
        impl: as in :func:`native_sparse_attention`.

    Returns:
        ``(out, lse)``: ``(B, Hq, S, Dv)`` and ``(B, Hq, S)``, natural log, fp32; 0 and ``-inf`` for a query without a
        block. lse is ``None`` where flex runs on a CPU, which has none.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: an argument does not fit the others; the message names it.
    """
    check_type("config", config, NSAConfig)
    check_queries(q)
    sizes = check_keys(q, k, v, ("k", "v"), q.shape[2])
    block_indices = checked_selection(q, block_indices, sizes.heads, q.shape[2], config)
    implementation, call = _prepare(q, config, scale, _stand(q, config, document_ids), score_mod, mask_mod, impl)
    implementation.check(q=q, k=k, v=v)
    return implementation.selected(q, k, v, block_indices, call)


def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    config: NSAConfig,
    scale: float | None = None,
    document_ids: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Attend to the last ``window_size`` tokens, the query's own included (NSA paper, section 3.3.3).

    Args:
        q: ``(B, Hq, S, Dk)``.
        k: ``(B, Hkv, S, Dk)``.
        v: ``(B, Hkv, S, Dv)``.
        config: gives ``w``.
        scale: factor on the scores, by default ``Dk ** -0.5``.
        document_ids: as in :func:`native_sparse_attention`.
        score_mod: as in :func:`native_sparse_attention`.
        mask_mod: as in :func:`native_sparse_attention`.
        impl: as in :func:`native_sparse_attention`.

    Returns:
        ``(out, lse)``: ``(B, Hq, S, Dv)`` and ``(B, Hq, S)``, natural log, fp32. lse is ``None`` where flex runs on a
        CPU, which has none.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: an argument does not fit the others; the message names it.
    """
    check_type("config", config, NSAConfig)
    check_queries(q)
    check_keys(q, k, v, ("k", "v"), q.shape[2])
    implementation, call = _prepare(q, config, scale, _stand(q, config, document_ids), score_mod, mask_mod, impl)
    implementation.check(q=q, k=k, v=v)
    return implementation.window(q, k, v, call)


def _stand(
    q: Tensor,
    config: NSAConfig,
    document_ids: Tensor | None,
    tokens: Tensor | None = None,
    length: int | None = None,
) -> Positions | None:
    """Say where the queries stand among ``length`` keys; None for one at every key of one sequence."""
    if document_ids is None:
        return None if tokens is None else Positions.of_queries(tokens)
    check_document_ids(document_ids, q.shape[0], q.shape[2] if length is None else length, like=q)
    every = document_positions(document_ids, config)
    return every if tokens is None else every.of_some(tokens)


def _prepare(
    q: Tensor,
    config: NSAConfig,
    scale: float | None,
    positions: Positions | None,
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    impl: str,
) -> tuple[Implementation, Call]:
    """Choose the implementation, and say what its branches share."""
    modded = score_mod is not None or mask_mod is not None
    implementation, scale = choose_implementation(impl, q, modded=modded), check_scale(q, scale)
    mod = prepare_mods(score_mod, mask_mod, q, q.shape[1], implementation)
    return implementation, Call(config, scale, mod, positions, positions)
