"""Right calls of attention, its compressors, the layer and its cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import flexnsa
from flexnsa import NSAConfig
from flexnsa.operators.checkpointing import keep_selection
from tests.support.inputs import SMALL, make_inputs
from tests.support.right_calls.call import HEADS, IDS, Call, config_fields, near, shift

X = {name: x.float() for name, x in make_inputs(20, batch=2, dtype=torch.float32).named().items()}
BLOCKS = flexnsa.select_blocks(X["q"], X["k_cmp"], config=SMALL)
LAYER = flexnsa.NativeSparseAttention(16, 4, 2, 4, config=SMALL).requires_grad_(False)
OPTIONS = {"config": SMALL, "scale": 0.25, "document_ids": IDS, "score_mod": shift, "mask_mod": near, "impl": "sdpa"}
INDEXED = replace(SMALL, index_block_size=4, index_stride=4, index_heads=1)
INDEX = {"q_index": torch.ones(2, 2, 20, 8), "k_cmp": torch.ones(2, 2, 5, 8)}
OPTIONAL = ("scale", "document_ids", "score_mod", "mask_mod")
SIZES = {"num_kv_heads": 2, "head_dim": 16, "config": SMALL}
COMPRESSED = X["k"][:, :, :18]


def like_q(result: Any, arguments: dict[str, Any]) -> bool:
    q, v = arguments["q"], arguments.get("v", arguments.get("v_cmp"))
    out = result[0] if isinstance(result, tuple) else result
    width = v.shape[-1] if isinstance(v, Tensor) else out.shape[-1]
    return out.shape == (*q.shape[:3], width) and out.dtype == q.dtype


def scalar(result: Tensor, arguments: dict[str, Any]) -> bool:  # noqa: ARG001
    return result.shape == () and result.dtype == torch.float32


def new_cache() -> flexnsa.NSACache:
    """A cache of two rows of 6 and 4 tokens."""
    cache = LAYER.new_cache(2, 12, max_rewind=2)
    with torch.no_grad():
        LAYER(torch.ones(2, 6, 16), cache=cache, lengths=torch.tensor([6, 4]))
    return cache


def pick(*names: str) -> dict[str, Any]:
    return {name: X[name] for name in names}


ATTENTION: dict[str, Call] = {
    "NSAConfig": Call(NSAConfig, config_fields(NSAConfig)),
    "native_sparse_attention": Call(
        flexnsa.native_sparse_attention,
        {**X, **OPTIONS, "block_indices": BLOCKS, "branches": ("cmp", "slc", "win"), "return_aux": True}
        | {"recompute": ("win",), "positions": torch.arange(20)},
        like_q,
        (*OPTIONAL, "block_indices", "k_win", "v_win", "positions"),
    ),
    "compressed_attention": Call(
        flexnsa.compressed_attention, pick("q", "k_cmp", "v_cmp") | OPTIONS, like_q, OPTIONAL
    ),
    "selected_attention": Call(
        flexnsa.selected_attention, pick("q", "k", "v") | {"block_indices": BLOCKS} | OPTIONS, like_q, OPTIONAL
    ),
    "sliding_window_attention": Call(
        flexnsa.sliding_window_attention, pick("q", "k", "v") | OPTIONS, like_q, OPTIONAL
    ),
    "select_blocks": Call(
        flexnsa.select_blocks,
        pick("q", "k_cmp") | OPTIONS | {"lse": torch.zeros(2, 4, 20)},
        lambda result, call: result.shape[:3] == (*call["k_cmp"].shape[:2], call["q"].shape[2]),
        (*OPTIONAL, "lse"),
    ),
    "block_importance": Call(
        flexnsa.block_importance,
        pick("q", "k_cmp") | {"config": SMALL, "seq_len": 20, "scale": 0.25, "score_mod": shift, "mask_mod": near},
        lambda result, call: result.shape[:3] == (*call["k_cmp"].shape[:2], call["q"].shape[2]),
        ("seq_len", "scale", "score_mod", "mask_mod"),
    ),
    "selection_loss": Call(
        flexnsa.selection_loss,
        pick("q", "k", "k_cmp") | OPTIONS | {"num_queries": 7, "seed": 3, "step": 4, "query_weights": "mean"}
        | {"sequence_ids": torch.tensor([4, 5]), "reduction": "mean", "index_scale": 0.5},
        scalar,
        (*OPTIONAL, "sequence_ids", "index_scale"),
    ),
    "selection_loss with index heads": Call(
        flexnsa.selection_loss,
        pick("q", "k") | INDEX | {"config": INDEXED, "reduction": "mean"},
        scalar,
    ),
    "select_blocks with index heads": Call(
        flexnsa.select_blocks,
        pick("q", "k_cmp") | {"q_index": INDEX["q_index"], "k_index": INDEX["k_cmp"], "index_scale": 0.5}
        | {"config": INDEXED},
        lambda result, call: result.shape[:3] == (*call["k_index"].shape[:2], call["q"].shape[2]),
        ("k_cmp", "index_scale"),
    ),
    "block_shares": Call(
        flexnsa.block_shares,
        pick("q", "k") | {name: x for name, x in OPTIONS.items() if name != "impl"},
        lambda result, call: result.shape[:3] == (*call["k"].shape[:2], call["q"].shape[2]),
        OPTIONAL,
    ),
    "selection_recall": Call(
        flexnsa.selection_recall,
        pick("q", "k") | {name: x for name, x in OPTIONS.items() if name != "impl"}
        | {"block_indices": BLOCKS, "forced": True},
        lambda result, call: result.shape == call["k"].shape[1:2],
        OPTIONAL,
    ),
    "SelectionLoss": Call(
        flexnsa.SelectionLoss,
        {"seed": 1, "step": 2, "sequence_ids": torch.tensor([3, 4]), "num_queries": 8, "query_weights": "mean"},
        lambda result, _: result.total == 0,
        ("sequence_ids",),
    ),
    "check_block_indices": Call(
        flexnsa.check_block_indices, {"block_indices": BLOCKS, "config": SMALL, "seq_len": 20}
    ),
    "check_positions": Call(flexnsa.check_positions, {"positions": torch.tensor([[0, 5, 19]]), "seq_len": 20}),
    "MeanCompressor": Call(flexnsa.MeanCompressor, SIZES),
    "LinearCompressor": Call(flexnsa.LinearCompressor, SIZES),
    "MLPCompressor": Call(flexnsa.MLPCompressor, SIZES | {"hidden_dim": 8}, optional=("hidden_dim",)),
    **{
        f"{cls.__name__}.forward": Call(
            cls(2, 16, config=SMALL),
            {"x": COMPRESSED, "first_tokens": torch.tensor([[0, 3, 10], [4, 5, 6]], dtype=torch.int32)},
            optional=("first_tokens",),
        )
        for cls in (flexnsa.MeanCompressor, flexnsa.LinearCompressor, flexnsa.MLPCompressor)
    },
    "NativeSparseAttention": Call(
        flexnsa.NativeSparseAttention,
        {"dim": 16, **HEADS, "config": SMALL, "compression": "mlp", "gate": "softmax", "rope_base": 100.0}
        | {"branches": ("cmp", "slc", "win"), "impl": "sdpa", "recompute": ("win",)}
        | {"shared_keys": True, "begin_as_mean": True},
        optional=("v_head_dim",),
    ),
    "NativeSparseAttention.forward": Call(
        LAYER,
        {"x": torch.ones(2, 20, 16), "document_ids": IDS, "score_mod": shift, "mask_mod": near},
        lambda out, call: out.shape == call["x"].shape,
        ("document_ids", "score_mod", "mask_mod"),
    ),
    "NativeSparseAttention.forward with a layout": Call(
        LAYER, {"x": torch.ones(2, 20, 16), "layout": LAYER.layout(20)}, lambda out, call: out.shape == call["x"].shape,
        ("layout",),
    ),
    "NativeSparseAttention.forward with a cache": Call(
        lambda cache, **arguments: LAYER(arguments.pop("x"), **{"cache": cache, **arguments}),
        {"x": torch.ones(2, 3, 16), "lengths": torch.tensor([3, 1]), "score_mod": shift},
        lambda out, call: out.shape == call["x"].shape,
        ("lengths", "score_mod"),
        new_cache,
        ("cache",),
    ),
    "NativeSparseAttention.forward with an empty cache": Call(
        lambda cache, **arguments: LAYER(arguments.pop("x"), **{"cache": cache, **arguments}),
        {"x": torch.ones(1, 20, 16), "document_ids": IDS[:1], "score_mod": shift},
        lambda out, call: out.shape == call["x"].shape,
        ("score_mod",),
        lambda: LAYER.new_cache(len(IDS[0].unique()), 20),
        ("cache",),
    ),
    "NativeSparseAttention.new_cache": Call(
        LAYER.new_cache, {"batch_size": 2, "max_seq_len": 9, "max_rewind": 3, "dtype": torch.float32},
        optional=("dtype",),
    ),
    "NSACache": Call(
        flexnsa.NSACache,
        {"batch_size": 2, "max_seq_len": 9, "num_kv_heads": 1, "head_dim": 4, "v_head_dim": 6, "config": SMALL}
        | {"branches": ("slc", "win"), "max_rewind": 2, "dtype": torch.float32, "device": "cpu"},
        optional=("v_head_dim", "dtype", "device"),
    ),
    "NSACache.begin": Call(
        flexnsa.NSACache.begin,
        {"num_tokens": 3, "lengths": torch.tensor([3, 1]), "ordered": True},
        optional=("lengths",),
        state=new_cache,
        also=("x",),
    ),
    "NSACache.crop": Call(flexnsa.NSACache.crop, {"lengths": torch.tensor([5, 2])}, state=new_cache),
    "NSACache.crop to one length": Call(flexnsa.NSACache.crop, {"lengths": 4}, state=new_cache),
    "NSACache.reorder": Call(flexnsa.NSACache.reorder, {"rows": torch.tensor([1, 1])}, state=new_cache),
    "NSACache.reset": Call(
        flexnsa.NSACache.reset, {"rows": torch.tensor([1])}, optional=("rows",), state=new_cache
    ),
    "NSACache.insert": Call(
        flexnsa.NSACache.insert,
        {"rows": torch.tensor([1, 0]), "other": new_cache(), "other_rows": torch.tensor([1, 1])},
        optional=("other_rows",),
        state=new_cache,
    ),
    "NSACache.grow": Call(flexnsa.NSACache.grow, {"max_seq_len": 20}, state=new_cache),
    "NSACache.load_state_dict": Call(
        flexnsa.NSACache.load_state_dict, {"state": new_cache().state_dict()}, state=new_cache
    ),
    "keep_selection": Call(keep_selection, {}),
}  # fmt: skip
