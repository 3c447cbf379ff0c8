"""The oracle: every branch with an explicit boolean mask over all pairs, in whatever precision the inputs have.

Quadratic in time and memory by intention. It reads like the formulas of the paper (arXiv 2502.11089, section 3) and
shares no attention, masking or scoring code with the other implementations, so that agreement means something.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexnsa.config import NSAConfig
from flexnsa.geometry import blocks_within
from flexnsa.masks.positions import Positions, positions_of


def _repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """Give each query head its own copy of its group's keys: head ``h`` reads head ``h // G``."""
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Compute ``scale * q.k`` for all pairs ``(B, Hq, T, S)``, at least in fp32."""
    scores = q @ _repeat_heads(k, q.shape[1]).mT * scale
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def _softmax(scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Normalise over the visible keys; a row without any has probabilities 0 and lse ``-inf``."""
    empty = ~visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~visible, -torch.inf).masked_fill(empty, 0.0)
    probs = scores.softmax(-1).masked_fill(~visible, 0.0)
    return probs, scores.logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    probs, lse = _softmax(_scores(q, k, scale), visible)
    return probs.to(v.dtype) @ _repeat_heads(v, q.shape[1]), lse


def _visible_compressed(num_keys: int, positions: Positions, config: NSAConfig) -> Tensor:
    """Mark the compressed tokens of the own document whose last token is not in the future, ``(B, 1, T, N)``."""
    own = torch.arange(num_keys, device=positions.token.device) - positions.cmp_start[..., None]
    last_token = positions.start[..., None] + own * config.compress_stride + config.compress_block_size - 1
    return ((own >= 0) & (last_token <= positions.token[..., None]))[:, None]


def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, positions: Positions | None, *, config: NSAConfig, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend to the compressed tokens that lie wholly in the past (section 3.3.1)."""
    visible = _visible_compressed(k_cmp.shape[2], positions_of(q, positions), config)
    return _attend(q, k_cmp, v_cmp, visible, scale)


def sliding_window_attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Positions | None, *, config: NSAConfig, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend to the last ``window_size`` tokens of the document (section 3.3.3)."""
    positions = positions_of(q, positions)
    key = torch.arange(k.shape[2], device=k.device)
    token, start = positions.token[..., None], positions.start[..., None]
    visible = (key >= start) & (key <= token) & (key > token - config.window_size)
    return _attend(q, k, v, visible[:, None], scale)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    positions: Positions | None,
    *,
    config: NSAConfig,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend to the past tokens of the selected blocks (section 3.3.2)."""
    positions = positions_of(q, positions)
    key = torch.arange(k.shape[2], device=k.device)
    token, start = positions.token[..., None], positions.start[..., None]
    block = (key - start).div(config.select_block_size, rounding_mode="floor")
    selected = torch.zeros(1, dtype=torch.bool, device=k.device)
    for chosen in block_indices.unbind(-1):
        selected = selected | (block[:, None] == chosen[..., None])
    visible = selected & ((key >= start) & (key <= token))[:, None]
    return _attend(q, k, v, _repeat_heads(visible, q.shape[1]), scale)


def _overlap_weights(num_keys: int, num_blocks: int, config: NSAConfig, like: Tensor) -> Tensor:
    """Share of tokens of each compressed token in each block, in units of the stride, ``(N, M)`` (Eq. 9)."""
    key_start = torch.arange(num_keys, device=like.device)[:, None] * config.compress_stride
    block_start = torch.arange(num_blocks, device=like.device) * config.select_block_size
    key_end, block_end = key_start + config.compress_block_size, block_start + config.select_block_size
    overlap = torch.minimum(key_end, block_end) - torch.maximum(key_start, block_start)
    return overlap.clamp_min(0).to(like.dtype) / config.compress_stride


def block_importance(
    q: Tensor, k_cmp: Tensor, positions: Positions | None, *, num_blocks: int, config: NSAConfig, scale: float
) -> Tensor:
    """Score every selection block for every query, ``(B, Hkv, T, M)``, never differentiated (Eq. 8 to 10)."""
    positions = positions_of(q, positions)
    num_keys = k_cmp.shape[2]
    probs, _ = _softmax(_scores(q, k_cmp, scale).detach(), _visible_compressed(num_keys, positions, config))
    own = torch.arange(num_keys, device=q.device) + positions.cmp_start[..., None]
    probs = torch.nn.functional.pad(probs, (0, 1)).gather(
        -1, own.clamp(max=num_keys)[:, None].expand_as(probs).to(torch.int64)
    )
    scores = probs @ _overlap_weights(num_keys, num_blocks, config, probs)
    return scores.unflatten(1, (k_cmp.shape[1], -1)).sum(2)


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor | None,  # noqa: ARG001  (the oracle normalises for itself)
    positions: Positions | None,
    *,
    config: NSAConfig,
    scale: float,
) -> Tensor:
    """Choose the ``n`` best blocks of each query, forced ones first, a tie to the lower index (section 3.3.2)."""
    positions = positions_of(q, positions)
    num_blocks = blocks_within(k_cmp.shape[2], config)
    score = block_importance(q, k_cmp, positions, num_blocks=num_blocks, config=config, scale=scale)

    block = torch.arange(num_blocks, device=q.device)
    current = (positions.token - positions.start).div(config.select_block_size, rounding_mode="floor")[:, None, :, None]
    forced = (block < config.num_init_blocks) | (block > current - config.num_local_blocks)
    candidate = block <= current
    score = score.masked_fill(forced, torch.inf).masked_fill(~candidate, -torch.inf)

    best = score.argsort(dim=-1, descending=True, stable=True)[..., : config.num_selected_blocks]
    chosen = best.masked_fill(~candidate.expand_as(score).gather(-1, best), num_blocks).sort(-1).values
    chosen = chosen.masked_fill(chosen == num_blocks, -1).to(torch.int32)
    return torch.nn.functional.pad(chosen, (0, config.num_selected_blocks - chosen.shape[-1]), value=-1)
