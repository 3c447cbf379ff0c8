"""The indexer of MSA (arXiv 2606.13392): an index key for each token, which all heads share, and queries of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexnsa.layers.indexer import Indexer, IndexHeads

EPS = 1e-6
"""That of MiniMax-M3's norms."""


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
    """Maps a layer's input to an index query for each key head and to one index key, both normed, without a gradient.

    Parameters have the names of the indexers of ``minimax_m3_vl`` in transformers. The maps begin as random ones.

    Args:
        dim: width of the layer's input.
        num_kv_heads: ``Hkv``.
        head_dim: ``D``.
    """

    phi = None

    def __init__(self, dim: int, num_kv_heads: int, head_dim: int, **_: object) -> None:
        nn.Module.__init__(self)
        self.num_kv_heads, self.num_index_heads = 1, num_kv_heads
        self.q_proj = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, head_dim, bias=False)
        self.q_norm, self.k_norm = IndexNorm(head_dim), IndexNorm(head_dim)

    def forward(self, x: Tensor, q: Tensor, k: Tensor) -> IndexHeads:  # noqa: ARG002  (which other indexers change)
        """Map ``x (B, T, dim)``; see :meth:`Indexer.forward`."""
        return IndexHeads(self.queries(x, q).detach(), self._heads(x, self.k_proj, self.k_norm))

    def queries(self, x: Tensor, q: Tensor) -> Tensor:  # noqa: ARG002
        """Map ``x (B, T, dim)`` to index queries ``(B, Hkv, T, D)``."""
        return self._heads(x, self.q_proj, self.q_norm)

    def _heads(self, x: Tensor, linear: nn.Linear, norm: IndexNorm) -> Tensor:
        heads = norm(torch.unflatten(linear(x.detach()), -1, (-1, norm.weight.shape[0])).transpose(1, 2))
        return heads if self.order is None else self.order(heads)


INDEXERS = {None: Indexer, "max": KeyIndexer}
"""By how blocks are scored, ``index_score`` of a config."""
