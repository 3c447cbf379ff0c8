"""How many parameters a decoder has, and which of them do what."""

from __future__ import annotations

from flexnsa.models.config import DecoderConfig
from flexnsa.validation import check_type

# The maps that every token goes through, of a layer with NSA and of its dense twin.
LINEAR = ("queries", "keys and values", "gates", "output", "MLP")
DENSE = ("queries", "keys and values", "output", "MLP")
JOINED = ("queries", "keys and values", "gates")
"""Of NSA, the maps that a GPU computes as one product or two."""


def parameter_count(config: DecoderConfig) -> int:
    """Count the parameters of the model."""
    check_type("config", config, DecoderConfig)
    return _embedding(config) + config.num_layers * sum(layer_weights(config).values()) + config.dim


def v_dim(config: DecoderConfig) -> int:
    """Give the width of a head's values."""
    return config.head_dim if config.v_head_dim is None else config.v_head_dim


def layer_weights(config: DecoderConfig) -> dict[str, int]:
    """Parameters of one layer."""
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
        weights["gates"] = config.dim * config.num_heads * num_branches
        weights["compression"] = _compressor_weights(config)
    return weights


def compressor_maps(config: DecoderConfig) -> int:
    """Weights of the first maps, from whole blocks of keys and of values."""
    widening = 4 if config.compression == "mlp" else 1
    dims = (config.head_dim, v_dim(config))
    return widening * config.nsa.compress_block_size * sum(dim * dim for dim in dims)


def _embedding(config: DecoderConfig) -> int:
    return 2 * config.vocab_size * config.dim


def _compressor_weights(config: DecoderConfig) -> int:
    if "cmp" not in config.branches or config.compression == "mean":
        return 0
    dims = (config.head_dim, v_dim(config))
    positions = config.nsa.compress_block_size * sum(dims)
    second = 4 * sum(dim * dim for dim in dims) if config.compression == "mlp" else 0
    return positions + compressor_maps(config) + second
