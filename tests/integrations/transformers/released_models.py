"""Small random models of released types with an indexer, and plain formulas of what it compares."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

SHARED = {"glm_moe_dsa": ["full", "full", "shared"], "hy_v4": ["full", "shared", "full"]}
SHARED["mistral_large4"] = ["full", "shared", "full"]
KINDS = ("qwen4_exp", "minimax_m3_vl", "deepseek_v32", "glm_moe_dsa", "hy_v4", "mistral_large4")
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


def released(kind: str, **changes: Any) -> Any:
    """Return a model whose scores differ from one another; that of mistral_large4 has no head."""
    module: Any = getattr(transformers.models, kind)
    sizes = {"vocab_size": 64, "hidden_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_experts_per_tok": 1}
    if kind == "qwen4_exp":
        sizes |= {"layer_types": ["indexed_attention", "linear_attention", "indexed_attention"], "hc_count": 2}
        sizes |= {"num_key_value_heads": 2, "head_dim": 16, "hc_lowrank": 8, "num_experts": 2, "indexer_kv_heads": 1}
        sizes |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "indexer_n_heads": 4}
        sizes |= {"indexer_head_dim": 16, "indexer_budget": 24, "indexer_compress_ratio": 4}
        sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
        sizes |= {"linear_value_head_dim": 8, "rope_parameters": HALF | {"mrope_section": [2, 1, 1]}}
        model = module.Qwen4ExpForCausalLM(module.Qwen4ExpTextConfig(**sizes | changes))
    elif kind == "minimax_m3_vl":
        sizes |= {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "rotary_dim": 8}
        sizes |= {"mlp_layer_types": ["dense"] * 3, "dense_intermediate_size": 64, "index_n_heads": 2, "head_dim": 16}
        sizes |= {"index_head_dim": 16, "index_block_size": 8, "index_topk_blocks": 3, "index_local_blocks": 1}
        sizes |= {"num_key_value_heads": 2, "num_local_experts": 2, "intermediate_size": 16}
        sizes |= {"shared_intermediate_size": 16, "rope_parameters": HALF}
        config = module.configuration_minimax_m3_vl.MiniMaxM3VLTextConfig(**sizes | changes)
        model = module.modeling_minimax_m3_vl.MiniMaxM3VLForCausalLM(config)
    else:
        sizes |= {"intermediate_size": 32, "moe_intermediate_size": 16, "n_group": 1, "num_key_value_heads": 4}
        sizes |= {"n_routed_experts": 4, "topk_group": 1, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
        sizes |= {"qk_nope_head_dim": 8, "v_head_dim": 16, "n_shared_experts": 1, "index_topk": 12, "index_n_heads": 4}
        sizes |= {"index_head_dim": 16, "mlp_layer_types": ["dense"] * 3}
        sizes |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
        sizes |= {"indexer_types": SHARED[kind]} if kind in SHARED else {}
        sizes |= {"hc_mult": 2} if kind == "hy_v4" else {}
        sizes |= {} if kind == "mistral_large4" else {"q_lora_rank": 24}
        name = {"deepseek_v32": "DeepseekV32", "glm_moe_dsa": "GlmMoeDsa", "hy_v4": "HYV4"}.get(kind)
        if name is None:
            config = module.configuration_mistral_large4.MistralLarge4TextConfig(**sizes | changes)
            model = module.modeling_mistral_large4.MistralLarge4TextModel(config)
        else:
            model = getattr(module, f"{name}ForCausalLM")(getattr(module, f"{name}Config")(**sizes | changes))
    model.set_experts_implementation("eager")
    made = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            size = 0.3 if parameter.dim() > 1 else 0.2
            parameter.copy_(torch.randn(parameter.shape, generator=made, device="cpu") * size)
    return model.train()


def plain_scores(kind: str, indexer: Any, given: dict[str, Any]) -> Tensor:
    """Score all units for all queries, ``(B, groups, S, units)``."""
    x, (cos, sin) = given["hidden_states"], given["position_embeddings"]
    if kind == "qwen4_exp":
        size, dim = indexer.compress_ratio, indexer.index_head_dim
        q, raw = indexer.index_qk_proj(x).split([indexer.index_n_heads * dim, dim], -1)
        units = x.shape[1] // size
        pooled = raw[:, : units * size].unflatten(1, (units, size)).mean(2)
        q = _turn(indexer.q_layernorm(q.unflatten(-1, (-1, dim))), cos, sin)
        k = _turn(indexer.k_layernorm(pooled)[:, :, None], cos[:, : units * size : size], sin[:, : units * size : size])
        return torch.einsum("bshd,bujd->bhsu", q, k).relu().sum(1, keepdim=True) / dim**0.5
    if kind == "minimax_m3_vl":
        dim, size = indexer.head_dim, indexer.block_size
        q = _turn(indexer.q_norm(indexer.q_proj(x).unflatten(-1, (-1, dim))), cos, sin)
        k = _turn(indexer.k_norm(indexer.k_proj(x)[:, :, None]), cos, sin)
        products = torch.einsum("bshd,bujd->bhsu", q, k) / dim**0.5
        ahead = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        blocks = products.masked_fill(ahead, -torch.inf).split(size, -1)
        return torch.stack([block.amax(-1) for block in blocks], -1)
    dim, neighbours = indexer.head_dim, kind in ("glm_moe_dsa", "mistral_large4")
    if kind == "mistral_large4":
        log_t = (torch.arange(x.shape[1], dtype=x.dtype) + 1).log()[:, None]
        factor = log_t * indexer.softmax_scaling.scale + indexer.softmax_scaling.bias
        q = indexer.wq_b(indexer.q_input_norm(x)).unflatten(-1, (-1, dim)) * factor[..., None]
    else:
        q = indexer.wq_b(given["q_resid"]).unflatten(-1, (-1, dim))
    k = indexer.k_norm(indexer.wk(x))[:, :, None]
    if getattr(indexer, "use_rope", True):
        q, k = (_turn(each, cos, sin, neighbours=neighbours, last=kind == "hy_v4") for each in (q, k))
    weights = indexer.weights_proj(x) / indexer.n_heads**0.5
    return torch.einsum("bsh,bhst->bst", weights, torch.einsum("bshd,btjd->bhst", q, k).relu() / dim**0.5)[:, None]


def plain_choice(kind: str, indexer: Any, out: Tensor, scores: Tensor) -> Tensor:
    """Read which units a model has chosen from what its indexer returned, bool like ``scores``."""
    if kind == "qwen4_exp":
        return out[..., :: indexer.compress_ratio][..., : scores.shape[-1]]
    indices = out if kind == "minimax_m3_vl" else out[:, None]
    slots = indices.long().where(indices >= 0, scores.shape[-1])
    chosen = torch.zeros(*scores.shape[:3], scores.shape[-1] + 1, dtype=torch.bool)
    return chosen.scatter_(-1, slots, True)[..., :-1]


def plain_loss(
    kind: str, indexer: Any, scores: Tensor, probs: Tensor, chosen: Tensor | None = None, *, by_mass: bool
) -> Tensor:
    """Compare scores with the attention ``probs (B, Hq, S, S)`` of a layer, among the ``chosen`` if they are given."""
    groups, length, units = scores.shape[1], *scores.shape[2:]
    t, unit, size = torch.arange(length)[:, None], torch.arange(units), 1
    if kind == "qwen4_exp":
        size = indexer.compress_ratio
        free = (unit + 1) * size <= t + 1
    elif kind == "minimax_m3_vl":
        size = indexer.block_size
        free = unit <= t // size - indexer.local_blocks
    else:
        free = unit <= t
    true = probs.unflatten(1, (groups, -1)).mean(2)
    true = F.pad(true, (0, units * size - length)) if units * size > length else true[..., : units * size]
    true = true.unflatten(-1, (units, size)).sum(-1)
    free = free.expand_as(scores) if chosen is None else free & chosen
    true = true * free
    mass = true.sum(-1)
    some = mass > 0
    target = (true / mass[..., None])[some]
    log_p = scores[some].masked_fill(~free[some], -torch.inf).log_softmax(-1).masked_fill(~free[some], 0)
    kl = (torch.xlogy(target, target) - target * log_p).sum(-1)
    weights = mass[some] if by_mass else torch.ones_like(mass[some])
    return (kl * weights).sum() / weights.sum().clamp_min(1e-30)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, *, neighbours: bool = False, last: bool = False) -> Tensor:
    """Rotate dims of ``x (B, S, H, D)``, as complex numbers."""
    width = cos.shape[-1]
    turn = torch.complex(cos, sin)[..., None, : width // 2]
    part, rest = (x[..., -width:], x[..., :-width]) if last else (x[..., :width], x[..., width:])
    pairs = part.unflatten(-1, (-1, 2)) if neighbours else part.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.complex(pairs[..., 0], pairs[..., 1]) * turn
    return torch.cat([turned.real, turned.imag, rest], -1)
