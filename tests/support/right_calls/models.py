"""Right calls of models, sessions and samplers, and of what a run is and takes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from flexnsa import lm, record_indices, replay_indices
from flexnsa.lm.estimate import estimate_decoding, estimate_training, parameter_count
from tests.support.inputs import SMALL
from tests.support.right_calls.call import HEADS, IDS, Call, config_fields, near, shift

TINY = lm.DecoderConfig(dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, vocab_size=16, nsa=SMALL)
MODEL = lm.DecoderLM(TINY).requires_grad_(False)
DENSE = lm.DecoderLM(lm.preset("small", dim=16, num_layers=1, attention="dense")).requires_grad_(False)
TOKENS = torch.arange(12).view(2, 6)
BLOCKS = torch.tensor([0, -1, -1, -1], dtype=torch.int32).expand(2, 1, 6, 4)
DECODER_FIELDS = tuple(f.name for f in fields(lm.DecoderConfig))
V_HEAD_DIM = ("v_head_dim",)


def replayed(model: lm.DecoderLM, indices: Tensor) -> Tensor:
    with replay_indices(model, [indices]):
        return model(TOKENS)


def model_caches(model: lm.DecoderLM) -> list[Any]:
    return model.new_caches(2, 12)


MODELS: dict[str, Call] = {
    "DecoderConfig": Call(
        lm.DecoderConfig, {key: getattr(TINY, key) for key in DECODER_FIELDS} | {"v_head_dim": 6}, optional=V_HEAD_DIM
    ),
    "DecoderConfig.from_dict": Call(lm.DecoderConfig.from_dict, {"values": TINY.to_dict()}, also=DECODER_FIELDS),
    "DecoderConfig.is_checkpointed": Call(TINY.is_checkpointed, {"layer": 0}),
    "preset": Call(lm.preset, {"name": "small", "num_layers": 3, "checkpointing": (0, 2)}, also=("preset",)),
    "DecoderLM": Call(lm.DecoderLM, {"config": TINY}),
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
    "DenseAttention": Call(lm.DenseAttention, {"dim": 16, **HEADS, "rope_base": 10.0}, optional=("v_head_dim",)),
    "DenseAttention.forward": Call(
        lm.DenseAttention(16, 4, 2, 4).requires_grad_(False),
        {"x": torch.ones(2, 20, 16), "document_ids": IDS, "score_mod": shift, "mask_mod": near},
        lambda out, call: out.shape == call["x"].shape,
        ("document_ids", "score_mod", "mask_mod"),
    ),
    "DenseCache": Call(
        lm.DenseCache,
        {"batch_size": 2, "max_seq_len": 9, "num_kv_heads": 1, "head_dim": 4, "v_head_dim": 6}
        | {"dtype": torch.float32, "device": "cpu"},
        optional=("dtype", "device"),
    ),
    "Sampling": Call(lm.Sampling, {"temperature": 0.5, "top_k": 3, "top_p": 0.9}, optional=("top_k", "top_p")),
    "Sampling.draw": Call(
        lm.Sampling(top_k=3).draw,
        {"logits": torch.ones(2, 16), "generator": torch.Generator()},
        lambda token, call: token.shape == call["logits"].shape[:1],
        errors=(FloatingPointError,),
    ),
    "generate_tokens": Call(
        lm.generate_tokens,
        {"model": MODEL, "prompts": TOKENS, "max_new_tokens": 2, "lengths": torch.tensor([6, 2])}
        | {"sampling": lm.Sampling(), "stop_tokens": (3,), "seed": 5, "on_token": lambda row, token: None}  # noqa: ARG005
        | {"cached": True, "steps": "eager", "group": 2, "score_mod": shift, "mask_mod": near},
        optional=("lengths", "sampling", "on_token", "group", "score_mod", "mask_mod"),
    ),
    "DecodingSession": Call(
        lm.DecodingSession,
        {"model": MODEL, "batch_size": 2, "max_seq_len": 9, "sampling": lm.Sampling(), "steps": "eager"}
        | {"score_mod": shift, "mask_mod": near},
        optional=("sampling", "score_mod", "mask_mod"),
    ),
    "DecodingSession.generate": Call(
        lm.DecodingSession(DENSE, 2, 9).generate,
        {"prompts": TOKENS, "max_new_tokens": 2, "lengths": torch.tensor([6, 2]), "stop_tokens": (3,), "seed": 5}
        | {"on_token": lambda row, token: None, "group": 2},  # noqa: ARG005
        optional=("lengths", "on_token", "group"),
    ),
    "DecodingSession.prefill": Call(
        lm.DecodingSession(DENSE, 2, 9).prefill,
        {"prompts": TOKENS, "lengths": torch.tensor([6, 2]), "seed": 5},
        lambda drawn, _: drawn.tokens.shape == (2, 1),
        ("lengths",),
    ),
    "generate": Call(lm.generate, {"model": DENSE, "prompt": b"ab", "num_bytes": 2, "temperature": 0.5, "seed": 5}),
    "record_indices": Call(lambda model: record_indices(model).remove(), {"model": MODEL}),
    "replay_indices": Call(replayed, {"model": MODEL, "indices": BLOCKS}, also=("block_indices",)),
    "TrainConfig": Call(
        lm.TrainConfig, config_fields(lm.TrainConfig) | {"compressor_lr": 0.1}, optional=("compressor_lr",)
    ),
    "TrainConfig.at": Call(lm.TrainConfig(stages=((64, 0.5), (512, 0.5))).at, {"step": 3}),
    "TrainConfig.learning_rate": Call(lm.TrainConfig().learning_rate, {"step": 3}),
    "parameter_count": Call(parameter_count, {"config": TINY}),
    "estimate_training": Call(
        estimate_training,
        {"config": TINY, "seq_len": 64, "batch_size": 2, "precision": "bf16", "impl": "flex"}
        | {"fused_norm": True, "optimizer": True, "compiled": True},
    ),
    "estimate_decoding": Call(
        estimate_decoding, {"config": TINY, "seq_len": 64, "batch_size": 2, "precision": "bf16"}
    ),
}  # fmt: skip
