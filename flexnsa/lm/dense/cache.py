"""The cache of dense attention: keys and values of all earlier tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from flexnsa.cache.step_cache import StepCache
from flexnsa.cache.steps import BufferSizes
from flexnsa.config import NSAConfig


class DenseCache(StepCache):
    """Keys and values of all tokens of ``B`` sequences, each of its own length; one spare slot takes padding."""

    def __init__(
        self,
        batch_size: int,
        max_seq_len: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        *,
        rope_base: float = 10_000.0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        full = BufferSizes(max_seq_len=max_seq_len, max_rewind=1, config=NSAConfig())
        heads = num_kv_heads, head_dim, v_head_dim
        super().__init__(full, batch_size, *heads, ("k", "v"), rope_base=rope_base, dtype=dtype, device=device)

    @property
    def k(self) -> Tensor:
        """Keys ``(B, Hkv, max_seq_len + 1, Dk)``."""
        return self.buffers["k"]

    @property
    def v(self) -> Tensor:
        """Values ``(B, Hkv, max_seq_len + 1, Dv)``."""
        return self.buffers["v"]

    def append(self, k: Tensor, v: Tensor, lengths: Tensor | None) -> None:
        """Add the first ``lengths (B,)`` of ``T`` tokens: ``k (B, Hkv, T, Dk)``, already rotated, and ``v``.

        Raises:
            ValueError: there is no capacity for them. A compiled or captured call cannot raise, and keeps none of them.
        """
        step = self.begin(k.shape[2], lengths)
        self.store("k", k, step)
        self.store("v", v, step)
        self.end(step)
