"""The sizes of one training step: what is saved for backward, and what stands beside it at its largest moments."""

from __future__ import annotations

from dataclasses import dataclass

from flexnsa.attention.flex.footprint import FOOTPRINT as FLEX
from flexnsa.attention.footprint import AttentionSizes, Footprint
from flexnsa.attention.sdpa.footprint import FOOTPRINT as SDPA
from flexnsa.attention.triton.footprint import FOOTPRINT as TRITON
from flexnsa.geometry import BRANCHES, num_compressed
from flexnsa.memory.weights import DENSE, JOINED, LINEAR, compressor_maps, layer_weights, v_dim
from flexnsa.models.config import DecoderConfig
from flexnsa.models.loss import rows_at_once

FOOTPRINTS: dict[str, dict[str, Footprint]] = {
    "sdpa": dict.fromkeys(BRANCHES, SDPA),
    "flex": dict.fromkeys(BRANCHES, FLEX),
    "triton": {"cmp": FLEX, "slc": TRITON, "win": TRITON},
}
"""The implementations whose memory is known in closed form: by branch, as they are composed of kernels."""


@dataclass(frozen=True, slots=True)
class Work:
    """One step's sizes; methods give bytes. ``activation`` is the size of a number that a linear map puts out."""

    config: DecoderConfig
    batch: int
    length: int
    activation: int
    impl: str
    fused_norm: bool
    compiled: bool = False

    @property
    def residual(self) -> int:
        """One copy of the residual stream, fp32."""
        return 4 * self.batch * self.length * self.config.dim

    @property
    def sizes(self) -> AttentionSizes:
        """Those of one layer's attention."""
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
        """Input of a norm, its scale, and where it is not one kernel the normed input."""
        fused = self.fused_norm or self.compiled
        return self.residual * (1 if fused else 2) + self.residual // self.config.dim

    def second_norm(self) -> int:
        """As :meth:`norm`; what is compiled computes its input anew, from that of the first and what attention adds."""
        if not self.compiled:
            return self.norm()
        return self.residual * self.activation // 4 + self.residual // self.config.dim

    def copies_of_input(self) -> int:
        """Copies of the normed input that the projections save.

        They read the same one, but autocast casts it anew for each product: for every map on a CPU, on a GPU for the
        values that are kept as they are and for all else.
        """
        if self.activation == 4 or self.compiled:
            return 1
        if self.config.attention == "dense":
            return 3
        if self.impl == "sdpa":
            return 2 + 2 * len(self.config.branches) - self.config.shared_keys
        return 1 + any(tag != "cmp" for tag in self.config.branches)

    def embedded(self) -> int:
        """Token numbers."""
        return 8 * self.batch * self.length

    def saved_outside(self) -> int:
        """What is saved outside of the layers: tokens, the last norm, the gradients of the head and of its input."""
        return self.embedded() + self.norm() + self.residual + self.head()

    def head(self) -> int:
        """The gradient of the head's weight, fp32."""
        return 4 * self.config.dim * self.config.vocab_size

    def rotary_tables(self) -> int:
        """Cosines and sines of tokens and of compressed tokens, fp32, which all layers share."""
        compressed = num_compressed(self.length, self.config.nsa) if self.config.attention == "nsa" else 0
        return 4 * (self.length + compressed) * self.config.head_dim

    def checkpoint(self) -> int:
        """What a checkpointed layer saves: its input, and the selection, which is not repeated."""
        selecting = self.config.attention == "nsa" and "slc" in self.config.branches
        return self.residual + (self.sizes.indices if selecting else 0)

    def saved_by(self) -> dict[str, int]:
        """Split what one layer saves by what it is for."""
        config, nsa = self.config, self.config.attention == "nsa"
        sizes = self.sizes
        inputs = self.copies_of_input() + 1
        saved = {
            "norms": self.norm() + self.second_norm(),
            "inputs of projections": inputs * self.residual * self.activation // 4 + sizes.outputs,
            "MLP": 8 * self.residual * self.activation // 4,
        }
        saved["weights, cast"] = self.cast(*(LINEAR if nsa else DENSE)) + self.joined()
        if not nsa:
            saved["attention"] = sizes.queries + sizes.keys(self.length) + sizes.outputs + sizes.lse
            return saved
        saved["compression"] = self.compression()
        saved["gates"] = 6 * self.batch * self.length * config.num_heads * self.activation
        saved["attention"] = self.attention()
        return saved

    def cast(self, *names: str) -> int:
        """The copies that autocast makes of the named weights; it makes none in fp32."""
        weights = layer_weights(self.config)
        return 2 * sum(weights.get(name, 0) for name in names) if self.activation == 2 else 0

    def joined(self) -> int:
        """The weights of the projections that a GPU joins to read their input once; cast, they count as such."""
        joined = self.config.attention == "nsa" and self.impl != "sdpa" and self.activation == 4
        return 4 * sum(layer_weights(self.config)[name] for name in JOINED) if joined else 0

    def autocast_cache(self) -> int:
        """What autocast keeps of its casts to the end of forward: those of parameters, which joined weights are not."""
        joined = self.config.attention == "nsa" and self.impl != "sdpa"
        names = LINEAR if self.config.attention == "nsa" else DENSE
        return self.cast(*(name for name in names if not (joined and name in JOINED)))

    def compression(self) -> int:
        """Segments, both sides of the hidden layer, and the weights of the first one rearranged (fp32: once)."""
        config, nsa = self.config, self.config.nsa
        count = num_compressed(self.length, nsa)
        if "cmp" not in config.branches or config.compression == "mean" or not count:
            return 0
        parts = nsa.compress_block_size // nsa.compress_stride
        sizes = self.sizes
        segments = sizes.keys((count + parts - 1) * nsa.compress_stride)
        weights = (1 if self.activation == 4 else 2) * self.activation * compressor_maps(config)
        hidden = 2 * 4 * sizes.keys(count) if config.compression == "mlp" else 0
        return segments + hidden + weights

    def attention(self) -> int:
        """q, and what each branch saves beside it."""
        again = sum(self.rebuilt(tag) for tag in self.config.recompute)
        return self.attention_of_forward() - again

    def attention_of_forward(self) -> int:
        """q, and what each branch gives and reads, be it saved or not."""
        sizes = self.sizes
        return sizes.queries + sum(self.footprint(tag).saved(tag, sizes) for tag in self.config.branches)

    def footprint(self, tag: str) -> Footprint:
        """That of a branch."""
        return FOOTPRINTS[self.impl][tag]

    def rebuilt(self, tag: str) -> int:
        """What a branch that is run again leaves to backward, beside its inputs, when its turn comes."""
        return self.footprint(tag).saved(tag, self.sizes) - self.sizes.inputs(tag)

    def forward_excess(self, saves: bool) -> int:
        """What the largest moment of forward holds above what is saved at its end.

        A layer that saves holds the most after its last operation. One that does not lets go of everything at its end:
        its largest moment is inside.
        """
        # The head's input, which the loss does not keep; where the norm is not one kernel, it is its normed copy.
        loss = self.loss() + self.residual
        if saves:
            return loss
        mlp = 3 * self.residual + 8 * self.residual * self.activation // 4
        attention = 2 * self.residual + self.attention_of_forward() + 3 * self.sizes.queries
        return max(loss, max(mlp, attention) - self.norm() - self.residual - self.head())

    def loss(self) -> int:
        """One chunk of logits, the products that make it, and under autocast the head as it is cast."""
        rows = min(self.batch * self.length, rows_at_once(self.config.vocab_size, self.activation))
        if self.activation == 4:
            return 4 * rows * (self.config.vocab_size + self.config.dim)
        cast = 2 * self.config.dim * self.config.vocab_size
        return cast + rows * (6 * self.config.vocab_size + 6 * self.config.dim)

    def head_excess(self) -> int:
        """The gradient of the head's input scaled; or those of the last norm, which in parts makes three of one."""
        return max(self.residual, (1 if self.fused_norm else 2) * self.residual - self.head())

    def backward_excess(self) -> list[int]:
        """What the moments of a layer's backward hold above all that the layer saved."""
        config, sizes = self.config, self.sizes
        weights = {name: 4 * size for name, size in layer_weights(config).items()}
        above = self.residual  # gradient of the layer's output
        wide = 4 * self.residual * self.activation // 4
        matrix = weights["MLP"] // 2
        # The MLP and its norm are behind, so are its weights as autocast had cast them; their gradients stay.
        saved = self.saved_by()
        done = saved["MLP"] + self.residual * self.activation // 4 + self.cast("MLP")
        outside = above - done - self.second_norm() - self.cast("output") + weights["MLP"] + weights["output"]
        if self.activation == 4:
            moments = [above + wide + matrix]
        else:  # the gradient of a weight is as narrow as its cast, then stands beside the one in fp32
            moments = [above + self.residual // 2 + wide + matrix // 2, above + matrix]
            moments.append(above + self.residual - done + weights["MLP"] + matrix // 2)
        if config.attention == "dense":
            moments.append(outside + 2 * sizes.queries + 3 * sizes.keys(self.length))
        else:
            moments += [outside + excess for excess in self.attention_excess()]
        # All but the first norm is behind: its input and gradients remain, and the gradient of every weight.
        projections = sum(weights.values()) - sum(saved.values())
        moments.append(projections + self.norm() + 4 * self.residual + sizes.queries)
        return moments

    def attention_excess(self) -> list[int]:
        """What each branch's backward holds above all that the attention saved, the last branch first.

        The gradients of the outputs that were kept are computed at once, that of an output computed anew in its turn.
        """
        config, sizes = self.config, self.sizes
        above = (len(config.branches) - len(config.recompute) - (not config.recompute)) * sizes.outputs
        moments = []
        for tag in reversed(config.branches):
            again = tag in config.recompute
            own = sizes.outputs + self.rebuilt(tag) if again else 0
            moments.append(above + own + self.footprint(tag).backward(tag, sizes))
            # Its output and that one's gradient are freed. The gradient of q stays; those of the others add to it.
            above += (sizes.queries if tag == config.branches[-1] else 0) - (0 if again else 2 * sizes.outputs)
        return moments
