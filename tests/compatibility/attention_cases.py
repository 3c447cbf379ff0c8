"""Ten calls of the attention functions, said with public names only, so that every version of flexnsa can run them.

Each gives its outputs, every lse, the selected blocks and every gradient, as named tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import flexnsa
from flexnsa import NSAConfig, mods

SMALL = NSAConfig(compress_block_size=8, compress_stride=4, select_block_size=16, num_selected_blocks=4, window_size=24)
PAPER = NSAConfig(num_selected_blocks=6, window_size=200)
UNFORCED = replace(SMALL, num_init_blocks=0, num_local_blocks=0, num_selected_blocks=2)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of the tensors, and what else is asked of ``native_sparse_attention``.

    Args:
        documents: lengths of the documents of each packed row; their sum is ``seq_len``.
        score_mod: ``"slopes"`` or ``"bias"``: a score mod that captures a tensor, which gets a gradient.
        mask_mod: hide a few keys.
        window_shares_keys: leave ``k_win, v_win`` to their default, which is ``k, v``.
    """

    seq_len: int
    kv_heads: int = 2
    group: int = 2
    key_dim: int = 16
    value_dim: int = 16
    config: NSAConfig = SMALL
    documents: tuple[tuple[int, ...], ...] = ((),)
    score_mod: str | None = None
    mask_mod: bool = False
    window_shares_keys: bool = False
    options: dict[str, Any] = field(default_factory=dict)


ATTENTION_CASES = {
    "one token": Case(seq_len=1),
    "before the first compressed token": Case(seq_len=7, group=4, value_dim=24, documents=((), ())),
    "every query a group of its own": Case(seq_len=130, group=1, documents=((), ())),
    "groups of 6, values wider than keys": Case(seq_len=130, kv_heads=1, group=6, value_dim=24),
    "groups of 16, no block forced": Case(seq_len=77, kv_heads=1, group=16, key_dim=24, config=UNFORCED),
    "more blocks allowed than there are": Case(seq_len=77, group=8, config=replace(SMALL, num_selected_blocks=64)),
    "block sizes of the paper": Case(seq_len=603, group=4, key_dim=64, value_dim=32, config=PAPER),
    "packed rows": Case(seq_len=150, documents=((5, 70, 1, 74), (150,)), options={"scale": 0.4}),
    "learned slopes, two branches": Case(
        seq_len=130, score_mod="slopes", window_shares_keys=True, options={"branches": ("cmp", "slc")}
    ),
    "learned bias and hidden keys in packed rows": Case(
        seq_len=150, group=4, documents=((90, 60), (33, 117)), score_mod="bias", mask_mod=True
    ),
}


def run_attention_case(case: Case, impl: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Give all that a case computes, each tensor under a name."""
    inputs = _inputs(case, dtype)
    captured, given = _mods(case, inputs["q"].shape[1], dtype)
    shared = {"config": case.config, "impl": impl, **given, **{k: v for k, v in case.options.items() if k == "scale"}}
    if any(case.documents):
        shared["document_ids"] = _document_ids(case)
    windows = () if case.window_shares_keys else ("k_win", "v_win")
    keys = {name: inputs[name] for name in ("k_cmp", "v_cmp", *windows)}
    q, k, v = (inputs[name] for name in ("q", "k", "v"))

    out, aux = flexnsa.native_sparse_attention(
        q, k, v, inputs["gates"], **keys, **{**shared, **case.options}, return_aux=True
    )
    assert isinstance(aux, flexnsa.NSAAux)
    (out * _waves(out)).sum().backward()
    leaves = inputs | captured
    found = {"out": out, **{f"aux.{name}": value for name, value in aux._asdict().items()}}
    found |= {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}
    with torch.no_grad():
        found["cmp"], found["lse of cmp"] = flexnsa.compressed_attention(q, inputs["k_cmp"], inputs["v_cmp"], **shared)
        blocks = found["blocks"] = flexnsa.select_blocks(q, inputs["k_cmp"], **shared)
        found["slc"], found["lse of slc"] = flexnsa.selected_attention(q, k, v, blocks, **shared)
        found["win"], found["lse of win"] = flexnsa.sliding_window_attention(
            q, inputs["k_win"], inputs["v_win"], **shared
        )
    return {name: value.detach() for name, value in found.items() if value is not None}


def _inputs(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random leaves, drawn in fp64 and then rounded, so that every precision computes the same problem."""
    generator = torch.Generator().manual_seed(0)
    heads, batch, length = case.kv_heads * case.group, len(case.documents), case.seq_len
    num_keys = max(0, (length - case.config.compress_block_size) // case.config.compress_stride + 1)
    shapes = {
        "q": (batch, heads, length, case.key_dim),
        "k": (batch, case.kv_heads, length, case.key_dim),
        "v": (batch, case.kv_heads, length, case.value_dim),
        "k_cmp": (batch, case.kv_heads, num_keys, case.key_dim),
        "v_cmp": (batch, case.kv_heads, num_keys, case.value_dim),
        "k_win": (batch, case.kv_heads, length, case.key_dim),
        "v_win": (batch, case.kv_heads, length, case.value_dim),
        "gates": (batch, heads, length, 3),
    }
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    drawn["q"] *= 2
    drawn["gates"] = drawn["gates"].sigmoid()
    return {name: x.to(dtype).requires_grad_() for name, x in drawn.items()}


def _mods(case: Case, num_heads: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Give the tensors that the mods capture, and the mods."""
    captured: dict[str, Tensor] = {}
    given: dict[str, Any] = {}
    if case.score_mod == "slopes":
        captured["slopes"] = mods.alibi_slopes(num_heads).to(dtype).requires_grad_()
        given["score_mod"] = mods.chain(mods.alibi(captured["slopes"]), mods.soft_cap(4.0))
    elif case.score_mod == "bias":
        captured["bias"] = _waves(torch.empty(num_heads, 40, dtype=dtype)).requires_grad_()
        given["score_mod"] = mods.distance_bias(captured["bias"])
    if case.mask_mod:
        given["mask_mod"] = mods.banned_span(20, 31)
    return captured, given


def _document_ids(case: Case) -> Tensor:
    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in case.documents]
    return torch.stack(rows).to(torch.int32)


def _waves(x: Tensor) -> Tensor:
    """Give numbers in (-1, 1) of the shape and dtype of x, the same on every machine to the last bits of a cosine."""
    return torch.arange(x.numel(), dtype=torch.float64).cos().to(x.dtype).view(x.shape)
