"""Right calls of what packs rows and of ready-made mods."""

from __future__ import annotations

import torch

from flexnsa import mods, packing
from tests.support.right_calls.call import IDS, Call, shift

MASK = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]])

ROWS: dict[str, Call] = {
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
    "soft_cap": Call(mods.soft_cap, {"cap": 30.0}),
    "soft_cap by a tensor": Call(mods.soft_cap, {"cap": torch.tensor(30.0)}),
    "alibi": Call(mods.alibi, {"slopes": torch.ones(4)}),
    "alibi_slopes": Call(mods.alibi_slopes, {"num_heads": 4, "device": "cpu"}, optional=("device",)),
    "distance_bias": Call(mods.distance_bias, {"bias": torch.ones(4, 6)}),
    "chain": Call(lambda **arguments: mods.chain(*arguments.values()), {"first": shift, "score_mods": shift}),
    "prefix_lm": Call(mods.prefix_lm, {"prefix_length": 4, "window": 8}),
    "banned_span": Call(mods.banned_span, {"first": 4, "stop": 8}),
}  # fmt: skip
