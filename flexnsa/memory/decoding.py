"""What one decoded token costs: the cache, what is read of it, and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from flexnsa.checks import check_choice, check_positive_int
from flexnsa.geometry import num_compressed
from flexnsa.memory.training import Precision
from flexnsa.memory.weights import DENSE, LINEAR, layer_weights, v_dim
from flexnsa.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingEstimate:
    """One decoded token after ``seq_len`` others, all layers; ``dense_*`` is the same model with dense attention."""

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

    The cache has room for that token and no more. NSA reads every compressed token, ``n`` blocks and the window; dense
    attention reads all tokens.

    Raises:
        ValueError: an argument is out of range.
    """
    check_positive_int("seq_len", seq_len)
    check_positive_int("batch_size", batch_size)
    check_choice("precision", precision, ("fp32", "bf16"))
    nsa, pair, tokens = config.nsa, config.head_dim + v_dim(config), seq_len + 1
    own_block = (tokens - 1) % nsa.select_block_size + 1 if nsa.num_local_blocks else nsa.select_block_size
    read = {
        "cmp": num_compressed(tokens, nsa),
        "slc": min(tokens, (nsa.num_selected_blocks - 1) * nsa.select_block_size + own_block),
        "win": min(tokens, nsa.window_size),
    }
    # Every buffer of the cache has a spare slot; raw tokens of a compression block wait beside the compressed ones.
    kept = {"cmp": read["cmp"] + 1 + nsa.compress_block_size + 1, "slc": tokens + 1, "win": nsa.window_size + 1}
    numbers = dict.fromkeys(config.branches, pair)
    if "slc" in numbers:
        numbers.setdefault("cmp", config.head_dim)  # to be scored, keys need no values
    per_number = batch_size * config.num_layers * config.num_kv_heads * (2 if precision == "bf16" else 4)
    weights = {name: config.num_layers * size for name, size in layer_weights(config).items()}
    dense_weights = weights | {"keys and values": weights["keys and values"] // max(1, len(config.branches))}
    linear = 2 * batch_size * (config.vocab_size * config.dim + sum(weights[name] for name in LINEAR))
    dense_linear = 2 * batch_size * (config.vocab_size * config.dim + sum(dense_weights[name] for name in DENSE))
    per_key = 2 * batch_size * config.num_layers * config.num_heads * pair
    return DecodingEstimate(
        cache_bytes=per_number * sum(kept[tag] * size for tag, size in numbers.items()),
        bytes_read=per_number * sum(read[tag] * size for tag, size in numbers.items()),
        flops=linear + per_key * sum(read[tag] for tag in config.branches),
        dense_cache_bytes=per_number * (tokens + 1) * pair,
        dense_bytes_read=per_number * tokens * pair,
        dense_flops=dense_linear + per_key * tokens,
    )
