"""Attention of one layer over paged buffers: one operator, of tensors only, stores new tokens and attends from them.

Requests that decode go through block tables together. The prompts of all others are packed as documents: one call of
the library's attention for whole sequences takes them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context

from flexnsa.attention.dispatch import attend, choose_implementation
from flexnsa.attention.interface import Call, Keys, Scorer, given
from flexnsa.config import BRANCHES
from flexnsa.layers.config import LayerConfig
from flexnsa.layers.core import Compressors
from flexnsa.operators.opaque import opaque_operator
from flexnsa.vllm.batch import Batch
from flexnsa.vllm.buffers import PagedBuffer
from flexnsa.vllm.decoding import PagedLayer, attend_decodes

Rotation = Callable[[Tensor, Tensor], Tensor]
"""``(x (K, H, D), positions (K,))``: rotate heads by their positions."""


class PagedAttention(nn.Module):
    """Keeps keys and values of a layer in paged buffers, and attends to them.

    Blocks are scored by index keys, by those of the compressed branch, or, without either, by means of the selected
    branch's keys: ``cmp`` of ``k`` then are these.

    Args:
        prefix: a unique name.
        config: of the layer; ``impl`` is that of prompts.
        num_kv_heads: on this rank.
        compressors: of the layer.
        rotate: what rotates compressed keys.
        vllm_config: of the model.
        leader: the name of the one whose blocks this one reads.

    Raises:
        ValueError: pages do not hold whole compressed tokens.
    """

    def __init__(
        self,
        prefix: str,
        config: LayerConfig,
        num_kv_heads: int,
        compressors: Compressors,
        rotate: Rotation,
        vllm_config: VllmConfig,
        leader: str | None = None,
    ) -> None:
        super().__init__()
        sizes, dims = config.nsa, (config.head_dim, config.v_head_dim or config.head_dim)
        self.name, self.v_dim, self.impl = f"{prefix}.paged", dims[1], config.impl
        self.compressors, self.rotate = compressors, rotate
        self.blocks: list[Tensor | None] = [None, None]
        """In a pass: those of requests that decode, ``(R, Hkv, T, n)``, and of all others, ``(1, Hkv, T, n)``."""
        self.followers: list[PagedAttention] = []
        if leader is not None:
            vllm_config.compilation_config.static_forward_context[leader].followers.append(self)
        indexed, dk = compressors.phi_index is not None, dims[0]
        ordered = tuple(tag for tag in BRANCHES if tag in config.branches)
        by_means = "slc" in ordered and not indexed and leader is None
        kinds = {"cmp": sizes} if "cmp" in ordered or by_means else {}
        kinds |= {"index": sizes.scoring} if indexed else {}
        widths = {"cmp": dims if "cmp" in ordered else (dk,), "index": (dk,), "slc": dims, "win": dims}
        longest = max((of_kind.compress_block_size for of_kind in kinds.values()), default=0)
        widths["tail"] = sum((widths[kind] for kind in kinds), ())
        # vLLM loses layers where buffers of one window differ in width, as a tail without index keys does.
        windows = {"tail": longest + (leader is not None), "win": sizes.window_size}
        buffers = {
            name: PagedBuffer(
                f"{prefix}.{name}",
                num_kv_heads,
                widths[name],
                vllm_config,
                window=windows.get(name),
                tokens_per_state=kinds[name].compress_stride if name in kinds else 1,
            )
            for name in (*kinds, *(tag for tag in ("slc", "win") if tag in ordered), *(["tail"] if kinds else []))
        }
        shape = repr((sizes, ordered, [(name, widths[name]) for name in buffers], config.num_heads))
        self.layer = PagedLayer(sizes, ordered, kinds, buffers, num_kv_heads, dims[0] ** -0.5, shape)
        vllm_config.compilation_config.static_forward_context[self.name] = self

    def forward(
        self,
        q: Tensor,
        k: Mapping[str, Tensor],
        v: Mapping[str, Tensor],
        gates: Tensor,
        q_index: Tensor | None = None,
        k_index: Tensor | None = None,
    ) -> Tensor:
        """Store what new tokens are projected to, and return the heads' outputs ``(T, Hq, Dv)``.

        Args:
            q: ``(T, Hq, Dk)``, rotated.
            k: by branch, ``(T, Hkv, Dk)``; that of ``cmp`` is not rotated.
            v: by branch, ``(T, Hkv, Dv)``.
            gates: the weights of the branches, ``(T, Hq, branches)``.
            q_index: index queries ``(T, Hkv * H, Dk)``, rotated, if the layer has an indexer.
            k_index: raw index keys ``(T, Hkv, Dk)``, not rotated.
        """
        layer, out = self.layer, q.new_empty(*q.shape[:2], self.v_dim)
        stored = [torch.cat((k[tag], v[tag]), -1) for tag in ("slc", "win") if tag in layer.branches]
        if layer.kinds:
            raw = k["cmp"] if "cmp" in layer.kinds else None, v["cmp"] if "cmp" in layer.branches else None, k_index
            stored.append(torch.cat([x for x in raw if x is not None], -1))
        if torch.compiler.is_compiling():
            _paged_attention(q, q_index, stored, gates, out, self.name)
        else:
            self.run(q, q_index, stored, gates, out)
        return out

    def run(self, q: Tensor, q_index: Tensor | None, stored: Sequence[Tensor], gates: Tensor, out: Tensor) -> None:
        """Do the work of the operator."""
        layer = self.layer
        batch = next(iter(layer.buffers.values())).batch
        if batch is None:
            out.zero_()
            return
        of_tokens = [buffer for name, buffer in layer.buffers.items() if name not in layer.kinds]
        for buffer, states in zip(of_tokens, stored, strict=True):
            buffer.store(given(buffer.batch), states)
        for kind in layer.kinds:
            self._compress(kind)
        count = batch.num_decode_tokens
        if batch.num_decodes:
            out[:count], self.blocks[0] = attend_decodes(layer, batch, q, q_index, gates, self.blocks[0])
        if batch.num_tokens > count:
            new = slice(count, batch.num_tokens)
            out[new] = self._attend_packed(batch, q[new], None if q_index is None else q_index[new], gates[new])
        for follower in self.followers:
            follower.blocks = list(self.blocks)
        self.blocks = [None, None]  # a long prompt's take megabytes a layer

    def _compress(self, kind: str) -> None:
        """Compress the blocks that the new tokens complete."""
        buffers, sizes = self.layer.buffers, self.layer.kinds[kind]
        buffer, tail = buffers[kind], buffers["tail"]
        batch = given(buffer.batch)
        request, last = batch.completed(sizes)
        if not len(last):
            return
        first = last.clamp_min(0)[:, None] - (sizes.compress_block_size - 1)
        token = (first + torch.arange(sizes.compress_block_size, device=last.device)).clamp_min(0)
        raw = tail.take(given(tail.batch), request[:, None], token)
        blocks = [part.flatten(0, 1).transpose(0, 1)[None] for part in raw]  # (1, Hkv, K * l, D)
        starts = torch.arange(len(last), device=last.device)[None] * sizes.compress_block_size
        if kind == "index":
            made = [given(self.compressors.phi_index)(blocks[-1], starts)]
        else:
            made = [given(self.compressors.k)(blocks[0], starts)]
            made += [given(self.compressors.v)(blocks[1], starts)] if "cmp" in self.layer.branches else []
        k, *v = (x[0].transpose(0, 1) for x in made)
        buffer.put(batch, request, last, torch.cat((self.rotate(k, first[:, 0].clamp_min(0)), *v), -1))

    def _attend_packed(self, batch: Batch, q: Tensor, q_index: Tensor | None, gates: Tensor) -> Tensor:
        """Attend from the tokens of requests that do not decode, packed as documents, ``(T, Hq, Dv)``."""
        layer = self.layer
        keys: dict[str, Tensor] = {}
        for tag in layer.branches:
            keys |= zip((f"k_{tag}", f"v_{tag}"), self._take_packed(tag), strict=True)
        if "cmp" in layer.kinds and "cmp" not in layer.branches:
            (keys["k_cmp"],) = self._take_packed("cmp")
        where = batch.positions(layer.sizes)
        window = batch.positions(layer.sizes, layer.sizes.window_size) if "win" in layer.branches else None
        scorer = None
        if q_index is not None:
            of_index, (k_index,) = layer.kinds["index"], self._take_packed("index")
            there = batch.positions(of_index)
            scorer = Scorer(_by_head(q_index), k_index, Call(of_index, layer.scale, None, there, there))
        implementation = choose_implementation(self.impl, _by_head(q), modded=False, v_dim=self.v_dim)
        out, aux = attend(
            implementation,
            _by_head(q),
            Keys(**keys),
            {tag: gate.T[None] for tag, gate in zip(layer.branches, gates.unbind(-1), strict=True)},
            Call(layer.sizes, layer.scale, None, where, window),
            block_indices=self.blocks[1],
            indexer=scorer,
            branches=layer.branches,
            nonnegative=True,
            by_token=True,
        )
        self.blocks[1] = aux.block_indices
        return out[0].transpose(0, 1)

    def _take_packed(self, kind: str) -> list[Tensor]:
        """Load the states of requests that do not decode, each part ``(1, Hkv, S, width)``."""
        layer = self.layer
        buffer = layer.buffers[kind]
        batch = given(buffer.batch)
        if kind in layer.kinds:
            sizes = layer.kinds[kind]
            request, number = batch.pack_compressed(sizes).entries
            last = number * sizes.compress_stride + sizes.compress_block_size - 1
        else:
            request, last = batch.pack_tokens(layer.sizes.window_size if kind == "win" else None).entries
        return [_by_head(part) for part in buffer.take(batch, request, last)]


@opaque_operator("paged_attention", mutates=["out"])
def _paged_attention(
    q: Tensor, q_index: Tensor | None, stored: Sequence[Tensor], gates: Tensor, out: Tensor, layer: str
) -> None:
    """Store what is kept of new tokens, and attend from them.

    Args are as of :meth:`PagedAttention.forward`, but for these:
        stored: ``(T, Hkv, width)`` for each buffer of tokens, in the order of :class:`PagedAttention`.
        layer: the name of a :class:`PagedAttention`.
    """
    cast("PagedAttention", get_forward_context().no_compile_layers[layer]).run(q, q_index, stored, gates, out)


@_paged_attention.register_fake
def _(*_: object) -> None:
    return None


def _by_head(x: Tensor) -> Tensor:
    """Turn heads ``(T, H, D)`` into ``(1, H, T, D)``."""
    return x.transpose(0, 1)[None]
