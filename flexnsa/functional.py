"""The public functions: check the arguments, choose the implementation, combine the branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexnsa.attention import reference
from flexnsa.attention.flex import branches as flex
from flexnsa.attention.flex import decoding as flex_cached
from flexnsa.attention.flex.kernels import check_inputs
from flexnsa.attention.scoring import block_scores, group_probabilities
from flexnsa.attention.sdpa import branches as sdpa
from flexnsa.attention.sdpa import decoding as sdpa_cached
from flexnsa.config import NSAConfig
from flexnsa.geometry import BRANCHES, num_blocks, num_compressed
from flexnsa.layers.gating import combine
from flexnsa.masks.document import check_document_ids, document_positions
from flexnsa.masks.intervals import MaskMod
from flexnsa.masks.user_mods import ScoreMod, merge_mods
from flexnsa.positions import Positions
from flexnsa.validation import check_choice, check_floating, check_positive_int, check_tensor, check_type, describe
from flexnsa.validation_of_arguments import (
    Sizes,
    check_branches,
    check_compressed_keys,
    check_keys,
    check_mods,
    check_queries,
    check_scale,
    checked_selection,
)

IMPLEMENTATIONS: dict[str, Any] = {"flex": flex, "sdpa": sdpa, "reference": reference}
CACHED_IMPLEMENTATIONS: dict[str, Any] = IMPLEMENTATIONS | {"flex": flex_cached, "sdpa": sdpa_cached}
"""Where the keys are a cache."""


class NSAAux(NamedTuple):
    """What the branches produced on the way; ``None`` for what was not computed.

    ``block_indices`` int32 ``(B, Hkv, S, n)``; ``out_*`` ``(B, Hq, S, Dv)``; ``lse_cmp`` fp32 ``(B, Hq, S)``.
    """

    block_indices: Tensor | None
    out_cmp: Tensor | None
    out_slc: Tensor | None
    out_win: Tensor | None
    lse_cmp: Tensor | None


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
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    branches: Sequence[str] = BRANCHES,
    impl: str = "auto",
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
        score_mod: ``(score, b, h, q_idx, kv_idx)`` to a score, for every pair in every branch and in the scoring of
            blocks. ``score`` has the scale in it, ``h`` is a query head, and the indices are token positions counted
            from the document's first token; a compressed token stands at its last. ``kv_idx <= q_idx`` always. Tensors
            that it captures get gradients, except from flex on a CPU, which has none. With flex, scoring is then plain
            products of a chunk of queries, a loop that ``torch.compile`` unrolls; with sdpa nothing of it is compiled.
        mask_mod: ``(b, h, q_idx, kv_idx)`` to bool, likewise: False bans a key that the branch would show. A query all
            of whose keys are banned has output 0.
        branches: any of ``cmp``, ``slc``, ``win``; the others are neither computed nor added.
        impl: ``"flex"``, ``"sdpa"`` or ``"reference"``; ``"auto"`` is flex on CUDA and sdpa elsewhere.
        return_aux: return ``(out, NSAAux)``.

    Returns:
        ``out (B, Hq, S, Dv)`` in the dtype of q.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: an argument does not fit the others; the message names it.
    """
    check_type("config", config, NSAConfig)
    branches = check_branches(branches)
    check_type("return_aux", return_aux, bool)
    check_queries(q)
    check_tensor("gates", gates, (*q.shape[:3], len(BRANCHES)), like=q, dtype=getattr(gates, "dtype", None))
    check_floating("gates", gates)
    windows = ("k" if k_win is None else "k_win", "v" if v_win is None else "v_win")
    k_win, v_win = k if k_win is None else k_win, v if v_win is None else v_win
    selecting = "slc" in branches and block_indices is None
    length, num_keys = q.shape[2], num_compressed(q.shape[2], config)
    sizes = Sizes()
    inputs: dict[str, Any] = {"q": q}
    if "slc" in branches:
        sizes = check_keys(q, k, v, ("k", "v"), length, sizes)
        inputs |= {"k": k, "v": v}
    if "win" in branches:
        sizes = check_keys(q, k_win, v_win, windows, length, sizes)
        inputs |= dict(zip(windows, (k_win, v_win), strict=True))
    if "cmp" in branches:
        sizes = check_keys(q, k_cmp, v_cmp, ("k_cmp", "v_cmp"), num_keys, sizes)
        inputs |= {"k_cmp": k_cmp, "v_cmp": v_cmp}
    elif selecting:
        check_tensor("k_cmp", k_cmp, (q.shape[0], sizes.heads, num_keys, q.shape[3]), like=q)
    if block_indices is not None:
        if "slc" not in branches:
            raise ValueError(f"block_indices: expected None without the slc branch, got {describe(block_indices)}")
        block_indices = checked_selection(q, block_indices, sizes.heads, config)
    attention, options = _prepare(inputs, config, scale, score_mod, mask_mod, impl)
    positions = _positions(q, document_ids, config)

    out, aux = attend(
        attention,
        q,
        k,
        v,
        gates,
        k_cmp=k_cmp,
        v_cmp=v_cmp,
        k_win=k_win,
        v_win=v_win,
        positions=positions,
        window_positions=positions,
        block_indices=block_indices,
        branches=branches,
        **options,
    )
    return (out, aux) if return_aux else out


