"""What dense attention keeps of the tokens it has seen: all of their keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from flexnsa.decoding.documents import unpack
from flexnsa.decoding.row_cache import RowCache
from flexnsa.positions import Positions
from flexnsa.validation import check_positive_int


class DenseCache(RowCache):
    """Keys and values of all tokens of ``B`` rows, each of a length of its own; one spare slot takes padding."""

    def __init__(
        self,
        batch_size: int,
        max_seq_len: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        sizes = {"batch_size": batch_size, "max_seq_len": max_seq_len, "num_kv_heads": num_kv_heads}
        for name, value in (sizes | {"head_dim": head_dim, "v_head_dim": v_head_dim}).items():
            check_positive_int(name, value)
        self.head_dim, self.v_head_dim = head_dim, v_head_dim
        dims = {"k": head_dim, "v": v_head_dim}
        super().__init__(batch_size, max_seq_len, num_kv_heads, dims, dtype=dtype, device=device)

    @property
    def k(self) -> Tensor:
        """Keys ``(B, Hkv, max_seq_len + 1, Dk)``."""
        return self.buffers["k"]

    @property
    def v(self) -> Tensor:
        """Values ``(B, Hkv, max_seq_len + 1, Dv)``."""
        return self.buffers["v"]

    def append(self, k: Tensor, v: Tensor, lengths: Tensor | None) -> None:
        """Add the first ``lengths (B,)`` of ``T`` tokens.

        Raises:
            ValueError: there is no room for them. What is compiled or captured cannot raise, and keeps none of them.
        """
        self.make_room(k.shape[2], lengths)
        position = self.lengths[:, None] + torch.arange(k.shape[2], dtype=torch.int32, device=k.device)
        end = self.lengths + (k.shape[2] if lengths is None else lengths.to(torch.int32))
        self._put(k, v, self.rows[:, None], position, end.clamp_max(self.max_seq_len))

    def fill(self, k: Tensor, v: Tensor, lengths: Tensor | None, positions: Positions | None) -> None:
        """Take whole rows, the first tokens that the cache is to hold; or documents of one row, each into a row.

        Args:
            k: ``(B, Hkv, T, Dk)``; of documents, ``(1, Hkv, T, Dk)``.
            v: likewise.
            lengths: int ``(B,)``, as of :meth:`append`.
            positions: of the tokens ``(1, T)`` in their documents, or None.

        Raises:
            ValueError: there is no room for them, or another number of documents than of rows.
        """
        self.demand_empty()
        if positions is None:
            self.append(k, v, lengths)
            return
        documents = unpack(positions, self.rows)
        self.room.take_documents(documents.lengths, documents.count, k.shape[2])
        self._put(k, v, documents.row, documents.token, documents.lengths)

    def _put(self, k: Tensor, v: Tensor, rows: Tensor, position: Tensor, lengths: Tensor) -> None:
        """Put tokens, int ``(B, T)`` or ``(1, T)``, into their rows, and padding into the spare slots."""
        slot = torch.where(position < lengths[rows], position, self.max_seq_len)
        for buffer, new in ((self.k, k), (self.v, v)):
            buffer[rows, :, slot] = new.transpose(1, 2)
        self.lengths.copy_(lengths)
