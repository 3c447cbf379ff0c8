"""The numbers of parameters of a model and of one layer, by their function."""

from __future__ import annotations

from flexnsa.config import gated_branches
from flexnsa.lm.model.config import DecoderConfig
from flexnsa.primitives import check_type


def parameter_count(config: DecoderConfig) -> int:
    """Count the parameters of the model."""
    check_type("config", config, DecoderConfig)
    weights, indexers = layer_weights(config), len({*config.leaders})
    followers = config.num_layers - indexers
    layers = config.num_layers * sum(weights.values()) - followers * weights.get("indexer", 0)
    return 2 * config.vocab_size * config.dim + layers + config.dim


def v_dim(config: DecoderConfig) -> int:
    """Return the width of a head's values."""
    return config.head_dim if config.v_head_dim is None else config.v_head_dim


def layer_weights(config: DecoderConfig) -> dict[str, int]:
    """Return the number of parameters of one layer, by their function."""
    nsa = config.attention == "nsa"
    num_branches = len(config.branches) if nsa else 1
    widths = (num_branches - (nsa and config.shared_keys)) * config.head_dim + num_branches * v_dim(config)
    weights = {
        "norms": 2 * config.dim,
        "queries": config.dim * config.num_heads * config.head_dim,
        "keys and values": config.dim * config.num_kv_heads * widths,
        "output": config.dim * config.num_heads * v_dim(config),
        "MLP": 8 * config.dim**2,
    }
    if nsa:
        weights["gates"] = config.dim * gate_columns(config)
        compressed = (config.head_dim, v_dim(config)) if "cmp" in config.branches else ()
        weights["compression"] = _compressor_weights(config.compression, config.nsa.compress_block_size, *compressed)
        weights["indexer"] = _indexer_weights(config)
    return weights


def gate_columns(config: DecoderConfig) -> int:
    """Return the number of gates of a token."""
    return config.num_heads * len(gated_branches(config.gate, config.branches))


def compressor_maps(compression: str, block_size: int, *dims: int) -> int:
    """Return the number of weights of the first projections, of whole blocks of keys or values of these widths."""
    return (4 if compression == "mlp" else 1) * block_size * sum(dim * dim for dim in dims)


def _compressor_weights(compression: str, block_size: int, *dims: int) -> int:
    """Return the parameters of what compresses blocks: positions, first projections, and second ones of an MLP."""
    if compression == "mean":
        return 0
    second = 4 * sum(dim * dim for dim in dims) if compression == "mlp" else 0
    return block_size * sum(dims) + compressor_maps(compression, block_size, *dims) + second


def _indexer_weights(config: DecoderConfig) -> int:
    """Return the parameters of the two changes, and of what compresses index keys."""
    heads, dim = config.nsa.index_heads, config.head_dim
    if heads is None:
        return 0
    widths = [config.num_kv_heads * heads * dim, config.num_kv_heads * dim]
    rank = config.index_rank
    changes = sum(config.dim * width if rank is None else rank * (config.dim + width) for width in widths)
    return changes + _compressor_weights(config.compression, config.nsa.scoring.compress_block_size, dim)
