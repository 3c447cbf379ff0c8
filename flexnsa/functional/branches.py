"""Each branch on its own: compressed tokens, selected blocks, sliding window."""

from __future__ import annotations

from torch import Tensor

from flexnsa.checks.calls import check_keys, check_queries, checked_selection
from flexnsa.config import NSAConfig, num_compressed
from flexnsa.functional.calls import prepare
from flexnsa.masks.user_mods import MaskMod, ScoreMod


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
    """Attend to the compressed tokens of which all tokens are in the past (NSA paper, section 3.3.1).

    Args:
        q: ``(B, Hq, S, Dk)``.
        k_cmp: ``(B, Hkv, N, Dk)``, ``N = max(0, (S - l) // d + 1)``.
        v_cmp: ``(B, Hkv, N, Dv)``.
        config: provides ``l`` and ``d``.
        scale: factor on the scores, by default ``Dk ** -0.5``.
        document_ids: as in :func:`native_sparse_attention`.
        score_mod: as in :func:`native_sparse_attention`.
        mask_mod: as in :func:`native_sparse_attention`.
        impl: as in :func:`native_sparse_attention`.

    Returns:
        ``(out, lse)``: ``(B, Hq, S, Dv)`` and ``(B, Hq, S)``, natural log, fp32; 0 and ``-inf`` for the first
        ``l - 1`` queries, which see no key. lse is ``None`` from flex on a CPU, which has none.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument does not fit the others; the message names it.
    """
    check_queries(q, config)
    check_keys(q, k_cmp, v_cmp, ("k_cmp", "v_cmp"), num_compressed(q.shape[2], config))
    implementation, call = prepare(q, config, scale, document_ids, score_mod, mask_mod, impl, v_cmp)
    implementation.check(q=q, k_cmp=k_cmp, v_cmp=v_cmp)
    out, lse, _ = implementation.compressed(q, k_cmp, v_cmp, call)
    return out, lse


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
        block_indices: int32 ``(B, Hkv, S, n)``, ascending, unique, padded with -1, as from :func:`select_blocks`.
        config: provides ``l'``.
        scale: factor on the scores, by default ``Dk ** -0.5``.
        document_ids: as in :func:`native_sparse_attention`.
        score_mod: as in :func:`native_sparse_attention`.
        mask_mod: as in :func:`native_sparse_attention`.
        impl: as in :func:`native_sparse_attention`.

    Returns:
        ``(out, lse)``: ``(B, Hq, S, Dv)`` and ``(B, Hq, S)``, natural log, fp32; 0 and ``-inf`` for a query without a
        block. lse is ``None`` from flex on a CPU, which has none.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument does not fit the others; the message names it.
    """
    check_queries(q, config)
    sizes = check_keys(q, k, v, ("k", "v"), q.shape[2])
    block_indices = checked_selection(q, block_indices, sizes.heads, q.shape[2], config)
    implementation, call = prepare(q, config, scale, document_ids, score_mod, mask_mod, impl, v)
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
        config: provides ``w``.
        scale: factor on the scores, by default ``Dk ** -0.5``.
        document_ids: as in :func:`native_sparse_attention`.
        score_mod: as in :func:`native_sparse_attention`.
        mask_mod: as in :func:`native_sparse_attention`.
        impl: as in :func:`native_sparse_attention`.

    Returns:
        ``(out, lse)``: ``(B, Hq, S, Dv)`` and ``(B, Hq, S)``, natural log, fp32. lse is ``None`` from flex on a CPU,
        which has none.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument does not fit the others; the message names it.
    """
    check_queries(q, config)
    check_keys(q, k, v, ("k", "v"), q.shape[2])
    implementation, call = prepare(q, config, scale, document_ids, score_mod, mask_mod, impl, v)
    implementation.check(q=q, k=k, v=v)
    return implementation.window(q, k, v, call)
