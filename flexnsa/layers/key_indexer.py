"""The indexers of MSA (arXiv 2606.13392) and QSA: index queries, and index keys which all heads share."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexnsa.attention.interface import given
from flexnsa.config import NSAConfig
from flexnsa.layers.compression import average_blocks
from flexnsa.layers.indexer import Indexer, IndexHeads
from flexnsa.layers.projection import split_heads

EPS = 1e-6
"""That of the norms of MiniMax-M3 and of Qwen."""


class IndexNorm(nn.Module):
    """RMS norm of heads ``(..., D)``, in fp32 or wider, by 1 plus a weight that begins at 0."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def reset_parameters(self) -> None:
        """Begin anew at 0."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Norm each head."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, self.weight.shape, 1 + self.weight.to(wide.dtype), EPS).to(x.dtype)


class KeyIndexer(Indexer):
    """Maps a layer's input to index queries and to one index key, both normed, without a gradient.

    A key of QSA is the mean of those of a block of tokens, and only then is it normed. Parameters have the names of the
    indexers of ``minimax_m3_vl`` in transformers; the ``index_qk_proj`` of ``qwen4_exp`` is ``q_proj`` above
    ``k_proj``. The maps begin as random ones. The arguments are those of :class:`Indexer`.
    """

    def __init__(self, dim: int, num_kv_heads: int, head_dim: int, *, config: NSAConfig, **_: object) -> None:
        nn.Module.__init__(self)
        head_dim = config.index_head_dim or head_dim
        self.num_kv_heads, self.num_index_heads = 1, num_kv_heads * given(config.index_heads)
        self.q_proj = nn.Linear(dim, self.num_index_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, head_dim, bias=False)
        self.q_norm, self.k_norm = IndexNorm(head_dim), IndexNorm(head_dim)
        self.sizes = config.scoring

    @property
    def phi(self) -> Callable[[Tensor, Tensor | None], Tensor] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Make keys of blocks, where they are not of single tokens."""
        if self.sizes.index_score == "max":
            return None
        return lambda raw, first_tokens: self._normed(average_blocks(raw, first_tokens, self.sizes), self.k_norm)

    def forward(self, x: Tensor, q: Tensor, k: Tensor) -> IndexHeads:  # noqa: ARG002  (which other indexers change)
        """Map ``x (B, T, dim)``; see :meth:`Indexer.forward`."""
        raw = split_heads(self.k_proj(x.detach()), 1)
        return IndexHeads(self.queries(x, q).detach(), self._normed(raw, self.k_norm) if self.phi is None else raw)

    def queries(self, x: Tensor, q: Tensor) -> Tensor:  # noqa: ARG002
        """Map ``x (B, T, dim)`` to index queries ``(B, Hkv * index_heads, T, D)``."""
        return self._normed(split_heads(self.q_proj(x.detach()), self.num_index_heads), self.q_norm)

    def _normed(self, heads: Tensor, norm: IndexNorm) -> Tensor:
        return norm(heads) if self.order is None else self.order(norm(heads))


INDEXERS = {None: Indexer, "max": KeyIndexer, "relu": KeyIndexer}
"""By how blocks are scored, ``index_score`` of a config."""
