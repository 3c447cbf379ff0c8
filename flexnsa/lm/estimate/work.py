"""The sizes of one training step: what is saved for backward, and what else is in memory at possible peaks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexnsa.attention.flex.footprint import FOOTPRINT as FLEX
from flexnsa.attention.footprint import AttentionSizes, Footprint
from flexnsa.attention.interface import given
from flexnsa.attention.plan import Plan
from flexnsa.attention.sdpa.footprint import FOOTPRINT as SDPA
from flexnsa.attention.shares import CHUNK_SCORES
from flexnsa.attention.tiles.device import HOPPER, Device
from flexnsa.attention.triton.footprint import FOOTPRINT as TRITON
from flexnsa.attention.triton.selection_loss import scratch_bytes
from flexnsa.config import NSAConfig, num_compressed
from flexnsa.layers.indexer import SAMPLED_QUERIES
from flexnsa.lm.estimate.parameters import compressor_maps, gate_columns, layer_weights, v_dim
from flexnsa.lm.model.config import DecoderConfig
from flexnsa.lm.model.loss import rows_at_once

FOOTPRINTS = {"sdpa": SDPA, "flex": FLEX, "triton": TRITON}
"""The implementations whose memory is known in closed form."""


LINEAR = ("queries", "keys and values", "gates", "output", "MLP")
"""The projections of every token; those of a layer with dense attention have no gates."""
JOINED = ("queries", "keys and values", "gates")
"""Projections of NSA that a GPU computes as one product or two."""


@dataclass(frozen=True, slots=True)
class Work:
    """Sizes of one step; methods return bytes.

    ``activation`` is the size of an element of a projection's output. A layer ``follows`` if it has no indexer of its
    own: the blocks that it attends to are another's tensor.
    """

    config: DecoderConfig
    batch: int
    length: int
    activation: int
    impl: str
    fused_norm: bool
    compiled: bool = False
    follows: bool = False

    @property
    def weights(self) -> dict[str, int]:
        """The number of parameters of one layer, by their function."""
        return layer_weights(self.config) | ({"indexer": 0} if self.follows else {})

    @property
    def indices(self) -> int:
        """The block indices that a layer chose itself."""
        return 0 if self.follows else self.sizes.indices

    @property
    def residual(self) -> int:
        """One copy of the residual stream, fp32."""
        return 4 * self.batch * self.length * self.config.dim

    @property
    def sizes(self) -> AttentionSizes:
        """The sizes of one layer's attention."""
        return AttentionSizes(
            config=self.config.nsa,
            batch=self.batch,
            seq_len=self.length,
            num_heads=self.config.num_heads,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            v_head_dim=v_dim(self.config),
            activation=self.activation,
        )

    def norm(self) -> int:
        """Return the input of a norm, its scale, and where it is not one kernel the normed input."""
        fused = self.fused_norm or self.compiled
        return self.residual * (1 if fused else 2) + self.residual // self.config.dim

    def second_norm(self) -> int:
        """Return :meth:`norm` of the second norm; compiled code recomputes its input."""
        if not self.compiled:
            return self.norm()
        return self.residual * self.activation // 4 + self.residual // self.config.dim

    def copies_of_input(self) -> int:
        """Return the number of copies of the normed input that the projections save.

        They read the same one, but autocast casts it again for each product: on CPU for every projection, on a GPU once
        for values that are not compressed and once for all else.
        """
        if self.activation == 4 or self.compiled:
            return 1
        if self.config.attention == "dense":
            return 3
        if self.impl == "sdpa":
            return 2 + 2 * len(self.config.branches) - self.config.shared_keys
        return 1 + any(tag != "cmp" for tag in self.config.branches)

    def embedded(self) -> int:
        """Return the ids of tokens."""
        return 8 * self.batch * self.length

    def saved_outside(self) -> int:
        """Return what is saved outside of layers: tokens, the last norm, the gradients of the head and of its input."""
        return self.embedded() + self.norm() + self.residual + self.head()

    def head(self) -> int:
        """Return the gradient of the head's weight, fp32."""
        return 4 * self.config.dim * self.config.vocab_size

    def rotary_tables(self) -> int:
        """Return the cosines and sines of tokens and compressed tokens, fp32, which all layers share."""
        compressed = num_compressed(self.length, self.config.nsa) if self.config.attention == "nsa" else 0
        return 4 * (self.length + compressed + self.index_keys()) * self.config.head_dim

    def index_keys(self) -> int:
        """Return the number of index keys of a sequence; 0 without an indexer."""
        nsa = self.config.nsa
        has_indexer = self.config.attention == "nsa" and nsa.index_heads is not None
        return num_compressed(self.length, nsa.scoring) if has_indexer else 0

    def checkpoint(self) -> int:
        """Return what a checkpointed layer saves: its input, and the selection, which is not recomputed."""
        selecting = self.config.attention == "nsa" and "slc" in self.config.branches
        return self.residual + (self.indices + self.loss_gradients() if selecting else 0)

    def saved(self) -> int:
        """Return what one layer saves."""
        return sum(self.saved_by().values())

    def saved_by(self) -> dict[str, int]:
        """Return what one layer saves, by function."""
        config, sizes = self.config, self.sizes
        inputs = self.copies_of_input() + 1
        saved = {
            "norms": self.norm() + self.second_norm(),
            "inputs of projections": inputs * self.residual * self.activation // 4 + sizes.outputs,
            "MLP": self.saved_by_mlp(),
            "weights, cast": self.cast(*LINEAR) + self.joined(),
        }
        if config.attention == "dense":
            saved["attention"] = sizes.queries + sizes.keys(self.length) + sizes.outputs + sizes.lse
            return saved
        saved["compression"] = self.compression()
        saved["indexer"] = self.indexer()
        saved["gates"] = (2 - self.at_once()) * gate_columns(config) * self.batch * self.length * self.activation
        saved["attention"] = self.attention()
        return saved

    def saved_by_mlp(self) -> int:
        """Return both sides of the activation function."""
        return 8 * self.residual * self.activation // 4

    def cast(self, *names: str) -> int:
        """Return the copies that autocast makes of the named weights; none in fp32."""
        weights = self.weights
        return 2 * sum(weights.get(name, 0) for name in names) if self.activation == 2 else 0

    def joined(self) -> int:
        """Return the weights of projections that a GPU joins to read their input once, unless they are cast."""
        joined = self.config.attention == "nsa" and self.impl != "sdpa" and self.activation == 4
        return 4 * sum(layer_weights(self.config)[name] for name in JOINED) if joined else 0

    def autocast_cache(self) -> int:
        """Return the casts that autocast keeps to the end of forward: those of parameters, not of joined weights."""
        joined = self.config.attention == "nsa" and self.impl != "sdpa"
        return self.cast(*(name for name in LINEAR if not (joined and name in JOINED)))

    def compression(self) -> int:
        """Return what goes into the compressors, and the rearranged weights of their first projections (fp32: once)."""
        config, dims = self.config, (self.config.head_dim, v_dim(self.config))
        if "cmp" not in config.branches or config.compression == "mean" or not num_compressed(self.length, config.nsa):
            return 0
        maps = compressor_maps(config.compression, config.nsa.compress_block_size, *dims)
        return self.compressed(config.nsa, sum(dims)) + (1 if self.activation == 4 else 2) * self.activation * maps

    def compressed(self, blocks: NSAConfig, dim: int) -> int:
        """Return the segments of blocks of keys or values of some width, and both sides of the hidden layer."""
        kind, count = self.config.compression, num_compressed(self.length, blocks)
        parts = blocks.compress_block_size // blocks.compress_stride
        segments = 0 if kind == "mean" else (count + parts - 1) * blocks.compress_stride
        hidden = 2 * 4 * count if kind == "mlp" else 0
        return self.sizes.per_head(self.config.num_kv_heads, dim, segments + hidden)

    def indexer(self) -> int:
        """Return what compresses index keys, the sampled queries' inputs, and the gradients of the selection loss."""
        config = self.config
        if not self.index_keys() or self.follows:
            return self.loss_gradients()
        keys = self.compressed(config.nsa.scoring, config.head_dim)
        copy = self.residual // 2 if self.activation == 2 and not self.compiled else 0  # of the input, which is cast
        queries, rank = self.batch * min(SAMPLED_QUERIES, self.length), config.index_rank or 0
        sampled = queries * (config.dim * self.activation + 4 * config.head_dim)  # their inputs and rotary tables
        low_rank = (self.batch * self.length + queries) * rank * self.activation
        return keys + self.cast("indexer") + copy + sampled + low_rank + self.loss_gradients()

    def loss_gradients(self) -> int:
        """Return the gradients of the selection loss in index keys and in the index queries that it samples, fp32."""
        config = self.config
        if not self.index_keys():
            return 0
        queries = config.num_kv_heads * given(config.nsa.index_heads) * min(SAMPLED_QUERIES, self.length)
        keys = config.num_kv_heads * self.index_keys()
        return 4 * self.batch * (queries + keys) * config.head_dim

    def loss_excess(self) -> int:
        """Return what the selection loss allocates while it runs; on a CPU two copies of a chunk's true scores."""
        config, queries = self.config, min(SAMPLED_QUERIES, self.length)
        if not self.index_keys():
            return 0
        if self.impl != "sdpa":
            return scratch_bytes(self.batch, config.num_heads, config.num_kv_heads, queries, self.length, config.nsa)
        scores = self.batch * config.num_heads * self.length
        return 2 * 4 * scores * min(queries, max(1, CHUNK_SCORES["cpu"] // scores))

    def attention(self) -> int:
        """Return q, and what each branch saves besides."""
        again = sum(self.sizes.outputs if self.at_once() else self.rebuilt(tag) for tag in self.config.recompute)
        return self.attention_of_forward() - again - (self.sizes.indices - self.indices)

    def attention_of_forward(self) -> int:
        """Return q, and the inputs and outputs of each branch, saved or not."""
        sizes = self.sizes
        saved = sum(self.footprint(tag).saved(tag, sizes) for tag in self.config.branches)
        return sizes.queries + saved - self.unstored() * sizes.outputs

    def at_once(self) -> bool:
        """Return whether the branches have one backward pass, as in :mod:`flexnsa.attention.triton.gated`."""
        several = {"cmp", "slc"} <= {*self.config.branches} and "slc" not in self.config.recompute
        return several and self.impl == "triton" and self.footprint("cmp") is FOOTPRINTS["triton"]

    def unstored(self) -> int:
        """Return how many outputs of branches follow from their sum: that of the selected one, if its weight is 1."""
        return int(self.at_once() and self.config.gate == "residual")

    def footprint(self, tag: str) -> Footprint:
        """Return the footprint of a branch; ``impl="triton"`` leaves some compressed branches to FlexAttention."""
        if self.impl == "triton" and tag == "cmp" and not self.plan.compressed_in_triton:
            return FLEX
        return FOOTPRINTS[self.impl]

    @property
    def plan(self) -> Plan:
        """The kernels of the compressed branch on a Hopper GPU, for which estimates are."""
        sizes, dtype = self.sizes, torch.bfloat16 if self.activation == 2 else torch.float32
        dims, heads = (sizes.head_dim, sizes.v_head_dim), (self.config.num_heads, sizes.num_kv_heads)
        blocks = sizes.config.select_block_size
        return Plan(sizes.seq_len, sizes.length("cmp"), *heads, dims, dtype, Device(0, HOPPER), block_size=blocks)

    def rebuilt(self, tag: str) -> int:
        """Return what a recomputed branch saves for its backward besides its inputs."""
        return self.footprint(tag).saved(tag, self.sizes) - self.sizes.inputs(tag)

    def forward_excess(self, saves: bool) -> int:
        """Return the peak of forward above what is saved at its end.

        A layer that saves peaks after its last operation, a checkpointed layer inside.
        """
        # The head's input, which the loss does not save; where the norm is not one kernel, it is the normed copy
        loss = self.loss() + self.residual
        if saves:
            later = self.second_norm() + self.saved_by_mlp() + self.norm() + self.residual + self.head()
            return max(loss, self.loss_excess() - later)
        mlp = 3 * self.residual + self.saved_by_mlp()
        attention = 2 * self.residual + self.attention_of_forward() + 3 * self.sizes.queries + self.loss_excess()
        return max(loss, max(mlp, attention) - self.norm() - self.residual - self.head())

    def loss(self) -> int:
        """Return one chunk of logits, its products, and under autocast the cast head."""
        rows = min(self.batch * self.length, rows_at_once(self.config.vocab_size, self.activation))
        if self.activation == 4:
            return 4 * rows * (self.config.vocab_size + self.config.dim)
        cast = 2 * self.config.dim * self.config.vocab_size
        return cast + rows * (6 * self.config.vocab_size + 6 * self.config.dim)

    def head_excess(self) -> int:
        """Return the scaled gradient of the head's input, or those of the last norm, three if it is not one kernel."""
        return max(self.residual, (1 if self.fused_norm else 2) * self.residual - self.head())

    def backward_excess(self) -> list[int]:
        """Return the possible peaks of a layer's backward above what the layer saved."""
        config, sizes = self.config, self.sizes
        weights = {name: 4 * size for name, size in self.weights.items()}
        above = self.residual  # gradient of the layer's output
        wide = 4 * self.residual * self.activation // 4
        matrix = weights["MLP"] // 2
        # The MLP, its norm and its cast weights are freed; their gradients stay
        saved = self.saved_by()
        done = saved["MLP"] + self.residual * self.activation // 4 + self.cast("MLP")
        outside = above - done - self.second_norm() - self.cast("output") + weights["MLP"] + weights["output"]
        outside += self.residual if self.compiled else 0  # PyTorch holds a compiled layer's arguments until it returns
        if self.activation == 4:
            moments = [above + wide + matrix]
        else:  # the gradient of a weight is bf16 first, and then also fp32
            moments = [above + self.residual // 2 + wide + matrix // 2, above + matrix]
            moments.append(above + self.residual - done + weights["MLP"] + matrix // 2)
        if config.attention == "dense":
            moments.append(outside + 2 * sizes.queries + 3 * sizes.keys(self.length))
        else:
            moments += [outside + excess for excess in self.attention_excess()]
        # After all but the first norm: its input and gradients remain, and the gradient of every weight
        projections = sum(weights.values()) - sum(saved.values())
        moments.append(projections + self.norm() + 4 * self.residual + sizes.queries)
        return moments

    def attention_excess(self) -> list[int]:
        """Return the peak of each branch's backward above what the attention saved, the last branch first.

        The gradients of saved outputs are computed at once, that of a recomputed output with its branch.
        """
        config, sizes = self.config, self.sizes
        if self.at_once():
            return [self.excess_at_once()]
        above = (len(config.branches) - len(config.recompute) - (not config.recompute)) * sizes.outputs
        moments = []
        backward = [tag for tag in ("slc", "win", "cmp") if tag in config.branches]  # the selected branch runs last
        for tag in backward:
            again = tag in config.recompute
            outputs = sizes.outputs + self.rebuilt(tag) if again else 0
            moments.append(above + outputs + self.footprint(tag).backward(tag, sizes))
            # Its output and its gradient are freed. The gradient of q stays; those of other branches add to it
            above += (sizes.queries if tag == backward[0] else 0) - (0 if again else 2 * sizes.outputs)
        return moments

    def excess_at_once(self) -> int:
        """Return the peak of that backward pass, which is in the selected branch, above what the attention saved.

        The gradient of the sum and those of q and of the other branches' keys are there, and the stats of all branches.
        On Hopper the gradient of q from the window is computed with the sum. The gradient of the output's weight comes
        later, so its operands are there, too. Outputs that are computed again are there before those gradients.
        """
        sizes, branches, again = self.sizes, self.config.branches, len(self.config.recompute)
        others = [tag for tag in branches if tag != "slc"]
        of_queries = (1 if self.plan.joins_backward else len(others)) * sizes.queries
        of_keys = sum(sizes.keys(sizes.length(tag)) for tag in others)
        gradients = of_queries + of_keys + self.footprint("slc").backward("slc", sizes)
        there = 2 * sizes.outputs + 2 * self.residual * self.activation // 4 + 2 * len(others) * sizes.lse
        freed = len(branches) - self.unstored() - again if self.compiled else 0  # outputs, once stats are computed
        return there + max(again * sizes.outputs, gradients - freed * sizes.outputs)
