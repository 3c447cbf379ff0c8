"""How much memory a decoder takes, and what one decoded token costs: closed forms of the configuration, no tensors.

Every term is a line below that names what is held. The forms follow the code: what each layer saves for backward, and
what stands at once in the moments that can be the largest. Activations count once however many operations read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flexnsa.attention.key_major import MAX_ROWS
from flexnsa.attention.sdpa import COMPRESSED_CHUNK, WINDOW_CHUNK
from flexnsa.checks import check_choice, check_positive_int
from flexnsa.geometry import num_blocks, num_compressed
from flexnsa.models.config import DecoderConfig

Precision = Literal["fp32", "bf16"]
IMPLEMENTATIONS = ("sdpa", "flex")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes of one training step; ``saved_by`` splits what one layer saves for backward."""

    parameters: int
    optimizer: int
    saved: int
    saved_by: dict[str, int]
    after_forward: int
    peak_forward: int
    peak_training: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingEstimate:
    """One decoded token after ``seq_len`` others, all layers; ``dense_*`` is the same model with dense attention."""

    cache_bytes: int
    bytes_read: int
    flops: int
    dense_cache_bytes: int
    dense_bytes_read: int
    dense_flops: int


def parameter_count(config: DecoderConfig) -> int:
    """Count the parameters of the model."""
    return _embedding(config) + config.num_layers * sum(_layer_weights(config).values()) + config.dim


