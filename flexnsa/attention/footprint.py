"""Memory of an implementation in closed form; each implementation has a ``footprint`` module next to its code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flexnsa.config import NSAConfig, num_compressed


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSizes:
    """Sizes of one call of attention on whole sequences, and the bytes of its tensors.

    ``activation`` is the number of bytes of an element of q.
    """

    config: NSAConfig
    batch: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    activation: int

    @property
    def group(self) -> int:
        """Number of query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def queries(self) -> int:
        """Bytes of q."""
        return self.per_head(self.num_heads, self.head_dim, self.seq_len)

    @property
    def outputs(self) -> int:
        """Bytes of the output of one branch."""
        return self.per_head(self.num_heads, self.v_head_dim, self.seq_len)

    @property
    def lse(self) -> int:
        """Bytes of the log-sum-exp of one branch, fp32."""
        return 4 * self.batch * self.seq_len * self.num_heads

    @property
    def indices(self) -> int:
        """Bytes of the block indices, int32."""
        return 4 * self.batch * self.num_kv_heads * self.seq_len * self.config.num_selected_blocks

    def length(self, tag: str) -> int:
        """Return the number of keys of a branch."""
        return num_compressed(self.seq_len, self.config) if tag == "cmp" else self.seq_len

    def keys(self, length: int) -> int:
        """Return the bytes of ``length`` keys and values of one branch."""
        return self.per_head(self.num_kv_heads, self.head_dim + self.v_head_dim, length)

    def inputs(self, tag: str) -> int:
        """Return the bytes that a branch reads besides q, and saves if it is recomputed in backward."""
        return self.keys(self.length(tag)) + (self.indices if tag == "slc" else 0)

    def per_head(self, heads: int, dim: int, length: int) -> int:
        """Return the bytes of a tensor ``(B, heads, length, dim)``."""
        return self.activation * self.batch * heads * length * dim


@dataclass(frozen=True, slots=True)
class Footprint:
    """Functions of a branch's tag and sizes that return bytes.

    Args:
        saved: bytes saved for backward besides q: keys, values, output, log-sum-exp, and masks or lists.
        backward: bytes allocated in backward, gradients included.
    """

    saved: Callable[[str, AttentionSizes], int]
    backward: Callable[[str, AttentionSizes], int]
