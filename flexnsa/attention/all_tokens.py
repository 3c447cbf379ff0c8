"""The dense stage of a layer: its selected branch attends to all past tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from flexnsa.attention.interface import BranchOutput, Call, Implementation, no_gated_sum
from flexnsa.attention.selection import count_choices


def with_all_tokens(implementation: Implementation, *, needs_lse: bool = False) -> Implementation:
    """Return an implementation whose selected branch attends to all past tokens, as if it selected all blocks.

    Whole sequences go to PyTorch's fused attention. It takes neither documents nor mods, nor fp32 on a GPU, and returns
    no lse, which sinks need: those go to the implementation's window, with a size of all tokens. No block is scored.
    """

    def select(q: Tensor, k: Tensor, call: Call, lse: Tensor | None, importance: Tensor | None) -> Tensor:  # noqa: ARG001
        return torch.empty(
            q.shape[0], count_choices(q, k, call.config), q.shape[2], 0, dtype=torch.int32, device=q.device
        )

    def selected(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call) -> BranchOutput:  # noqa: ARG001
        fuses = q.device.type == "cpu" or q.dtype in (torch.bfloat16, torch.float16)  # with groups of query heads
        if fuses and call.positions is None and call.score_mod is None and not needs_lse:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=call.scale, enable_gqa=True)
            return BranchOutput(out, None)
        config = replace(call.config, window_size=k.shape[2])
        return implementation.window(q, k, v, replace(call, config=config, window_positions=call.positions))

    return replace(implementation, select=select, selected=selected, gated_sum=no_gated_sum, step=None)
