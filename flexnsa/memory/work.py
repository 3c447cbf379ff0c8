"""The sizes of one training step: what is saved for backward, and what stands beside it at its largest moments."""

from __future__ import annotations

from dataclasses import dataclass

from flexnsa.attention.sdpa.branches import COMPRESSED_CHUNK, WINDOW_CHUNK
from flexnsa.attention.sdpa.key_major import MAX_ROWS
from flexnsa.attention.threads import ROWS
from flexnsa.geometry import num_blocks, num_compressed
from flexnsa.memory.weights import DENSE, LINEAR, compressor_maps, layer_weights, v_dim
from flexnsa.models.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Work:
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
        return self.per_head(self.config.num_heads, v_dim(self.config))

    def per_head(self, heads: int, dim: int, length: int | None = None) -> int:
        """``(B, heads, length, dim)``."""
        return self.activation * self.batch * heads * (self.length if length is None else length) * dim

    def keys(self, length: int | None = None) -> int:
        """Keys and values of one branch."""
        return self.per_head(self.config.num_kv_heads, self.config.head_dim + v_dim(self.config), length)

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
        saved["weights, cast"] = self.cast(*(LINEAR if nsa else DENSE))
        if not nsa:
            saved["attention"] = self.queries + self.keys() + self.outputs + 4 * rows * config.num_heads
            return saved
        saved["compression"] = self.compression()
        saved["gates"] = 6 * rows * config.num_heads * self.activation
        saved["attention"] = self.attention()
        return saved

    def cast(self, *names: str) -> int:
        """The copies that autocast makes of the named weights; it makes none in fp32."""
        weights = layer_weights(self.config)
        return 2 * sum(weights.get(name, 0) for name in names) if self.activation == 2 else 0

    def compression(self) -> int:
        """Segments, both sides of the hidden layer, and the weights of the first one rearranged (fp32: once)."""
        config, nsa = self.config, self.config.nsa
        count = num_compressed(self.length, nsa)
        if "cmp" not in config.branches or config.compression == "mean" or not count:
            return 0
        parts = nsa.compress_block_size // nsa.compress_stride
        segments = self.keys((count + parts - 1) * nsa.compress_stride)
        weights = (1 if self.activation == 4 else 2) * self.activation * compressor_maps(config)
        hidden = 2 * 4 * self.keys(count) if config.compression == "mlp" else 0
        rotary = 4 * count * config.head_dim
        return segments + hidden + weights + rotary

    def attention(self) -> int:
        """q, and what each branch saves beside it."""
        return self.queries + sum(self.branch(tag) for tag in self.config.branches)

    def branch(self, tag: str) -> int:
        """Keys, values, output, log-sum-exp and whatever says which key meets which query."""
        config, nsa, rows = self.config, self.config.nsa, self.batch * self.length
        length = num_compressed(self.length, nsa) if tag == "cmp" else self.length
        lse = 4 * rows * config.num_heads
        if self.impl == "sdpa":
            blocks = self.indices() if tag == "slc" else 0
            return self.keys(length) + self.outputs + lse + 8 * self.length + blocks
        if tag == "cmp":  # repeated to all query heads
            return self.outputs + lse + self.repeated_keys()
        if tag == "win":
            return self.outputs + lse + self.keys()
        # Queries, outputs and log-sum-exp with the heads folded into rows, keys by copy, and the output unfolded.
        lists = self.indices() + 4 * rows * config.num_kv_heads + self.transposed_lists()
        return self.outputs + self.folded(self.queries + self.outputs + lse) + self.copied_keys() + lists

    def repeated_keys(self) -> int:
        """Compressed keys and values, a copy for each query head, whole tiles of 128."""
        group = self.config.num_heads // self.config.num_kv_heads
        return group * self.keys((num_compressed(self.length, self.config.nsa) // 128 + 1) * 128)

    def folded(self, size: int) -> int:
        """The same with 16 rows for every 16 or fewer heads of a group."""
        group = self.config.num_heads // self.config.num_kv_heads
        return size * (-(-group // 16) * 16) // group

    def copies(self) -> int:
        """Copies of key blocks that balance backward, see :mod:`flexnsa.masks.selected`."""
        nsa = self.config.nsa
        return -(-(num_blocks(self.length, nsa) + self.length // nsa.select_block_size) // 8) * 8

    def copied_keys(self) -> int:
        """Keys and values gathered copy by copy."""
        return self.keys(self.copies() * self.config.nsa.select_block_size)

    def transposed_lists(self) -> int:
        """Of every copy: its queries, how many they are, and its first token."""
        nsa = self.config.nsa
        numbers = nsa.select_block_size * nsa.num_selected_blocks + 2
        return 4 * self.batch * self.config.num_kv_heads * self.copies() * numbers

    def forward_excess(self, saves: bool) -> int:
        """What the largest moment of forward holds above what is saved at its end.

        A layer that saves holds the most after its last operation. One that does not lets go of everything at its end:
        its largest moment is inside.
        """
        logits = self.batch * self.length * self.config.vocab_size * self.activation
        if saves:  # what autocast has cast is not what is saved: the normed input of the head waits for its end
            return logits + (self.residual if self.activation == 2 else 0)
        mlp = 3 * self.residual + 8 * self.residual * self.activation // 4
        attention = 2 * self.residual + self.attention() + 3 * self.queries
        return max(logits, max(mlp, attention) - self.norm())

    def head_excess(self) -> int:
        """Gradients of the logits and of the head's input; or of the last norm, which in parts makes three of one."""
        logits = self.batch * self.length * self.config.vocab_size * self.activation
        return max(logits + self.residual, (2 if self.fused_norm else 3) * self.residual)

    def backward_excess(self) -> list[int]:
        """What the moments of a layer's backward hold above all that the layer saved."""
        config, weights = self.config, {name: 4 * size for name, size in layer_weights(self.config).items()}
        above = self.residual  # gradient of the layer's output
        wide = 4 * self.residual * self.activation // 4
        matrix = weights["MLP"] // 2
        # The MLP and its norm are behind, so are its weights as autocast had cast them; their gradients stay.
        saved = self.saved_by()
        done = saved["MLP"] + self.residual * self.activation // 4 + self.cast("MLP")
        outside = above - done - self.norm() - self.cast("output") + weights["MLP"] + weights["output"]
        if self.activation == 4:
            moments = [above + wide + matrix]
        else:  # the gradient of a weight is as narrow as its cast, then stands beside the one in fp32
            moments = [above + self.residual // 2 + wide + matrix // 2, above + matrix]
            moments.append(above + self.residual - done + weights["MLP"] + matrix // 2)
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
            delta = acc * self.batch * self.length * config.num_heads
            if tag == "slc":  # the output's folded gradient takes the place of the folded output
                return self.folded(self.queries + delta) + self.copied_keys()
            return self.queries + delta + (self.repeated_keys() if tag == "cmp" else self.keys())
        gradients, share = self.queries + self.keys(length), self.heads_at_once(tag)
        if tag == "slc":  # rows and keys in fp32, each with a number beside, and the pairs of blocks and queries sorted
            workspace = acc * MAX_ROWS * group * (2 * nsa.select_block_size + 3 * config.head_dim)
            pairs = 12 * self.length * nsa.num_selected_blocks
            rows = fp32 * (2 * self.queries + self.outputs + 2 * self.keys())
            return gradients + int(share * rows) + pairs + workspace
        chunk = min(COMPRESSED_CHUNK if tag == "cmp" else WINDOW_CHUNK, self.length)
        reach = length if tag == "cmp" else min(self.length, nsa.window_size + chunk - 1)
        scores = acc * self.batch * config.num_heads * chunk * (2 * reach + 5 * config.head_dim)
        return gradients + int(share * (2 * fp32 * self.keys(length) + scores))

    def heads_at_once(self, tag: str) -> float:
        """The share of key heads that the sdpa implementation works on at once, on one thread."""
        group, heads = self.config.num_heads // self.config.num_kv_heads, self.batch * self.config.num_kv_heads
        if tag == "slc":
            return 1 / heads
        chunk = min(COMPRESSED_CHUNK if tag == "cmp" else WINDOW_CHUNK, self.length)
        return min(1, max(1, ROWS // (group * chunk)) / heads)