def estimate_training(
    config: DecoderConfig,
    *,
    seq_len: int,
    batch_size: int = 1,
    precision: Precision = "fp32",
    impl: str = "sdpa",
    fused_norm: bool = False,
    optimizer: bool = False,
) -> MemoryEstimate:
    """Estimate the memory of one forward and backward pass of :class:`flexnsa.models.DecoderLM`.

    Args:
        config: of the model; its ``checkpointing`` decides what layers save.
        seq_len: tokens of a sequence.
        batch_size: sequences.
        precision: ``"fp32"``, or ``"bf16"`` for autocast; parameters are fp32 either way.
        impl: ``"sdpa"`` or ``"flex"``; dense attention ignores it.
        fused_norm: RMSNorm is one kernel that keeps its input alone, as on CUDA; elsewhere it keeps a normed copy too.
        optimizer: count AdamW's two moments in the peak.

    Raises:
        ValueError: an argument is out of range.
    """
    check_positive_int("seq_len", seq_len)
    check_positive_int("batch_size", batch_size)
    check_choice("precision", precision, ("fp32", "bf16"))
    check_choice("impl", impl, IMPLEMENTATIONS)
    work = _Work(config, batch_size, seq_len, 2 if precision == "bf16" else 4, impl, fused_norm)
    parameters = 4 * parameter_count(config)
    moments = 2 * parameters if optimizer else 0
    saved_by = work.saved_by()
    layer = sum(saved_by.values())
    held = [work.checkpoint() if config.is_checkpointed(index) else layer for index in range(config.num_layers)]
    saved = sum(held) + work.saved_outside()
    return MemoryEstimate(
        parameters=parameters,
        optimizer=2 * parameters,
        saved=saved,
        saved_by=saved_by,
        after_forward=parameters + saved,
        peak_forward=moments + parameters + saved + work.forward_excess(held[-1] == layer),
        peak_training=moments + parameters + _peak_backward(work, held, layer),
    )


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
    nsa, pair, tokens = config.nsa, config.head_dim + _v_dim(config), seq_len + 1
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
    weights = {name: config.num_layers * size for name, size in _layer_weights(config).items()}
    dense_weights = weights | {"keys and values": weights["keys and values"] // max(1, len(config.branches))}
    linear = 2 * batch_size * (config.vocab_size * config.dim + sum(weights[name] for name in _LINEAR))
    dense_linear = 2 * batch_size * (config.vocab_size * config.dim + sum(dense_weights[name] for name in _DENSE))
    per_key = 2 * batch_size * config.num_layers * config.num_heads * pair
    return DecodingEstimate(
        cache_bytes=per_number * sum(kept[tag] * size for tag, size in numbers.items()),
        bytes_read=per_number * sum(read[tag] * size for tag, size in numbers.items()),
        flops=linear + per_key * sum(read[tag] for tag in config.branches),
        dense_cache_bytes=per_number * (tokens + 1) * pair,
        dense_bytes_read=per_number * tokens * pair,
        dense_flops=dense_linear + per_key * tokens,
    )


def _peak_backward(work: _Work, held: list[int], layer: int) -> int:
    """Go through the moments of backward that can be the largest, in the last layer and in the first.

    On the way down what layers saved is freed and gradients of weights come in its place. Both are linear in the layer,
    so the largest moment of all is in one of the two end layers.
    """
    layer_gradients = 4 * sum(_layer_weights(work.config).values())
    head_gradients = 4 * work.config.dim * (work.config.vocab_size + 1)
    moments = [sum(held) + work.saved_outside() + work.head_excess() + head_gradients]
    for index in {0, len(held) - 1}:
        below = sum(held[:index]) + work.embedded() + (len(held) - 1 - index) * layer_gradients + head_gradients
        # A checkpointed layer keeps its input while it is computed anew.
        own = layer + (held[index] if work.config.is_checkpointed(index) else 0)
        moments += [below + own + excess for excess in work.backward_excess()]
    return max(moments)


@dataclass(frozen=True, slots=True)
class _Work:
    """One step's sizes; methods give bytes. ``activation`` is the size of a number that a linear map puts out."""

    config: DecoderConfig
    batch: int
    length: int
    activation: int
    impl: str
    fused_norm: bool

    @property
    def residual(self) -> int:
        """One copy of the residual stream, fp32."""
        return 4 * self.batch * self.length * self.config.dim

    @property
    def queries(self) -> int:
        """All query heads."""
        return self.per_head(self.config.num_heads, self.config.head_dim)

    @property
    def outputs(self) -> int:
        """Output of one branch."""
        return self.per_head(self.config.num_heads, _v_dim(self.config))

    def per_head(self, heads: int, dim: int, length: int | None = None) -> int:
        """``(B, heads, length, dim)``."""
        return self.activation * self.batch * heads * (self.length if length is None else length) * dim

    def keys(self, length: int | None = None) -> int:
        """Keys and values of one branch."""
        return self.per_head(self.config.num_kv_heads, self.config.head_dim + _v_dim(self.config), length)

    def norm(self) -> int:
        """Input of a norm, its scale, and where it is not one kernel the normed input."""
        return self.residual * (1 if self.fused_norm else 2) + self.residual // self.config.dim

    def embedded(self) -> int:
        """Token numbers."""
        return 8 * self.batch * self.length

    def saved_outside(self) -> int:
        """What is saved outside of the layers: tokens, the last norm, the input of the head."""
        cast = 2 * self.config.dim * self.config.vocab_size if self.activation == 2 else 0
        return self.embedded() + self.norm() + self.residual * self.activation // 4 + cast

    def checkpoint(self) -> int:
        """What a checkpointed layer saves: its input, and the selection, which is not repeated."""
        selecting = self.config.attention == "nsa" and "slc" in self.config.branches
        return self.residual + (self.indices() if selecting else 0)

    def indices(self) -> int:
        """Selected blocks, int32."""
        return 4 * self.batch * self.config.num_kv_heads * self.length * self.config.nsa.num_selected_blocks

    def saved_by(self) -> dict[str, int]:
        """Split what one layer saves by what it is for."""
        config, nsa = self.config, self.config.attention == "nsa"
        branches = config.branches if nsa else ("slc",)
        rows = self.batch * self.length
        # fp32: every projection reads the same normed input. Autocast casts it anew for each.
        inputs = 1 if self.activation == 4 else 1 + 2 * len(branches) + nsa
        turned = 1 + len([tag for tag in branches if tag != "cmp"])
        saved = {
            "norms": 2 * self.norm(),
            "inputs of projections": (inputs + 1) * self.residual * self.activation // 4 + self.outputs,
            "MLP": 8 * self.residual * self.activation // 4,
            "rotary tables": 4 * self.length * config.head_dim * turned,
        }
        if self.activation == 2:
            weights = _layer_weights(config)
            saved["weights, cast"] = 2 * sum(weights[name] for name in (_LINEAR if nsa else _DENSE) if name in weights)
        if not nsa:
            saved["attention"] = self.queries + self.keys() + self.outputs + 4 * rows * config.num_heads
            return saved
        saved["compression"] = self.compression()
        saved["gates"] = 6 * rows * config.num_heads * self.activation
        saved["attention"] = self.attention()
        return saved

    def compression(self) -> int:
        """Segments, both sides of the hidden layer, and the weights of the first one rearranged (fp32: once)."""
        config, nsa = self.config, self.config.nsa
        count = num_compressed(self.length, nsa)
        if "cmp" not in config.branches or config.compression == "mean" or not count:
            return 0
        parts = nsa.compress_block_size // nsa.compress_stride
        segments = self.keys((count + parts - 1) * nsa.compress_stride)
        weights = (1 if self.activation == 4 else 2) * self.activation * _compressor_maps(config)
        hidden = 2 * 4 * self.keys(count) if config.compression == "mlp" else 0
        rotary = 4 * count * config.head_dim
        return segments + hidden + weights + rotary

    def attention(self) -> int:
        """q, and per branch keys, values, output, log-sum-exp and whatever says which key meets which query."""
        config, rows = self.config, self.batch * self.length
        total = self.queries
        for tag in config.branches:
            length = num_compressed(self.length, config.nsa) if tag == "cmp" else self.length
            total += self.keys(length) + self.outputs + 4 * rows * config.num_heads + 8 * self.length
            if self.impl == "flex":
                total += self.flex_copies(tag, length)
        return total + (self.indices() if "slc" in config.branches else 0)

    def flex_copies(self, tag: str, length: int) -> int:
        """What FlexAttention's kernels want laid out otherwise."""
        config, nsa = self.config, self.config.nsa
        group = config.num_heads // config.num_kv_heads
        if tag == "cmp":  # repeated to all query heads
            padded = (length // 128 + 1) * 128
            return group * self.keys(padded)
        if tag == "slc":  # queries and outputs in rows of 16, keys gathered by copy, lists of both sides
            rows = -(-group // 16) * 16
            copies = num_blocks(self.length, nsa) + self.length // nsa.select_block_size
            lists = 4 * self.batch * config.num_kv_heads * copies * nsa.select_block_size
            folded = rows * (self.queries + self.outputs) // group
            return folded + self.keys(copies * nsa.select_block_size) + lists * (nsa.num_selected_blocks + 1)
        return 0

    def forward_excess(self, saves: bool) -> int:
        """What the largest moment of forward holds above what is saved at its end.

        A layer that saves holds the most after its last operation. One that does not lets go of everything at its end:
        its largest moment is inside.
        """
        logits = self.batch * self.length * self.config.vocab_size * self.activation
        if saves:
            return logits
        mlp = 3 * self.residual + 8 * self.residual * self.activation // 4
        attention = 2 * self.residual + self.attention() + 3 * self.queries
        return max(logits, max(mlp, attention) - self.norm())

    def head_excess(self) -> int:
        """Gradients of the logits and of the head's input; or of the last norm, which in parts makes three of one."""
        logits = self.batch * self.length * self.config.vocab_size * self.activation
        return max(logits + self.residual, (2 if self.fused_norm else 3) * self.residual)

    def backward_excess(self) -> list[int]:
        """What the moments of a layer's backward hold above all that the layer saved."""
        config, weights = self.config, {name: 4 * size for name, size in _layer_weights(self.config).items()}
        above = self.residual  # gradient of the layer's output
        wide = 4 * self.residual * self.activation // 4
        mlp = above + wide + weights["MLP"] // 2
        # The MLP and its norm are behind; the gradient of their weights stays.
        saved = self.saved_by()
        done = saved["MLP"] + self.norm() + self.residual * self.activation // 4
        outside = above - done + weights["MLP"] + weights["output"]
        moments = [mlp]
        if config.attention == "dense":
            moments.append(outside + 2 * self.queries + 3 * self.keys())
        else:
            gradients = (len(config.branches) - 1) * self.outputs
            for tag in reversed(config.branches):
                moments.append(outside + gradients + self.branch_excess(tag))
                # Its output and that one's gradient are freed. The gradient of q stays; those of the others add to it.
                gradients += (self.queries if tag == config.branches[-1] else 0) - 2 * self.outputs
        # All but the first norm is behind: its input and gradients remain, and the gradient of every weight.
        projections = sum(weights.values()) - sum(saved.values())
        moments.append(projections + self.norm() + 4 * self.residual + self.queries)
        return moments

    def branch_excess(self, tag: str) -> int:
        """What the backward of one branch allocates."""
        config, nsa, acc = self.config, self.config.nsa, 4
        group = config.num_heads // config.num_kv_heads
        length = num_compressed(self.length, nsa) if tag == "cmp" else self.length
        fp32 = acc // self.activation
        if self.impl == "flex":
            rows = -(-group // 16) * 16 if tag == "slc" else group
            factor = group if tag == "cmp" else 2 if tag == "slc" else 1
            return rows * (2 * self.queries + self.outputs) // group + factor * self.keys(length)
        if tag == "slc":
            workspace = acc * MAX_ROWS * group * (2 * nsa.select_block_size + 3 * config.head_dim)
            return fp32 * (4 * self.queries + self.outputs + self.keys()) + workspace
        chunk = COMPRESSED_CHUNK if tag == "cmp" else WINDOW_CHUNK
        reach = length if tag == "cmp" else min(self.length, nsa.window_size + chunk - 1)
        chunk = min(chunk, self.length)
        scores = 2 * acc * self.batch * config.num_heads * chunk * reach
        per_chunk = 5 * acc * self.batch * config.num_heads * chunk * config.head_dim
        return self.queries + fp32 * self.keys(length) + scores + per_chunk


_LINEAR = ("queries", "keys and values", "gates", "output", "MLP")
_DENSE = ("queries", "keys and values", "output", "MLP")


def _v_dim(config: DecoderConfig) -> int:
    return config.head_dim if config.v_head_dim is None else config.v_head_dim


def _embedding(config: DecoderConfig) -> int:
    return 2 * config.vocab_size * config.dim


def _layer_weights(config: DecoderConfig) -> dict[str, int]:
    """Parameters of one layer."""
    nsa = config.attention == "nsa"
    num_branches = len(config.branches) if nsa else 1
    weights = {
        "norms": 2 * config.dim,
        "queries": config.dim * config.num_heads * config.head_dim,
        "keys and values": num_branches * config.dim * config.num_kv_heads * (config.head_dim + _v_dim(config)),
        "output": config.dim * config.num_heads * _v_dim(config),
        "MLP": 8 * config.dim**2,
    }
    if nsa:
        weights["gates"] = config.dim * config.num_heads * num_branches
        weights["compression"] = _compressor_weights(config)
    return weights


def _compressor_weights(config: DecoderConfig) -> int:
    if "cmp" not in config.branches or config.compression == "mean":
        return 0
    dims = (config.head_dim, _v_dim(config))
    positions = config.nsa.compress_block_size * sum(dims)
    second = 4 * sum(dim * dim for dim in dims) if config.compression == "mlp" else 0
    return positions + _compressor_maps(config) + second


def _compressor_maps(config: DecoderConfig) -> int:
    """Weights of the first maps, from whole blocks of keys and of values."""
    widening = 4 if config.compression == "mlp" else 1
    dims = (config.head_dim, _v_dim(config))
    return widening * config.nsa.compress_block_size * sum(dim * dim for dim in dims)