def attend(
    attention: Any,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    gates: Tensor,
    *,
    k_cmp: Tensor | None,
    v_cmp: Tensor | None,
    k_win: Tensor | None,
    v_win: Tensor | None,
    positions: Positions | None,
    window_positions: Positions | None,
    config: NSAConfig,
    scale: float,
    score_mod: ScoreMod | None = None,
    block_indices: Tensor | None = None,
    branches: Sequence[str] = BRANCHES,
) -> tuple[Tensor, NSAAux]:
    """Run the branches of an implementation and add them up; the arguments are taken to be right.

    Where :func:`native_sparse_attention` has one query for every key, here ``T`` queries stand anywhere among the
    keys: ``positions`` says where among those of the selected and the compressed branch, ``window_positions`` where
    among those of the window, which may be the last few only. Keys that no query may see may be anything finite.
    """
    options: dict[str, Any] = {"config": config, "scale": scale, "score_mod": score_mod}
    lse_cmp = None
    outputs: dict[str, Tensor] = {}
    if "cmp" in branches:
        outputs["cmp"], lse_cmp = attention.compressed_attention(q, k_cmp, v_cmp, positions, **options)
    if "slc" in branches:
        if block_indices is None:
            block_indices = attention.select_blocks(q, k_cmp, lse_cmp, positions, **options)
        outputs["slc"], _ = attention.selected_attention(q, k, v, block_indices, positions, **options)
    if "win" in branches:
        outputs["win"], _ = attention.sliding_window_attention(q, k_win, v_win, window_positions, **options)
    out = combine(gates, outputs)
    return out, NSAAux(block_indices, outputs.get("cmp"), outputs.get("slc"), outputs.get("win"), lse_cmp)


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
    attention, options = _prepare({"q": q, "k_cmp": k_cmp, "v_cmp": v_cmp}, config, scale, score_mod, mask_mod, impl)
    return attention.compressed_attention(q, k_cmp, v_cmp, _positions(q, document_ids, config), **options)


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
    _, options = _prepare({"q": q, "k_cmp": k_cmp}, config, scale, score_mod, mask_mod, "sdpa")
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        probs = group_probabilities(q, k_cmp, None, last, **options)
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
    attention, options = _prepare({"q": q}, config, scale, score_mod, mask_mod, impl)
    return attention.select_blocks(q, k_cmp, lse, _positions(q, document_ids, config), **options)


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
    block_indices = checked_selection(q, block_indices, sizes.heads, config)
    attention, options = _prepare({"q": q, "k": k, "v": v}, config, scale, score_mod, mask_mod, impl)
    return attention.selected_attention(q, k, v, block_indices, _positions(q, document_ids, config), **options)


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
    attention, options = _prepare({"q": q, "k": k, "v": v}, config, scale, score_mod, mask_mod, impl)
    return attention.sliding_window_attention(q, k, v, _positions(q, document_ids, config), **options)


def implementation(impl: str, q: Tensor, *, cached: bool = False) -> Any:
    """Choose the module that computes the branches, the one place where that is decided."""
    check_choice("impl", impl, ("auto", *IMPLEMENTATIONS))
    if impl == "auto":
        impl = "flex" if q.device.type == "cuda" else "sdpa"
    return (CACHED_IMPLEMENTATIONS if cached else IMPLEMENTATIONS)[impl]


def prepare_mods(
    score_mod: ScoreMod | None, mask_mod: MaskMod | None, x: Tensor, num_heads: int, attention: Any
) -> ScoreMod | None:
    """Check the user's mods by calling them once, and make one score_mod of them."""
    if (score_mod is None and mask_mod is None) or torch.compiler.is_compiling():
        return merge_mods(score_mod, mask_mod)
    captures_gradient = check_mods(score_mod, mask_mod, len(x), num_heads, x.device)
    if captures_gradient and x.device.type == "cpu" and attention in (flex, flex_cached):
        raise ValueError(
            "score_mod: captures a tensor that requires a gradient, and FlexAttention has no backward on a CPU; "
            "use impl='sdpa' or torch.no_grad()"
        )
    return merge_mods(score_mod, mask_mod)


def _prepare(
    inputs: dict[str, Tensor],
    config: NSAConfig,
    scale: float | None,
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    impl: str,
) -> tuple[Any, dict[str, Any]]:
    """Choose the implementation, ask it about the inputs by name, and give the options that each branch takes."""
    q = inputs["q"]
    attention, scale = implementation(impl, q), check_scale(q, scale)
    if attention is flex:
        check_inputs(**inputs)
    mod = prepare_mods(score_mod, mask_mod, q, q.shape[1], attention)
    return attention, {"config": config, "scale": scale, "score_mod": mod}


def _positions(q: Tensor, document_ids: Tensor | None, config: NSAConfig) -> Positions | None:
    """Locate the queries in their documents; ``None`` stands for one whole sequence."""
    if document_ids is None:
        return None
    check_document_ids(document_ids, q.shape[0], q.shape[2], like=q)
    return document_positions(document_ids, config)
