"""The cost of one decoded token: the cache, the bytes read from it, and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flexnsa.config import num_compressed
from flexnsa.lm.estimate.parameters import layer_weights, v_dim
from flexnsa.lm.estimate.training import Precision
from flexnsa.lm.estimate.work import DENSE, LINEAR
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
    dense = replace(config, attention="dense")
    nsa, twin = _branches(config, seq_len + 1), _branches(dense, seq_len + 1)
    per_number = batch_size * config.num_kv_heads * (2 if precision == "bf16" else 4)
    return DecodingEstimate(
        cache_bytes=per_number * sum(branch.kept * branch.numbers * branch.layers for branch in nsa.values()),
        bytes_read=per_number * sum(branch.read * branch.numbers * branch.layers for branch in nsa.values()),
        flops=_flops(config, batch_size, nsa),
        dense_cache_bytes=per_number * sum(branch.kept * branch.numbers * branch.layers for branch in twin.values()),
        dense_bytes_read=per_number * sum(branch.read * branch.numbers * branch.layers for branch in twin.values()),
        dense_flops=_flops(dense, batch_size, twin),
    )


@dataclass(frozen=True, slots=True)
class _Branch:
    """Tokens that one step reads and that the cache keeps, the elements of each token and key head, and the layers."""

    read: int
    kept: int
    numbers: int
    layers: int
    attended: bool = True


def _branches(config: DecoderConfig, tokens: int) -> dict[str, _Branch]:
    """Return what the last of ``tokens`` tokens reads. Every buffer of a cache has a spare slot."""
    nsa, pair, layers = config.nsa, config.head_dim + v_dim(config), config.num_layers
    if config.attention == "dense":
        return {"all": _Branch(tokens, tokens + 1, pair, layers)}
    own_block = (tokens - 1) % nsa.select_block_size + 1 if nsa.num_local_blocks else nsa.select_block_size
    selected = min(tokens, (nsa.num_selected_blocks - 1) * nsa.select_block_size + own_block)
    compressed = num_compressed(tokens, nsa)
    waiting = nsa.compress_block_size + 1  # raw tokens of an unfinished block
    branches = {
        "cmp": _Branch(compressed, compressed + 1 + waiting, pair, layers),
        "slc": _Branch(selected, tokens + 1, pair, layers),
        "win": _Branch(min(tokens, nsa.window_size), nsa.window_size + 1, pair, layers),
    }
    used = {tag: branches[tag] for tag in config.branches}
    if nsa.index_heads is not None:
        keys = num_compressed(tokens, nsa.scoring)
        kept = keys + 1 + nsa.scoring.compress_block_size + 1
        used["index"] = _Branch(keys, kept, config.head_dim, len({*config.leaders}), attended=False)
    elif "slc" in used and "cmp" not in used:  # scoring needs keys without values
        used["cmp"] = replace(branches["cmp"], numbers=config.head_dim, attended=False)
    return used


def _flops(config: DecoderConfig, batch_size: int, branches: dict[str, _Branch]) -> int:
    """Return two for each weight of a projection, and for each element of a key or a value that a head attends to."""
    weights = layer_weights(config)
    linear = config.num_layers * sum(weights[name] for name in (DENSE if config.attention == "dense" else LINEAR))
    keys = sum(branch.read for branch in branches.values() if branch.attended)
    pair = config.head_dim + v_dim(config)
    attention = config.num_layers * config.num_heads * pair * keys
    return 2 * batch_size * (config.vocab_size * config.dim + linear + attention)
