"""The cost of one decoded token: the cache, the bytes read from it, and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flexnsa.config import num_compressed
from flexnsa.lm.estimate.parameters import layer_weights, v_dim
from flexnsa.lm.estimate.training import Precision
from flexnsa.lm.estimate.work import LINEAR
from flexnsa.lm.model.config import DecoderConfig
from flexnsa.primitives import check_choice, check_positive_int, check_type


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingEstimate:
    """One decoded token after ``seq_len`` others, in all layers; ``dense_*`` is of the same model with dense attention.

    For a model with dense attention the two are equal.
    """

    cache_bytes: int
    bytes_read: int
    flops: int
    dense_cache_bytes: int
    dense_bytes_read: int
    dense_flops: int


def estimate_decoding(
    config: DecoderConfig, *, seq_len: int, batch_size: int = 1, precision: Precision = "bf16"
) -> DecodingEstimate:
    """Estimate the cache, and what is read and computed for one more token of each sequence (NSA paper, table 4).

    The cache has capacity for that token and no more. NSA reads every compressed token, ``n`` blocks and the window;
    dense attention reads all tokens.

    Raises:
        ValueError: an argument is out of range.
    """
    check_type("config", config, DecoderConfig)
    check_positive_int("seq_len", seq_len)
    check_positive_int("batch_size", batch_size)
    check_choice("precision", precision, ("fp32", "bf16"))
    sizes = seq_len + 1, batch_size, 2 if precision == "bf16" else 4
    dense = _costs(replace(config, attention="dense"), *sizes)
    return DecodingEstimate(**_costs(config, *sizes), **{f"dense_{name}": cost for name, cost in dense.items()})


def _costs(config: DecoderConfig, tokens: int, batch_size: int, width: int) -> dict[str, int]:
    """Return the costs of the last of ``tokens`` tokens, with numbers of ``width`` bytes.

    There are two operations for each weight of a projection, and for each element that a head attends to.
    """
    branches, weights = _branches(config, tokens), layer_weights(config)
    per_number = batch_size * config.num_kv_heads * width
    linear = config.num_layers * sum(weights.get(name, 0) for name in LINEAR)
    keys = sum(branch.read for branch in branches if branch.attended)
    attention = config.num_layers * config.num_heads * (config.head_dim + v_dim(config)) * keys
    return {
        "cache_bytes": per_number * sum(branch.kept * branch.numbers * branch.layers for branch in branches),
        "bytes_read": per_number * sum(branch.read * branch.numbers * branch.layers for branch in branches),
        "flops": 2 * batch_size * (config.vocab_size * config.dim + linear + attention),
    }


@dataclass(frozen=True, slots=True)
class _Branch:
    """Tokens that one step reads and that the cache keeps, the elements of each token and key head, and the layers."""

    read: int
    kept: int
    numbers: int
    layers: int
    attended: bool = True


def _branches(config: DecoderConfig, tokens: int) -> list[_Branch]:
    """Return what the last of ``tokens`` tokens reads. Every buffer of a cache has a spare slot."""
    nsa, pair, layers = config.nsa, config.head_dim + v_dim(config), config.num_layers
    if config.attention == "dense":
        return [_Branch(tokens, tokens + 1, pair, layers)]
    own_block = (tokens - 1) % nsa.select_block_size + 1 if nsa.num_local_blocks else nsa.select_block_size
    selected = min(tokens, (nsa.num_selected_blocks - 1) * nsa.select_block_size + own_block)
    compressed = num_compressed(tokens, nsa)
    waiting = nsa.compress_block_size + 1  # raw tokens of an unfinished block
    branches = {
        "cmp": _Branch(compressed, compressed + 1 + waiting, pair, layers),
        "slc": _Branch(selected, tokens + 1, pair, layers),
        "win": _Branch(min(tokens, nsa.window_size), nsa.window_size + 1, pair, layers),
    }
    used = [branches[tag] for tag in config.branches]
    if nsa.index_heads is not None:
        keys = num_compressed(tokens, nsa.scoring)
        kept = keys + 1 + nsa.scoring.compress_block_size + 1
        used.append(_Branch(keys, kept, config.head_dim, len({*config.leaders}), attended=False))
    elif "slc" in config.branches and "cmp" not in config.branches:  # scoring needs keys without values
        used.append(replace(branches["cmp"], numbers=config.head_dim, attended=False))
    return used
