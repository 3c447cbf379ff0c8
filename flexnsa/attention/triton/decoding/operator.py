"""A decoding step as one operator of tensors and numbers, which writes to the cache that it is given."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flexnsa.attention.decoding import Phi, StepInputs
from flexnsa.config import NSAConfig
from flexnsa.custom_ops import opaque_operator
from flexnsa.geometry import BRANCHES


def step(inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
    """Run a step by Triton kernels on the current stream; see :data:`flexnsa.attention.decoding.StepFunction`."""
    phis = [phi for phi in (inputs.phi_k, inputs.phi_v) if phi is not None]
    parameters = [parameter for phi in phis for parameter in phi.parameters]
    branches = [tag for tag in BRANCHES if tag in inputs.k]
    out, blocks = _decoding_step(
        inputs.lengths,
        inputs.reached,
        list(inputs.buffers.values()),
        inputs.new_lengths,
        [inputs.q, inputs.gates, *(x[tag] for tag in branches for x in (inputs.k, inputs.v))],
        parameters if inputs.frequencies is None else [*parameters, inputs.frequencies],
        ",".join([*branches, *inputs.buffers, *(phi.kind for phi in phis), inputs.gate]),
        [len(branches), inputs.num_heads, inputs.max_seq_len, *inputs.config.to_ints()],
        [inputs.scale, inputs.rope_base, inputs.rope_scale],
    )
    return out, blocks if "slc" in branches else None


@opaque_operator("decoding_step_triton", mutates=("lengths", "reached", "buffers"))
def _decoding_step(
    lengths: Tensor,
    reached: Tensor,
    buffers: Sequence[Tensor],
    new_lengths: Tensor | None,
    rows: Sequence[Tensor],
    parameters: Sequence[Tensor],
    words: str,
    integers: Sequence[int],
    numbers: Sequence[float],
) -> tuple[Tensor, Tensor]:
    from flexnsa.attention.triton.decoding.launch import launch_step

    return launch_step(_inputs(lengths, reached, buffers, new_lengths, rows, parameters, words, integers, numbers))


@_decoding_step.register_fake
def _(
    lengths: Tensor,
    reached: Tensor,
    buffers: Sequence[Tensor],
    new_lengths: Tensor | None,
    rows: Sequence[Tensor],
    parameters: Sequence[Tensor],
    words: str,
    integers: Sequence[int],
    numbers: Sequence[float],
) -> tuple[Tensor, Tensor]:
    return _inputs(lengths, reached, buffers, new_lengths, rows, parameters, words, integers, numbers).empty_results()


def _inputs(
    lengths: Tensor,
    reached: Tensor,
    buffers: Sequence[Tensor],
    new_lengths: Tensor | None,
    rows: Sequence[Tensor],
    parameters: Sequence[Tensor],
    words: str,
    integers: Sequence[int],
    numbers: Sequence[float],
) -> StepInputs:
    """Undo what :func:`step` did to get through the dispatcher."""
    num_branches, num_heads, max_seq_len, *sizes = integers
    *names, gate = words.split(",")
    branches, names, kinds = (
        names[:num_branches],
        names[num_branches:][: len(buffers)],
        names[num_branches + len(buffers) :],
    )
    q, gates, *projected = rows
    left = list(parameters)
    phis: list[Phi | None] = []
    for kind in kinds:
        count = {"mean": 0, "linear": 2, "mlp": 3}[kind]
        phis.append(Phi(kind, *left[:count]))
        left = left[count:]
    phis += [None] * (2 - len(phis))
    return StepInputs(
        q=q,
        k=dict(zip(branches, projected[::2], strict=True)),
        v=dict(zip(branches, projected[1::2], strict=True)),
        gates=gates,
        gate=gate,
        phi_k=phis[0],
        phi_v=phis[1],
        buffers=dict(zip(names, buffers, strict=True)),
        lengths=lengths,
        reached=reached,
        new_lengths=new_lengths,
        max_seq_len=max_seq_len,
        num_heads=num_heads,
        config=NSAConfig.from_ints(sizes),
        scale=numbers[0],
        rope_base=numbers[1],
        frequencies=left[0] if left else None,
        rope_scale=numbers[2],
    )
