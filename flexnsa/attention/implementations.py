"""Which functions make an implementation, which one ``"auto"`` is, and how branches become one output (Eq. 5)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from flexnsa.argument_checks import check_mods
from flexnsa.attention import reference
from flexnsa.attention.flex import branches as flex
from flexnsa.attention.flex import decoding as flex_decoding
from flexnsa.attention.flex.kernels import check_input
from flexnsa.attention.sdpa import branches as sdpa
from flexnsa.attention.sdpa import decoding as sdpa_decoding
from flexnsa.attention.seam import Attended, Call, Compressed, Implementation, Keys, NSAAux, given
from flexnsa.attention.triton import select as triton_select
from flexnsa.attention.triton import selected as triton_selected
from flexnsa.attention.triton import window as triton_window
from flexnsa.attention.triton.decoding import operator as triton_decoding
from flexnsa.geometry import BRANCHES
from flexnsa.masks.user_mods import MaskMod, ScoreMod, merge_mods
from flexnsa.validation import check_choice

B = TypeVar("B", Attended, Compressed)

FEW_QUERIES = 64
"""Of a row on a cache: more of them have keys in common, which kernels for whole rows read once."""

REFERENCE = Implementation(reference.compressed, reference.select, reference.selected, reference.window)
SDPA = Implementation(sdpa.compressed, sdpa.select, sdpa.selected, sdpa.window)
FLEX = Implementation(
    flex.compressed, triton_select.select, flex.selected, flex.window, check_input=check_input, cpu_backward=False
)
TRITON = replace(
    FLEX,
    selected=triton_selected.selected,
    window=triton_window.window,
    check_input=triton_selected.check_input,
    takes_mods=False,
)

IMPLEMENTATIONS = {"flex": FLEX, "triton": TRITON, "sdpa": SDPA, "reference": REFERENCE}
FLEX_CACHED = replace(
    FLEX, compressed=flex_decoding.compressed, selected=flex_decoding.selected, window=flex_decoding.window
)


def _cached_selected(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call) -> Attended:
    attend_to = triton_selected.selected if _are_many(q, v, call) else flex_decoding.selected
    return attend_to(q, k, v, block_indices, call)


def _cached_window(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Attended:
    attend_to = triton_window.window if _are_many(q, v, call) else flex_decoding.window
    return attend_to(q, k, v, call)


def _are_many(q: Tensor, v: Tensor, call: Call) -> bool:
    """Tell whether queries on a cache go to the kernels of whole rows, and these can take them."""
    narrow = max(q.shape[3], v.shape[3]) <= triton_selected.LARGEST_DIM
    return q.is_cuda and q.shape[2] > FEW_QUERIES and narrow and call.score_mod is None


CACHED_IMPLEMENTATIONS = {
    "flex": FLEX_CACHED,
    "triton": replace(FLEX_CACHED, selected=_cached_selected, window=_cached_window, step=triton_decoding.step),
    "sdpa": Implementation(
        sdpa_decoding.compressed, sdpa_decoding.select, sdpa_decoding.selected, sdpa_decoding.window
    ),
    "reference": REFERENCE,
}
"""Where the keys are a cache."""


def choose_implementation(impl: str, x: Tensor, *, modded: bool, cached: bool = False) -> Implementation:
    """Choose who computes the branches of ``x``.

    ``"auto"`` is sdpa where there is no CUDA. There it is triton, except for what its kernels do not take and flex
    does: mods, and head dimensions above 256.

    Args:
        impl: the name.
        x: queries ``(B, Hq, T, Dk)``, or the input of a layer ``(B, S, dim)``.
        modded: whether the user gave a score_mod or mask_mod.
        cached: whether the keys are a cache.

    Raises:
        ValueError: there is no such implementation, or it takes no mods.
    """
    check_choice("impl", impl, ("auto", *IMPLEMENTATIONS))
    if impl == "auto":
        wide = x.dim() == 4 and x.shape[-1] > triton_selected.LARGEST_DIM
        impl = "sdpa" if x.device.type != "cuda" else "flex" if modded or wide else "triton"
    chosen = (CACHED_IMPLEMENTATIONS if cached else IMPLEMENTATIONS)[impl]
    if modded and not chosen.takes_mods:
        raise ValueError(f"impl: expected 'flex', 'sdpa' or 'reference' with a score_mod or mask_mod, got {impl!r}")
    return chosen


def prepare_mods(
    score_mod: ScoreMod | None, mask_mod: MaskMod | None, x: Tensor, num_heads: int, implementation: Implementation
) -> ScoreMod | None:
    """Check the user's mods by calling them once, and make one score_mod of them.

    Raises:
        TypeError: a mod is no function, or returns no tensor.
        ValueError: a mod returns something else than one number or truth value a pair, or needs a gradient that the
            implementation does not have on this device.
    """
    if (score_mod is None and mask_mod is None) or torch.compiler.is_compiling():
        return merge_mods(score_mod, mask_mod)
    captures_gradient = check_mods(score_mod, mask_mod, len(x), num_heads, x.device)
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
    gates: Tensor,
    call: Call,
    *,
    block_indices: Tensor | None = None,
    branches: Sequence[str] = BRANCHES,
    recompute: Sequence[str] = (),
) -> tuple[Tensor, NSAAux]:
    """Run the branches and add them up: the one way into attention. The arguments are taken to be right.

    Args:
        implementation: who computes the branches.
        q: ``(B, Hq, T, Dk)``; the queries may stand anywhere among the keys, see :class:`Call`.
        keys: of the branches. Those that no query may see may be anything finite.
        gates: ``(B, Hq, T, 3)``.
        call: what the branches share.
        block_indices: int32 ``(B, Hkv, T, n)``, ascending, padded right with -1; None to select.
        branches: those to compute.
        recompute: those of which only the inputs are kept for backward. The selection is kept in any case.

    Returns:
        ``out (B, Hq, T, Dv)`` in the dtype of q, and what the branches gave.
    """
    read = {
        "cmp": {"k_cmp": keys.k_cmp, "v_cmp": keys.v_cmp},
        "slc": {"k": keys.k_slc, "v": keys.v_slc},
        "win": {"k_win": keys.k_win, "v_win": keys.v_win},
    }
    implementation.check(q=q)
    for tag in branches:
        implementation.check(**read[tag])
    gate = dict(zip(BRANCHES, gates.unbind(-1), strict=True))
    outputs: dict[str, Tensor] = {}
    products: dict[str, Tensor] = {}

    def run(tag: str, branch: Callable[..., B], *inputs: Tensor) -> B:
        if tag in recompute and torch.is_grad_enabled():
            products[tag], attended = _recomputed(branch, gate[tag], (q, *inputs), call)
        else:
            attended = branch(q, *inputs, call)
        outputs[tag] = attended.out
        return attended

    lse = importance = None
    if "cmp" in branches:
        _, lse, importance = run("cmp", implementation.compressed, given(keys.k_cmp), given(keys.v_cmp))
    if "slc" in branches:
        if block_indices is None:
            block_indices = implementation.select(q, given(keys.k_cmp), call, lse, importance)
        run("slc", implementation.selected, given(keys.k_slc), given(keys.v_slc), block_indices)
    if "win" in branches:
        run("win", implementation.window, given(keys.k_win), given(keys.v_win))
    aux = NSAAux(block_indices, outputs.get("cmp"), outputs.get("slc"), outputs.get("win"), lse)
    terms = (products[tag] if tag in products else gated(gate[tag], out) for tag, out in outputs.items())
    return functools.reduce(operator.add, terms), aux


def gated(gate: Tensor, out: Tensor) -> Tensor:
    """Weigh the output of a branch ``(B, Hq, S, Dv)`` by its gate ``(B, Hq, S)``: a term of the sum (Eq. 5)."""
    return gate.to(out.dtype)[..., None] * out


def _recomputed(branch: Callable[..., B], gate: Tensor, inputs: Sequence[Tensor], call: Call) -> tuple[Tensor, B]:
    """Run a branch that is run again in backward, and weigh it: the gradient of its gate needs its output too."""

    def run(gate: Tensor, *inputs: Tensor) -> tuple[Tensor, B]:
        attended = branch(*inputs, call)
        return gated(gate, attended.out), attended

    return cast("tuple[Tensor, B]", checkpoint(run, gate, *inputs, use_reentrant=False, preserve_rng_state=False))
