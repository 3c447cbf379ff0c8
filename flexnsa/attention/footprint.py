"""The sizes from which the memory of an implementation follows, in closed form; each states its own beside its code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flexnsa.config import NSAConfig
from flexnsa.geometry import num_compressed


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSizes:
    """One call of attention on whole sequences; methods give bytes. ``activation`` is the size of a number of q."""

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
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def queries(self) -> int:
        """All query heads."""
        return self.per_head(self.num_heads, self.head_dim, self.seq_len)

    @property
    def outputs(self) -> int:
        """Output of one branch."""
        return self.per_head(self.num_heads, self.v_head_dim, self.seq_len)

    @property
    def lse(self) -> int:
        """Log-sum-exp of one branch, fp32."""
        return 4 * self.batch * self.seq_len * self.num_heads

    @property
    def indices(self) -> int:
        """Selected blocks, int32."""
        return 4 * self.batch * self.num_kv_heads * self.seq_len * self.config.num_selected_blocks

    def length(self, tag: str) -> int:
        """Count the keys of a branch."""
        return num_compressed(self.seq_len, self.config) if tag == "cmp" else self.seq_len

    def keys(self, length: int) -> int:
        """Keys and values of one branch."""
        return self.per_head(self.num_kv_heads, self.head_dim + self.v_head_dim, length)

    def inputs(self, tag: str) -> int:
        """What a branch reads beside q: all that it saves if it is run again in backward."""
        return self.keys(self.length(tag)) + (self.indices if tag == "slc" else 0)

    def per_head(self, heads: int, dim: int, length: int) -> int:
        """``(B, heads, length, dim)``."""
        return self.activation * self.batch * heads * length * dim


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a branch, by its tag.

    Args:
        saved: for backward, beside q: keys, values, output, log-sum-exp and what says which key meets which query.
        backward: allocated in backward, gradients included.
    """

    saved: Callable[[str, AttentionSizes], int]
    backward: Callable[[str, AttentionSizes], int]
