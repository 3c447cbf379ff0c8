"""A decoding step as one operator of tensors and numbers, which writes to the cache."""

from __future__ import annotations

from torch import Tensor

from flexnsa.attention.step import StepArguments, StepInputs
from flexnsa.attention.triton.arguments import require_device
from flexnsa.operators.opaque import opaque_operator


def step(inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
    """Run a step by Triton kernels on the current stream; see :data:`flexnsa.attention.step.StepFunction`."""
    out, blocks = _decoding_step(inputs.to_args())
    return out, blocks if inputs.chooses else inputs.block_indices


def step_in_pages(inputs: StepInputs, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Attend from tokens that pages hold already, by Triton kernels; nothing is written to the buffers.

    Args:
        inputs: with ``tables``.
        tokens: int32 ``(3, B, T)``, contiguous: the positions of the queries in their sequences, and zeros.

    Returns:
        The heads' outputs ``(B, T, Hq * Dv)``, and the selected blocks, int32 ``(B, Hkv, T, n)``.
    """
    from flexnsa.attention.triton.kernels.step import StepScratch, attend

    require_device(inputs.q)
    out, blocks = inputs.empty_results()
    if inputs.q.numel():
        attend(inputs, StepScratch.of(inputs, tokens), out, blocks)
    return out, blocks


@opaque_operator("decoding_step_triton", mutates=("lengths", "reached", "buffers"))
def _decoding_step(arguments: StepArguments) -> tuple[Tensor, Tensor]:
    from flexnsa.attention.triton.kernels.step import StepScratch, attend, compress, place

    inputs = StepInputs.from_args(arguments)
    require_device(inputs.q)
    out, blocks = inputs.empty_results()
    if inputs.q.numel():
        scratch = StepScratch.of(inputs)
        place(inputs, scratch)
        compress(inputs, scratch)
        attend(inputs, scratch, out, blocks)
    return out, blocks


@_decoding_step.register_fake
def _(arguments: StepArguments) -> tuple[Tensor, Tensor]:
    return StepInputs.from_args(arguments).empty_results()
