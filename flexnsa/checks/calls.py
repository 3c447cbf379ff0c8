"""Checks of arguments that must fit each other; all of them run before any work is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexnsa.config import BRANCHES, NSAConfig, num_blocks
from flexnsa.primitives import (
    check_has_values,
    check_integers,
    check_number,
    check_positive_int,
    check_tensor,
    check_type,
    describe,
    may_look,
)


def check_branches(branches: Sequence[str]) -> tuple[str, ...]:
    """Check that ``branches`` names branches, each once, and return them in canonical order."""
    if not isinstance(branches, Sequence):
        raise TypeError(f"branches: expected a sequence of {BRANCHES}, got {describe(branches)}")
    known = [tag for tag in branches if isinstance(tag, str) and tag in BRANCHES]
    if isinstance(branches, str) or not known or len({*known}) < len(branches):
        raise ValueError(f"branches: expected some of {BRANCHES}, each once, got {describe(branches)}")
    return tuple(tag for tag in BRANCHES if tag in branches)


def check_option(name: str, value: bool, about: Sequence[str], branches: Sequence[str]) -> bool:
    """Check that an option is a bool, and False without the branches that it is about."""
    check_type(name, value, bool)
    if value and not {*about} <= {*branches}:
        raise ValueError(f"{name}: expected False without the branches {' and '.join(about)}, got {value}")
    return value


def check_recompute(recompute: Sequence[str], branches: Sequence[str]) -> tuple[str, ...]:
    """Check that ``recompute`` names some of ``branches``, or none, and return them in canonical order."""
    if not isinstance(recompute, Sequence):
        raise TypeError(f"recompute: expected a sequence of {branches}, got {describe(recompute)}")
    known = [tag for tag in recompute if isinstance(tag, str) and tag in branches]
    if isinstance(recompute, str) or len({*known}) < len(recompute):
        raise ValueError(f"recompute: expected some of {branches}, each once, or none, got {describe(recompute)}")
    return tuple(tag for tag in branches if tag in recompute)


class Sizes(NamedTuple):
    """Sizes that all branches share; a name stands for one that is not known yet."""

    heads: int | str = "Hkv"
    v_dim: int | str = "Dv"


def check_queries(q: Tensor, config: NSAConfig) -> None:
    """Check that q is ``(B, Hq, S, Dk)`` without an empty dimension, and that ``config`` is one."""
    check_type("config", config, NSAConfig)
    check_tensor("q", q, ("B", "Hq", "S", "Dk"))
    if 0 in q.shape:
        raise ValueError(f"q: expected no empty dimension, got {tuple(q.shape)}")


def check_keys(q: Tensor, k: Any, v: Any, names: tuple[str, str], length: int, sizes: Sizes | None = None) -> Sizes:
    """Check that the keys and values of a branch fit q and the ``sizes`` of the branches before; return the sizes."""
    sizes = sizes or Sizes()
    check_tensor(names[0], k, (q.shape[0], sizes.heads, length, q.shape[3]), like=q)
    check_group(names[0], q, k)
    check_tensor(names[1], v, (*k.shape[:3], sizes.v_dim), like=q)
    return Sizes(k.shape[1], v.shape[3])


def check_no_indexer(name: str, config: NSAConfig) -> None:
    """Check that a config has no indexer, for what cannot score blocks by one."""
    if config.index_heads is not None:
        raise ValueError(f"{name}: expected index_heads=None, as no indexer can score here, got {config.index_heads}")


def check_group(name: str, q: Tensor, k: Tensor) -> None:
    """Check that the number of heads of k divides that of q."""
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{name}: expected a number of heads that divides the {q.shape[1]} of q, got {k.shape[1]}")


def check_block_indices(block_indices: Tensor, *, config: NSAConfig, seq_len: int) -> None:
    """Check that every row is ascending, unique, within the sequence and padded with -1 on the right.

    Attention does this check itself on a CPU. On other devices it would synchronise, so call this function for
    block_indices of your own. A block that starts after its query, or after the end of its document, is allowed: it
    shows no key. Unchecked invalid indices give undefined output, never out-of-bounds reads.

    Raises:
        TypeError: not a tensor.
        ValueError: wrong shape or dtype, or an invalid row; the message shows the first one.
    """
    check_type("config", config, NSAConfig)
    check_positive_int("seq_len", seq_len)
    check_tensor("block_indices", block_indices, ("B", "Hkv", "T", config.num_selected_blocks), dtype=torch.int32)
    check_has_values("block_indices", block_indices)
    last = num_blocks(seq_len, config)
    keys = block_indices.masked_fill(block_indices == -1, last)  # padding sorts after every block
    ascends = (keys[..., 1:] > keys[..., :-1]) | (keys[..., 1:] == last)
    wrong = ((keys < 0) | (keys > last)).any(-1) | ~ascends.all(-1) | (block_indices == last).any(-1)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"block_indices: expected rows of ascending blocks below {last}, each once, then -1, "
            f"got {block_indices[at].tolist()} at {list(at)}"
        )


def check_document_ids(document_ids: Tensor, batch: int | str, seq_len: int | str, like: Tensor | None = None) -> None:
    """Check that ids are int ``(B, S)`` on the device of q and, on a CPU, that they never decrease.

    Raises:
        TypeError: not a tensor.
        ValueError: wrong shape or dtype, or decreasing.
    """
    check_integers("document_ids", document_ids, (batch, seq_len), like=like)
    if may_look(document_ids):
        falls = (document_ids[:, 1:] < document_ids[:, :-1]).nonzero()
        if len(falls):
            row, at = falls[0].tolist()
            before, after = document_ids[row, at : at + 2].tolist()
            raise ValueError(
                f"document_ids: expected ids that never decrease, got {before} before {after} at [{row}, {at}]"
            )


def check_positions(positions: Tensor, *, seq_len: int) -> None:
    """Check that positions are in ``[0, seq_len)`` and increase from query to query.

    Attention does this check itself on a CPU. On other devices it would synchronise, so call this function for
    positions of your own. Unchecked invalid positions give undefined output, never out-of-bounds reads.

    Raises:
        TypeError: not a tensor.
        ValueError: neither ``(T,)`` nor ``(B, T)``, neither int32 nor int64, out of range, or not increasing; the
            message shows where.
    """
    _check_shape_of_positions(positions, "T", "B")
    check_positive_int("seq_len", seq_len)
    check_has_values("positions", positions)
    rows = torch.atleast_2d(positions)
    outside = ((rows < 0) | (rows >= seq_len)).nonzero()
    if len(outside):
        row, at = outside[0].tolist()
        raise ValueError(f"positions: expected 0 .. {seq_len - 1}, got {rows[row, at]} at query {at} of row {row}")
    falls = (rows[:, 1:] <= rows[:, :-1]).nonzero()
    if len(falls):
        row, at = falls[0].tolist()
        before, after = rows[row, at : at + 2].tolist()
        raise ValueError(
            f"positions: expected tokens that increase, got {before} before {after} at query {at} of row {row}"
        )


def checked_positions(q: Tensor, positions: Tensor, seq_len: int) -> Tensor:
    """Check the positions of queries, ``(S,)`` or ``(B, S)``, and return them.

    Where reading them would synchronise, they are clamped to ``[0, seq_len)`` instead.
    """
    _check_shape_of_positions(positions, q.shape[2], q.shape[0], q)
    if seq_len == 0:
        raise ValueError("positions: expected at least one key, got none")
    if may_look(positions):
        check_positions(positions, seq_len=seq_len)
        return positions
    return positions.clamp(0, seq_len - 1)


def _check_shape_of_positions(
    positions: Tensor, length: int | str, batch: int | str, like: Tensor | None = None
) -> None:
    one_for_all = isinstance(positions, Tensor) and positions.dim() == 1
    check_integers("positions", positions, (length,) if one_for_all else (batch, length), like=like)


def count_tokens(
    q: Tensor, keys: tuple[str, Any] | None, k_cmp: Any, document_ids: Tensor | None, config: NSAConfig
) -> int:
    """Return the sequence length of a call with ``positions``, which may have fewer queries than keys.

    It is that of the named keys. Where only compressed keys are read, it is that of ``document_ids``, or the longest
    that has so many compressed keys.
    """
    name, k = ("k_cmp", k_cmp) if keys is None else keys
    check_tensor(name, k, (q.shape[0], "Hkv", "S" if keys else "N", q.shape[3]), like=q)
    if keys:
        return k.shape[2]
    if document_ids is not None:
        check_document_ids(document_ids, q.shape[0], "S", like=q)
        return document_ids.shape[1]
    return k.shape[2] * config.compress_stride + config.compress_block_size - 1


def checked_selection(q: Tensor, block_indices: Tensor, heads: int | str, seq_len: int, config: NSAConfig) -> Tensor:
    """Check block indices ``(B, Hkv, S, n)``, see :func:`check_block_indices`, and return them.

    Where reading them would synchronise, they are clamped instead: a negative index becomes padding, one too large the
    block after the last, which is in every query's future. Whatever the values, nothing but the keys is read and no
    product of an index overflows.
    """
    shape = (q.shape[0], heads, q.shape[2], config.num_selected_blocks)
    check_tensor("block_indices", block_indices, shape, like=q, dtype=torch.int32)
    if may_look(block_indices):
        check_block_indices(block_indices, config=config, seq_len=seq_len)
        return block_indices
    return block_indices.clamp(-1, num_blocks(seq_len, config))


def check_scale(q: Tensor, scale: float | None, name: str = "scale") -> float:
    """Check that a scale is a finite number of any sign and return it, or ``Dk ** -0.5`` for None."""
    if scale is None:
        return q.shape[-1] ** -0.5
    check_number(name, scale)
    return float(scale)


def check_mods(score_mod: Any, mask_mod: Any, batch: int, num_heads: int, device: torch.device) -> bool:
    """Check that mods return one number or one bool, by calling each for two (query, key) pairs as FlexAttention does.

    Returns:
        Whether score_mod captured a tensor that requires a gradient.
    """
    ends = torch.arange(2, dtype=torch.int32, device=device)
    zero = ends * 0
    pair = (ends * (batch - 1), ends * (num_heads - 1), zero, zero)  # the first and the last batch element and head
    score = torch.zeros(2, device=device)
    if mask_mod is not None:
        _call_once("mask_mod", mask_mod, "torch.bool", lambda dtype: dtype == torch.bool, *pair)
    if score_mod is None:
        return False
    floating = "a floating dtype"
    return _call_once(
        "score_mod", score_mod, floating, lambda dtype: dtype.is_floating_point, score, *pair
    ).requires_grad


def _call_once(name: str, mod: Any, expected: str, fits: Callable[[torch.dtype], bool], *arguments: Tensor) -> Tensor:
    if not callable(mod):
        raise TypeError(f"{name}: expected a function, got {describe(mod)}")

    def checked(*arguments: Tensor) -> Tensor:
        try:
            result = mod(*arguments)
        except Exception as error:
            signature = f"{'score, ' if len(arguments) == 5 else ''}b, h, q_idx, kv_idx"
            problem = f"{type(error).__name__}: {error}"
            raise ValueError(f"{name}: expected a function of tensors ({signature}), got {problem}") from error
        if not isinstance(result, Tensor):
            raise TypeError(f"{name}: expected it to return a tensor, got {describe(result)}")
        if result.shape:
            raise ValueError(
                f"{name}: expected it to return one value for one query and key, shape (), got {tuple(result.shape)}"
            )
        if not fits(result.dtype):
            raise ValueError(f"{name}: expected it to return {expected}, got {result.dtype}")
        return result

    return torch.vmap(checked)(*arguments)
