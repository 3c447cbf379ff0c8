"""A right call of every public function and class, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

import flexnsa
from flexnsa import NSAConfig, mods, packing
from flexnsa.checkpointing import keep_selection
from flexnsa.memory import estimate_decoding, estimate_training, parameter_count
from flexnsa.models import (
    DecoderConfig,
    DecoderLM,
    DecodingSession,
    DenseAttention,
    DenseCache,
    Sampling,
    generate,
    generate_tokens,
    preset,
)
from flexnsa.training import TrainConfig
from tests.support.inputs import SMALL, make_inputs

X = {name: x.float() for name, x in make_inputs(20, batch=2, dtype=torch.float32).named().items()}
BLOCKS = flexnsa.select_blocks(X["q"], X["k_cmp"], config=SMALL)
IDS = torch.tensor([[0] * 7 + [1] * 13, [3] * 20])
TINY = DecoderConfig(dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, vocab_size=16, nsa=SMALL)
MODEL, DENSE = (
    DecoderLM(TINY).requires_grad_(False),
    DecoderLM(preset("small", dim=16, num_layers=1, attention="dense")),
)
DENSE.requires_grad_(False)
LAYER = flexnsa.NativeSparseAttention(16, 4, 2, 4, config=SMALL).requires_grad_(False)
TOKENS = torch.arange(12).view(2, 6)


@dataclass
class Call:
    """A right call.

    Args:
        function: called with the arguments by name.
        arguments: a right value of each; a copy is made for every call.
        expected: what the result must be, where that is not the type's own concern.
        optional: arguments that may be None.
        state: makes what the function works on; passed by position.
        also: names that an error may begin with beside those of the arguments.
        errors: what it may raise beside TypeError and ValueError.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]
    expected: Callable[[Any, dict[str, Any]], bool] = lambda result, arguments: True  # noqa: ARG005
    optional: tuple[str, ...] = ()
    state: Callable[[], Any] | None = None
    also: tuple[str, ...] = ()
    errors: tuple[type[Exception], ...] = ()


def shift(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    return score - (q_idx - kv_idx) * 0.1


def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    return q_idx - kv_idx < 9


def like_q(result: Any, arguments: dict[str, Any]) -> bool:
    q, v = arguments["q"], arguments.get("v", arguments.get("v_cmp"))
    out = result[0] if isinstance(result, tuple) else result
    width = v.shape[-1] if isinstance(v, Tensor) else out.shape[-1]
    return out.shape == (*q.shape[:3], width) and out.dtype == q.dtype


def new_cache() -> flexnsa.NSACache:
    """A cache of two rows of 6 and 4 tokens."""
    cache = LAYER.new_cache(2, 12, max_rewind=2)
    with torch.no_grad():
        LAYER(torch.ones(2, 6, 16), cache=cache, lengths=torch.tensor([6, 4]))
    return cache


def model_caches(model: DecoderLM) -> list[Any]:
    return model.new_caches(2, 12)


OPTIONS = {"config": SMALL, "scale": 0.25, "document_ids": IDS, "score_mod": shift, "mask_mod": near, "impl": "sdpa"}
DECODER_FIELDS = tuple(f.name for f in fields(DecoderConfig))
V_HEAD_DIM = ("v_head_dim",)
OPTIONAL = ("scale", "document_ids", "score_mod", "mask_mod")
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "v_head_dim": 6}
SIZES = {"num_kv_heads": 2, "head_dim": 16, "config": SMALL}
COMPRESSED = X["k"][:, :, :18]
MASK = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]])


def pick(*names: str) -> dict[str, Any]:
    return {name: X[name] for name in names}


def config_fields(cls: Any, **changes: Any) -> dict[str, Any]:
    instance = cls(**changes)
    return {f.name: getattr(instance, f.name) for f in fields(cls)}


