"""Native Sparse Attention once more, as literally as it can be said: Python loops over batch, head, query and key.

Far too slow for anything but a few dozen tokens, and obviously right: ``reference`` is compared with this, and
everything else with ``reference``. Differentiable, because it is made of torch scalars.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flexnsa.config import NSAConfig

Visible = Callable[[int, int, int], list[int]]
"""The keys that ``(batch, kv head, query)`` sees."""


def compressed_keys(t: int, num_keys: int, config: NSAConfig) -> list[int]:
    """Compressed token ``i`` covers ``[i*d, i*d+l)``, and is seen once its last token is not in the future."""
    length, stride = config.compress_block_size, config.compress_stride
    return [i for i in range(num_keys) if max(range(i * stride, i * stride + length)) <= t]


def window_keys(t: int, config: NSAConfig) -> list[int]:
    """The last ``w`` tokens, ``t`` itself one of them."""
    return list(range(t + 1))[-config.window_size :]


def selected_keys(t: int, blocks: list[int], config: NSAConfig) -> list[int]:
    """The tokens of the selected blocks that are not in the future."""
    return [s for s in range(t + 1) if s // config.select_block_size in blocks]


def overlap(i: int, j: int, config: NSAConfig) -> float:
    """Tokens that compressed token ``i`` shares with selection block ``j``, in strides."""
    length, stride, block = config.compress_block_size, config.compress_stride, config.select_block_size
    shared = set(range(i * stride, i * stride + length)) & set(range(j * block, (j + 1) * block))
    return len(shared) / stride


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention of each query over its own list of keys; ``(out, lse)``."""
    group = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for t in range(q.shape[2]):
                keys = visible(b, h // group, t)
                if not keys:
                    outs.append(torch.zeros_like(v[0, 0, 0]))
                    lses.append(q.new_tensor(-torch.inf))
                    continue
                scores = torch.stack([scale * (q[b, h, t] * k[b, h // group, s]).sum() for s in keys])
                weights = scores.exp() / scores.exp().sum()
                outs.append(sum((p * v[b, h // group, s] for p, s in zip(weights, keys, strict=True)), v.new_zeros(())))
                lses.append(scores.exp().sum().log())
    return torch.stack(outs).view(*q.shape[:3], -1), torch.stack(lses).view(q.shape[:3])


def compressed_attention(q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, scale: float) -> tuple[Tensor, Tensor]:
    """The compressed branch."""
    return attend(q, k, v, lambda _b, _h, t: compressed_keys(t, k.shape[2], config), scale)


def window_attention(q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, scale: float) -> tuple[Tensor, Tensor]:
    """The sliding window."""
    return attend(q, k, v, lambda _b, _h, t: window_keys(t, config), scale)


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, config: NSAConfig, scale: float
) -> tuple[Tensor, Tensor]:
    """The selected branch; ``-1`` in ``block_indices`` is padding and no block."""
    chosen = block_indices.tolist()
    return attend(q, k, v, lambda b, h, t: selected_keys(t, chosen[b][h][t], config), scale)


def block_importance(q: Tensor, k_cmp: Tensor, config: NSAConfig, scale: float) -> Tensor:
    """Overlap-weighted sum of the compressed probabilities, added up over the heads of a group; ``(B, Hkv, S, M)``."""
    (batch, heads, seq_len, _), (_, kv_heads, num_keys, _) = q.shape, k_cmp.shape
    num_blocks = len({t // config.select_block_size for t in range(seq_len)})
    importance = torch.zeros(batch, kv_heads, seq_len, num_blocks, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // kv_heads)
            for t in range(seq_len):
                keys = compressed_keys(t, num_keys, config)
                weights = [(scale * (q[b, h, t] * k_cmp[b, g, i]).sum()).exp().item() for i in keys]
                for i, weight in zip(keys, weights, strict=True):
                    for j in range(num_blocks):
                        importance[b, g, t, j] += overlap(i, j, config) * weight / sum(weights)
    return importance


def top_blocks(scores: list[float], t: int, config: NSAConfig) -> list[int]:
    """The forced blocks, then the best of the rest, a tie to the lower index; ascending, padded with ``-1``."""
    current = t // config.select_block_size
    if config.index_score == "relu":  # complete blocks compete, and an incomplete one is chosen beside them
        complete = range((t + 1) // config.select_block_size)
        best = sorted(complete, key=lambda j: (-scores[j], j))[: config.num_selected_blocks - 1]
        chosen = [*sorted(best), *range(len(complete), current + 1)]
        return chosen + [-1] * (config.num_selected_blocks - len(chosen))
    candidates = range(current + 1)
    forced = set(candidates[: config.num_init_blocks])
    if config.num_local_blocks:
        forced |= set(candidates[-config.num_local_blocks :])
    rest = sorted(set(candidates) - forced, key=lambda j: (-scores[j], j))
    chosen = sorted(forced | set(rest[: config.num_selected_blocks - len(forced)]))
    return chosen + [-1] * (config.num_selected_blocks - len(chosen))


def select_blocks(importance: Tensor, config: NSAConfig) -> Tensor:
    """Top-n of every row of ``importance``; int32 ``(B, Hkv, S, n)``."""
    rows = [
        [[top_blocks(scores, t, config) for t, scores in enumerate(head)] for head in batch]
        for batch in importance.tolist()
    ]
    return torch.tensor(rows, dtype=torch.int32)


def selection_divergence(
    q: Tensor,
    k: Tensor,
    q_score: Tensor,
    k_score: Tensor,
    config: NSAConfig,
    *,
    scale: float,
    score_scale: float,
    score_mod: Callable[[Tensor, int, int, int], Tensor] | None = None,
) -> dict[tuple[int, int, int], tuple[Tensor, Tensor]]:
    """``KL(true || score)`` and the true mass of the blocks in question, by ``(batch, kv head, query)``.

    ``score_mod`` takes a score, a query head, a query and a key. Queries without such a block are left out.
    """
    mod = score_mod or (lambda score, _h, _t, _s: score)
    choices = 1 if config.index_score == "relu" else k.shape[1]
    group, heads = q.shape[1] // choices, q_score.shape[1] // choices
    sizes, size = config.scoring, config.select_block_size
    found: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
    for b, kv, t in [(b, kv, t) for b in range(len(q)) for kv in range(choices) for t in range(q.shape[2])]:
        true: dict[int, Tensor] = {}
        for h in range(kv * group, (kv + 1) * group):
            own = k[b, h * k.shape[1] // q.shape[1]]
            tokens = {s: mod(scale * (q[b, h, t] * own[s]).sum(), h, t, s) for s in range(t + 1)}
            tokens = {s: x.exp() for s, x in tokens.items() if x > -torch.inf}
            for s, x in tokens.items():
                true[s // size] = true.get(s // size, 0) + x / sum(tokens.values()) / group
        score: dict[int, Tensor] = {}
        for i in range(heads):
            h = kv * group + i * group // heads
            keys = {
                n: (q_score[b, kv * heads + i, t] * k_score[b, kv % k_score.shape[1], n]).sum()
                for n in compressed_keys(t, k_score.shape[2], sizes)
            }
            last = sizes.compress_block_size - 1
            keys = {n: mod(score_scale * x, h, t, n * sizes.compress_stride + last) for n, x in keys.items()}
            keys = {n: x.exp() for n, x in keys.items() if x > -torch.inf}
            for n, x in keys.items():
                for j in range(t // size + 1):
                    if sizes.index_score == "relu" and overlap(n, j, sizes):
                        score[j] = score.get(j, 1) * x.clamp_min(1)
                    elif sizes.index_score is not None and overlap(n, j, sizes):
                        score[j] = torch.maximum(score.get(j, x), x)
                    elif overlap(n, j, sizes):
                        score[j] = score.get(j, 0) + overlap(n, j, sizes) * x / sum(keys.values())
        last = (t + 1) // size - 1 if sizes.index_score == "relu" else t // size - config.num_local_blocks
        free = [j for j in score if config.num_init_blocks <= j <= last]
        mass, total = sum(true.get(j, 0) for j in free), sum(score[j] for j in free)
        if mass > 0:
            shares = {j: true[j] / mass for j in free if j in true}
            terms = [share * (share / (score[j] / total)).log() for j, share in shares.items()]
            found[b, kv, t] = (torch.stack(terms).sum(), torch.as_tensor(mass))
    return found
