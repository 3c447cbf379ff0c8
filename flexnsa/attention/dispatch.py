"""The table of implementations, the choice of ``"auto"``, and the sum of the branches (Eq. 5)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from flexnsa.attention import reference
from flexnsa.attention.flex import branches as flex
from flexnsa.attention.flex import cached as flex_cached
from flexnsa.attention.flex.kernels import check_input
from flexnsa.attention.interface import BranchOutput, Call, Compressed, Implementation, Keys, NSAAux, Scorer, given
from flexnsa.attention.plan import Plan, choose_name
from flexnsa.attention.sdpa import branches as sdpa
from flexnsa.attention.sdpa import cached as sdpa_decoding
from flexnsa.attention.selection_loss import selection_loss
from flexnsa.attention.triton import intervals as triton_intervals
from flexnsa.attention.triton import selected as triton_selected
from flexnsa.attention.triton import selection as triton_select
from flexnsa.attention.triton import selection_loss as triton_selection_loss
from flexnsa.attention.triton import step as triton_step
from flexnsa.attention.triton.arguments import require_device
from flexnsa.attention.triton.gated import gated_sum
from flexnsa.checks.calls import check_mods
from flexnsa.config import BRANCHES
from flexnsa.masks.user_mods import MaskMod, ScoreMod, cap_of, merge_mods
from flexnsa.operators.opaque import in_transform
from flexnsa.primitives import check_choice

B = TypeVar("B", BranchOutput, Compressed)

REFERENCE = Implementation(
    reference.compressed, reference.select, reference.selected, reference.window, reference.selection_loss
)
SDPA = Implementation(sdpa.compressed, sdpa.select, sdpa.selected, sdpa.window, selection_loss)


def _compressed(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: Call) -> Compressed:
    plan = Plan.of(q, k_cmp, v_cmp)
    return (triton_intervals if plan.compressed_in_triton else flex).compressed(q, k_cmp, v_cmp, call)


FLEX = Implementation(
    flex.compressed,
    triton_select.select,
    flex.selected,
    flex.window,
    triton_selection_loss.selection_loss,
    check_input=check_input,
    cpu_backward=False,
)
TRITON = replace(
    FLEX,
    compressed=_compressed,
    selected=triton_selected.selected,
    window=triton_intervals.window,
    check_input=triton_selected.check_input,
    gated_sum=gated_sum,
)

IMPLEMENTATIONS = {"flex": FLEX, "triton": TRITON, "sdpa": SDPA, "reference": REFERENCE}
FLEX_CACHED = replace(FLEX, compressed=flex_cached.compressed, selected=flex_cached.selected, window=flex_cached.window)


def _cached_compressed(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: Call) -> Compressed:
    shared = Plan.of(q, k_cmp, v_cmp, has_mod=cap_of(call.score_mod) is None).share_keys
    return (_compressed if shared else flex_cached.compressed)(q, k_cmp, v_cmp, call)


def _cached_selected(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call) -> BranchOutput:
    size = call.config.select_block_size
    shared = Plan.of(q, k, v, has_mod=cap_of(call.score_mod) is None, block_size=size).share_keys
    return (triton_selected.selected if shared else flex_cached.selected)(q, k, v, block_indices, call)


def _cached_window(q: Tensor, k: Tensor, v: Tensor, call: Call) -> BranchOutput:
    shared = Plan.of(q, k, v, has_mod=cap_of(call.score_mod) is None).share_keys
    return (triton_intervals.window if shared else flex_cached.window)(q, k, v, call)


def _check_cached(name: str, x: Tensor) -> None:
    require_device(x, name)
    check_input(name, x)


CACHED_IMPLEMENTATIONS = {
    "flex": FLEX_CACHED,
    "triton": replace(
        FLEX_CACHED,
        compressed=_cached_compressed,
        selected=_cached_selected,
        window=_cached_window,
        check_input=_check_cached,
        step=triton_step.step,
    ),
    "sdpa": Implementation(
        sdpa_decoding.compressed, sdpa_decoding.select, sdpa_decoding.selected, sdpa_decoding.window, selection_loss
    ),
    "reference": REFERENCE,
}
"""Implementations where the keys are a cache."""


def choose_implementation(
    impl: str, x: Tensor, *, modded: bool, cached: bool = False, v_dim: int = 0
) -> Implementation:
    """Choose the implementation for ``x``; :func:`flexnsa.attention.plan.choose_name` resolves ``"auto"``.

    Args:
        impl: the name.
        x: queries ``(B, Hq, T, Dk)``, or the input of a layer ``(B, S, dim)``, which does not tell ``Dk``.
        modded: whether the user gave mods that need FlexAttention on a GPU.
        cached: whether the keys are a cache.
        v_dim: ``Dv``, where it is known.

    Raises:
        ValueError: the name is unknown, or the implementation does not take such mods.
    """
    check_choice("impl", impl, ("auto", *IMPLEMENTATIONS))
    largest_dim = max(x.shape[-1], v_dim) if x.dim() == 4 else 0
    impl = choose_name(impl, is_cuda=x.device.type == "cuda", modded=modded, largest_dim=largest_dim)
    if modded and impl == "triton":
        raise ValueError(f"impl: expected 'flex', 'sdpa' or 'reference' with mods other than soft_cap, got {impl!r}")
    return (CACHED_IMPLEMENTATIONS if cached else IMPLEMENTATIONS)[impl]


def prepare_mods(
    score_mod: ScoreMod | None, mask_mod: MaskMod | None, x: Tensor, num_heads: int, implementation: Implementation
) -> ScoreMod | None:
    """Check the user's mods by calling them once, and merge them into one score_mod.

    Raises:
        TypeError: a mod is no function, or returns no tensor.
        ValueError: a mod returns something else than one number or truth value a pair, or needs a gradient that the
            implementation does not have on this device.
    """
    if (score_mod is None and mask_mod is None) or torch.compiler.is_compiling():
        return merge_mods(score_mod, mask_mod)
    captures_gradient = check_mods(score_mod, mask_mod, x.shape[0], num_heads, x.device)
    if captures_gradient and x.device.type == "cpu" and not implementation.cpu_backward:
        raise ValueError(
            "score_mod: captures a tensor that requires a gradient, and FlexAttention has no backward on a CPU; "
            "use impl='sdpa' or torch.no_grad()"
        )
    return merge_mods(score_mod, mask_mod)


def attend(
    implementation: Implementation,
    q: Tensor,
    keys: Keys,
    gates: Mapping[str, Tensor],
    call: Call,
    *,
    block_indices: Tensor | None = None,
    indexer: Scorer | None = None,
    branches: Sequence[str] = BRANCHES,
    recompute: Sequence[str] = (),
    nonnegative: bool = False,
    by_token: bool = False,
) -> tuple[Tensor, NSAAux]:
    """Run the branches and add them up: the one way into attention. The arguments are taken to be right.

    Args:
        implementation: computes the branches.
        q: ``(B, Hq, T, Dk)``; the queries may have any positions among the keys, see :class:`Call`.
        keys: of the branches. Those that no query sees may have any finite values.
        gates: by branch, ``(B, Hq, T)``; a branch that has none has weight 1.
        call: what the branches share.
        block_indices: int32 ``(B, Hkv, T, n)``, ascending, padded right with -1; None to select.
        indexer: scores the blocks; None for the compressed branch.
        branches: those to compute.
        recompute: those that are computed again in backward from their inputs. The selection is never recomputed.
        nonnegative: whether no gate can be negative. Some implementations then add up the branches faster; only
            ``out`` has gradients there.
        by_token: whether the caller will join the heads of a token, which then best lie side by side in memory.

    Returns:
        ``out (B, Hq, T, Dv)`` in the dtype of q, and the results of the branches.
    """
    of_branch = {
        "cmp": {"k_cmp": keys.k_cmp, "v_cmp": keys.v_cmp},
        "slc": {"k": keys.k_slc, "v": keys.v_slc},
        "win": {"k_win": keys.k_win, "v_win": keys.v_win},
    }
    implementation.check(q=q)
    for tag in branches:
        implementation.check(**of_branch[tag])
    outputs: dict[str, Tensor] = {}
    products: dict[str, Tensor] = {}

    # Transforms of torch.func have no saved-tensor hooks for recomputation; results are the same without it.
    if in_transform() or not torch.is_grad_enabled():
        recompute = ()
    select = functools.partial(_select, implementation, q, keys, call, block_indices, indexer)
    if nonnegative and "slc" not in recompute and {"cmp", "slc"} <= {*branches} <= {"slc", *gates}:
        if "win" not in branches:
            keys = replace(keys, k_win=None, v_win=None)
        attend_gated = implementation.gated_sum(q, keys, call)
        if attend_gated is not None:
            with torch.no_grad():
                compressed = implementation.compressed(q, given(keys.k_cmp), given(keys.v_cmp), call)
                blocks = select(compressed)
            weights = {tag: gate.to(q.dtype) for tag, gate in gates.items() if tag in branches}
            out, slc, win = attend_gated(q, keys, weights, blocks, compressed, call, by_token, recompute)
            kept, win = slc if "slc" in gates else None, win if "win" in branches else None
            return out, NSAAux(blocks, compressed.out, kept, win, compressed.lse)

    def again(tag: str, branch: Callable[..., B], *inputs: Tensor) -> B:
        products[tag], attended = _recomputed(branch, gates.get(tag), inputs, call)
        return attended

    compressed, by = None, implementation
    if "cmp" in branches:
        of_cmp = q, given(keys.k_cmp), given(keys.v_cmp)
        compressed = again("cmp", by.compressed, *of_cmp) if "cmp" in recompute else by.compressed(*of_cmp, call)
        outputs["cmp"] = compressed.out
    # A GPU attends to the window while the host prepares the many kernels that follow.
    if "win" in branches:
        of_win = q, given(keys.k_win), given(keys.v_win)
        window = again("win", by.window, *of_win) if "win" in recompute else by.window(*of_win, call)
        outputs["win"] = window.out
    if "slc" in branches:
        block_indices = select(compressed)
        of_slc = q, given(keys.k_slc), given(keys.v_slc), block_indices
        selected = again("slc", by.selected, *of_slc) if "slc" in recompute else by.selected(*of_slc, call)
        outputs["slc"] = selected.out
    lse = None if compressed is None else compressed.lse
    aux = NSAAux(block_indices, outputs.get("cmp"), outputs.get("slc"), outputs.get("win"), lse)
    terms = (products[tag] if tag in products else gated(gates.get(tag), outputs[tag]) for tag in branches)
    return functools.reduce(operator.add, terms), aux


def _select(
    implementation: Implementation,
    q: Tensor,
    keys: Keys,
    call: Call,
    block_indices: Tensor | None,
    indexer: Scorer | None,
    compressed: Compressed | None,
) -> Tensor:
    """Return the blocks that were given, or that an indexer or the compressed branch scores highest."""
    if block_indices is not None:
        return block_indices
    if indexer is not None:
        return implementation.select(indexer.q, indexer.k, indexer.call, None, None)
    lse, importance = (None, None) if compressed is None else (compressed.lse, compressed.importance)
    return implementation.select(q, given(keys.k_cmp), call, lse, importance)


def by_branch(gates: Tensor) -> dict[str, Tensor]:
    """Return gates ``(B, Hq, T, 3)`` by branch, as :func:`attend` takes them.

    Compiled code gets copies: Inductor may overwrite an activation of the caller while it still needs views of it.
    """
    each = gates.unbind(-1)
    return dict(zip(BRANCHES, map(torch.clone, each) if torch.compiler.is_compiling() else each, strict=True))


def gated(gate: Tensor | None, out: Tensor) -> Tensor:
    """Multiply the output of a branch ``(B, Hq, S, Dv)`` by its gate ``(B, Hq, S)``: a term of the sum (Eq. 5)."""
    return out if gate is None else gate.to(out.dtype)[..., None] * out


def _recomputed(
    branch: Callable[..., B], gate: Tensor | None, inputs: Sequence[Tensor], call: Call
) -> tuple[Tensor, B]:
    """Compute a gated branch under a checkpoint, the gate included, whose gradient needs the branch's output."""

    def run(gate: Tensor | None, *inputs: Tensor) -> tuple[Tensor, B]:
        attended = branch(*inputs, call)
        return gated(gate, attended.out), attended

    return cast("tuple[Tensor, B]", checkpoint(run, gate, *inputs, use_reentrant=False, preserve_rng_state=False))
