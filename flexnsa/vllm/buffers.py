"""Paged buffers: what a layer keeps of its tokens, in pages that vLLM hands out.

To vLLM each buffer is an attention layer, and so has pages, a block table and a builder of metadata. A state holds what
is kept of one token, or of the ``tokens_per_state`` tokens that end with its last one. It depends on no later token, so
requests with the same prefix share full pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention import backend
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, SlidingWindowSpec, iter_layer_specs
from vllm.v1.kv_cache_layout import KVCacheLayout

from flexnsa.attention.sdpa.paged import Pages
from flexnsa.vllm.batch import Batch


class PagedBuilder(backend.AttentionMetadataBuilder[Batch]):
    """Describes a batch by tensors that vLLM keeps, so that a captured step of decoding reads those of each replay."""

    _cudagraph_support = backend.AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(
        self,
        common_prefix_len: int,  # noqa: ARG002
        common_attn_metadata: backend.CommonAttentionMetadata,
        fast_build: bool = False,  # noqa: ARG002
    ) -> Batch:
        """Describe the requests, those that decode first."""
        common = common_attn_metadata
        num_decodes, *_ = split_decodes_and_prefills(common, decode_threshold=self.reorder_batch_threshold or 1)
        assert common.seq_lens_cpu_upper_bound is not None
        return Batch(
            block_table=common.block_table_tensor,
            slots=common.slot_mapping,
            starts=common.query_start_loc,
            lengths=common.seq_lens,
            host_starts=common.query_start_loc_cpu,
            host_lengths=common.seq_lens_cpu_upper_bound,
            num_decodes=num_decodes,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: backend.CommonAttentionMetadata) -> Batch:
        """Describe a batch that is captured: its replays may have requests of any length."""
        batch = self.build(0, common_attn_metadata)
        batch.host_lengths = torch.full_like(batch.host_lengths, self.vllm_config.model_config.max_model_len)
        return batch


class PagedBackend(backend.AttentionBackend):
    """What vLLM asks of a buffer."""

    supported_dtypes = [torch.float32, torch.bfloat16, torch.float16]  # noqa: RUF012  (as in the base class)
    supported_kv_cache_dtypes = ["auto"]  # noqa: RUF012

    @staticmethod
    def get_name() -> str:
        """Return the name that logs show."""
        return "FLEXNSA"

    @staticmethod
    def get_impl_cls() -> type:
        """Refuse: a buffer attends to nothing."""
        raise NotImplementedError("the layer that owns buffers reads and writes them")

    @staticmethod
    def get_builder_cls() -> type[PagedBuilder]:
        """Return the builder of metadata."""
        return PagedBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Ask for pages of all layers side by side in a block: they may then differ in size."""
        return (KVCacheLayout.BLHNC,)


class PagedBuffer(AttentionLayerBase):
    """One kind of keys and values of a layer, ``(pages, Hkv, states, width)``.

    Args:
        prefix: a unique name.
        num_kv_heads: on this rank.
        widths: of what a state holds for a head, one after the other: keys, values.
        vllm_config: of the model.
        window: tokens that stay, the newest included; None for all.
        tokens_per_state: see the module.

    Raises:
        ValueError: pages do not hold whole states.
    """

    def __init__(
        self,
        prefix: str,
        num_kv_heads: int,
        widths: tuple[int, ...],
        vllm_config: VllmConfig,
        *,
        window: int | None = None,
        tokens_per_state: int = 1,
    ) -> None:
        self.prefix, self.widths, self.tokens_per_state = prefix, widths, tokens_per_state
        self.page_size = vllm_config.cache_config.block_size
        if self.page_size % tokens_per_state:
            raise ValueError(f"block_size: expected a multiple of the stride {tokens_per_state}, got {self.page_size}")
        if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
            window = None  # that manager knows one window for all buffers; without any, all keep all tokens
        sizes: dict[str, Any] = {"block_size": self.page_size, "tokens_per_state": tokens_per_state}
        sizes |= {"num_kv_heads": num_kv_heads, "head_size": sum(widths), "head_size_v": 0}
        sizes["dtype"] = vllm_config.model_config.dtype
        self.spec = FullAttentionSpec(**sizes) if window is None else SlidingWindowSpec(sliding_window=window, **sizes)
        self.kv_cache = torch.empty(0)
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> AttentionSpec:  # noqa: ARG002
        """Describe the pages."""
        return self.spec

    def get_attn_backend(self) -> type[backend.AttentionBackend]:
        """Return what else vLLM asks of a buffer."""
        return PagedBackend

    @property
    def batch(self) -> Batch | None:
        """The batch of this pass; None while vLLM measures memory."""
        every = get_forward_context().attn_metadata
        return None if every is None else cast("dict[str, Batch]", every)[self.prefix]

    def store(self, batch: Batch, states: Tensor) -> None:
        """Store ``(T, Hkv, width)`` of the batch's tokens; padding is stored where no request reads."""
        page, place = batch.places(self.page_size)
        self.kv_cache[page, :, place] = states[: len(page)]

    def put(self, batch: Batch, request: Tensor, last: Tensor, states: Tensor) -> None:
        """Store ``states (K, Hkv, width)`` that end with the tokens ``last (K,)``; what ends with -1 is dropped."""
        page = batch.block_table[request, last.clamp_min(0) // self.page_size]
        page = page.where(last >= 0, 0)  # no request reads the first page
        self.kv_cache[page, :, last % self.page_size // self.tokens_per_state] = states

    def pages(self, batch: Batch) -> Pages:
        """Describe the pages of the batch's requests."""
        return Pages(self.kv_cache, batch.block_table, self.widths, self.tokens_per_state)

    def take(self, batch: Batch, request: Tensor, last: Tensor) -> tuple[Tensor, ...]:
        """Load the parts ``(..., Hkv, width)`` of states that end with the tokens ``last (...,)`` of requests."""
        pages = self.pages(batch)
        parts = pages.load(pages.tokens, pages.find(pages.tokens, request, last))
        return tuple(part.squeeze(-2) for part in parts)


def keep_empty_groups(project: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return vLLM's ``project`` of groups to a stage so that one without layers there has no buffers there."""

    def projected(*args: Any) -> list[Any]:
        groups = project(*args)
        for group in (each for each in groups if not each.layer_names):
            group.kv_cache_spec = next(iter(iter_layer_specs(group.kv_cache_spec)))
        return groups

    return projected