CALLS: dict[str, Call] = {
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
        | {"branches": ("cmp", "slc", "win"), "impl": "sdpa", "recompute": ("win",)},
        optional=("v_head_dim",),
    ),
    "NativeSparseAttention.forward": Call(
        LAYER,
        {"x": torch.ones(2, 20, 16), "document_ids": IDS, "score_mod": shift, "mask_mod": near},
        lambda out, call: out.shape == call["x"].shape,
        ("document_ids", "score_mod", "mask_mod"),
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
        lambda cache, **arguments: cache.begin(**arguments),
        {"num_tokens": 3, "lengths": torch.tensor([3, 1]), "ordered": True},
        optional=("lengths",),
        state=new_cache,
        also=("x",),
    ),
    "NSACache.crop": Call(
        lambda cache, **arguments: cache.crop(**arguments), {"lengths": torch.tensor([5, 2])}, state=new_cache
    ),
    "NSACache.crop to one length": Call(
        lambda cache, **arguments: cache.crop(**arguments), {"lengths": 4}, state=new_cache
    ),
    "NSACache.reorder": Call(
        lambda cache, **arguments: cache.reorder(**arguments), {"rows": torch.tensor([1, 1])}, state=new_cache
    ),
    "NSACache.reset": Call(
        lambda cache, **arguments: cache.reset(**arguments), {"rows": torch.tensor([1])}, optional=("rows",),
        state=new_cache,
    ),
    "NSACache.insert": Call(
        lambda cache, **arguments: cache.insert(**arguments),
        {"rows": torch.tensor([1, 0]), "other": new_cache(), "other_rows": torch.tensor([1, 1])},
        optional=("other_rows",),
        state=new_cache,
    ),
    "NSACache.grow": Call(
        lambda cache, **arguments: cache.grow(**arguments), {"max_seq_len": 20}, state=new_cache
    ),
    "NSACache.load_state_dict": Call(
        lambda cache, **arguments: cache.load_state_dict(**arguments),
        {"state": new_cache().state_dict()},
        state=new_cache,
    ),
    # packing
    "document_ids_from_cu_seqlens": Call(
        packing.document_ids_from_cu_seqlens,
        {"cu_seqlens": torch.tensor([0, 3, 3, 7]), "seq_len": 7},
        optional=("seq_len",),
    ),
    "cu_seqlens_from_document_ids": Call(packing.cu_seqlens_from_document_ids, {"document_ids": IDS}),
    "position_ids_from_document_ids": Call(packing.position_ids_from_document_ids, {"document_ids": IDS}),
    "document_ids_from_position_ids": Call(
        packing.document_ids_from_position_ids, {"position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    ),
    "document_ids_from_attention_mask": Call(packing.document_ids_from_attention_mask, {"attention_mask": MASK}),
    "pack_padded": Call(packing.pack_padded, {"x": torch.ones(2, 4, 3), "attention_mask": MASK}),
    "unpack_padded": Call(packing.unpack_padded, {"packed": torch.ones(1, 6, 3), "attention_mask": MASK}),
    "next_token_targets": Call(packing.next_token_targets, {"tokens": IDS + 1, "document_ids": IDS}),
    # mods
    "soft_cap": Call(mods.soft_cap, {"cap": 30.0}),
    "soft_cap by a tensor": Call(mods.soft_cap, {"cap": torch.tensor(30.0)}),
    "alibi": Call(mods.alibi, {"slopes": torch.ones(4)}),
    "alibi_slopes": Call(mods.alibi_slopes, {"num_heads": 4, "device": "cpu"}, optional=("device",)),
    "distance_bias": Call(mods.distance_bias, {"bias": torch.ones(4, 6)}),
    "chain": Call(lambda **arguments: mods.chain(*arguments.values()), {"first": shift, "score_mods": shift}),
    "prefix_lm": Call(mods.prefix_lm, {"prefix_length": 4, "window": 8}),
    "banned_span": Call(mods.banned_span, {"first": 4, "stop": 8}),
    # models
    "DecoderConfig": Call(
        DecoderConfig, {name: getattr(TINY, name) for name in DECODER_FIELDS} | {"v_head_dim": 6}, optional=V_HEAD_DIM
    ),
    "DecoderConfig.from_dict": Call(DecoderConfig.from_dict, {"values": TINY.to_dict()}, also=DECODER_FIELDS),
    "DecoderConfig.is_checkpointed": Call(TINY.is_checkpointed, {"layer": 0}),
    "preset": Call(preset, {"name": "small", "num_layers": 3, "checkpointing": (0, 2)}, also=("preset",)),
    "DecoderLM": Call(DecoderLM, {"config": TINY}),
    "DecoderLM.forward": Call(
        MODEL,
        {"tokens": TOKENS, "document_ids": torch.zeros_like(TOKENS), "score_mod": shift, "mask_mod": near},
        lambda out, call: out.shape == (*call["tokens"].shape, 16),
        ("document_ids", "score_mod", "mask_mod"),
    ),
    "DecoderLM.last_logits": Call(
        MODEL.last_logits,
        {"tokens": TOKENS, "lengths": torch.tensor([6, 1]), "score_mod": shift, "mask_mod": near},
        lambda out, call: out.shape == (len(call["tokens"]), 16),
        ("lengths", "score_mod", "mask_mod"),
    ),
    **{
        f"{model.config.attention} DecoderLM.forward with caches": Call(
            lambda caches, model=model, **arguments: model(arguments.pop("tokens"), **{"caches": caches, **arguments}),
            {"tokens": TOKENS, "lengths": torch.tensor([6, 1])},
            lambda out, call: out.shape[:2] == call["tokens"].shape,
            ("lengths",),
            lambda model=model: model_caches(model),
            ("x", "caches"),
        )
        for model in (MODEL, DENSE)
    },
    "DecoderLM.new_caches": Call(
        MODEL.new_caches, {"batch_size": 2, "max_seq_len": 9, "dtype": torch.float32}, optional=("dtype",)
    ),
    "DenseAttention": Call(DenseAttention, {"dim": 16, **HEADS, "rope_base": 10.0}, optional=("v_head_dim",)),
    "DenseAttention.forward": Call(
        DenseAttention(16, 4, 2, 4).requires_grad_(False),
        {"x": torch.ones(2, 20, 16), "document_ids": IDS, "score_mod": shift, "mask_mod": near},
        lambda out, call: out.shape == call["x"].shape,
        ("document_ids", "score_mod", "mask_mod"),
    ),
    "DenseCache": Call(
        DenseCache,
        {"batch_size": 2, "max_seq_len": 9, "num_kv_heads": 1, "head_dim": 4, "v_head_dim": 6}
        | {"dtype": torch.float32, "device": "cpu"},
        optional=("dtype", "device"),
    ),
    "Sampling": Call(Sampling, {"temperature": 0.5, "top_k": 3, "top_p": 0.9}, optional=("top_k", "top_p")),
    "Sampling.draw": Call(
        Sampling(top_k=3).draw,
        {"logits": torch.ones(2, 16), "generator": torch.Generator()},
        lambda token, call: token.shape == call["logits"].shape[:1],
        errors=(FloatingPointError,),
    ),
    "generate_tokens": Call(
        generate_tokens,
        {"model": MODEL, "prompts": TOKENS, "max_new_tokens": 2, "lengths": torch.tensor([6, 2])}
        | {"sampling": Sampling(), "stop_tokens": (3,), "seed": 5, "on_token": lambda row, token: None, "cached": True}  # noqa: ARG005
        | {"steps": "eager", "group": 2, "score_mod": shift, "mask_mod": near},
        optional=("lengths", "sampling", "on_token", "group", "score_mod", "mask_mod"),
    ),
    "DecodingSession": Call(
        DecodingSession,
        {"model": MODEL, "batch_size": 2, "max_seq_len": 9, "sampling": Sampling(), "steps": "eager"}
        | {"score_mod": shift, "mask_mod": near},
        optional=("sampling", "score_mod", "mask_mod"),
    ),
    "DecodingSession.generate": Call(
        DecodingSession(DENSE, 2, 9).generate,
        {"prompts": TOKENS, "max_new_tokens": 2, "lengths": torch.tensor([6, 2]), "stop_tokens": (3,), "seed": 5}
        | {"on_token": lambda row, token: None, "group": 2},  # noqa: ARG005
        optional=("lengths", "on_token", "group"),
    ),
    "DecodingSession.prefill": Call(
        DecodingSession(DENSE, 2, 9).prefill,
        {"prompts": TOKENS, "lengths": torch.tensor([6, 2]), "seed": 5},
        lambda drawn, _: drawn.tokens.shape == (2, 1),
        ("lengths",),
    ),
    "generate": Call(
        generate,
        {"model": DENSE, "prompt": b"ab", "num_bytes": 2, "temperature": 0.5, "seed": 5},
    ),
    # what a run and its memory are
    "TrainConfig": Call(TrainConfig, config_fields(TrainConfig)),
    "TrainConfig.learning_rate": Call(TrainConfig().learning_rate, {"step": 3}),
    "parameter_count": Call(parameter_count, {"config": TINY}),
    "estimate_training": Call(
        estimate_training,
        {"config": TINY, "seq_len": 64, "batch_size": 2, "precision": "bf16", "impl": "flex"}
        | {"fused_norm": True, "optimizer": True, "compiled": True},
    ),
    "estimate_decoding": Call(
        estimate_decoding, {"config": TINY, "seq_len": 64, "batch_size": 2, "precision": "bf16"}
    ),
    "keep_selection": Call(keep_selection, {}),
}  # fmt: skip
