"""The selected branch alone on a CPU, forward: ``flex`` and ``sdpa`` with dense causal FlexAttention, in one run.

    OMP_WAIT_POLICY=passive python -m benchmarks kernels.selected_cpu

The attention of the ``large`` preset (12 query and 2 key heads of 64, fp32). All three take turns, after a call that
compiles; a ratio is one of medians, above 1 where the selected branch of ``flex`` is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.harness import options
from benchmarks.harness.clock import Clock
from benchmarks.harness.phases import random_blocks
from benchmarks.harness.setting import CPU
from flexnsa import selected_attention
from flexnsa.lm.measure.table import format_table


def workloads(seq_len: int) -> dict[str, Callable[[], Tensor]]:
    """Build the three forward passes of one length, on the same random inputs."""
    q = torch.randn(1, CPU.num_heads, seq_len, CPU.head_dim)
    k, v = torch.randn(2, 1, CPU.num_kv_heads, seq_len, CPU.head_dim)
    blocks = random_blocks(CPU, seq_len)
    causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, seq_len, seq_len, device="cpu")  # noqa: ARG005
    dense = torch.compile(lambda: flex_attention(q, k, v, block_mask=causal, enable_gqa=True), dynamic=False)

    def branch(impl: str) -> Tensor:
        return selected_attention(q, k, v, blocks, config=CPU.config, impl=impl)[0]

    return {"flex": lambda: branch("flex"), "sdpa": lambda: branch("sdpa"), "dense Flex": lambda: dense()}


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> None:
    """Measure each length, print milliseconds and ratios, record."""
    parser = options.parser(__doc__, device=False, lengths=[2048, 8192, 16384], rounds=5)
    arguments = parser.parse_args(argv)
    recording = options.open_recording(arguments, __doc__)
    recording.note(setting=CPU.to_dict())
    rows = []
    for seq_len in arguments.lengths:
        median = Clock().medians(workloads(seq_len), arguments.rounds, warm_up=1)  # the first call compiles
        recording.add({"seq_len": seq_len, "ms": median})
        ratios = [f"{median[name] / median['flex']:.2f}" for name in ("sdpa", "dense Flex")]
        rows.append([f"{seq_len:,}", *(f"{value:,.0f}" for value in median.values()), *ratios])
    print(format_table(["S", "flex, ms", "sdpa", "dense Flex", "sdpa / flex", "dense Flex / flex"], rows))


if __name__ == "__main__":
    main()
