"""A row packed with documents beside a whole row of as many tokens: selection and attention, forward and backward.

    python -m benchmarks attention.packed_rows --json benchmarks/results/packed_h200.json    # about a minute on an H200
    python -m benchmarks attention.packed_rows --device cpu --tiny --lengths 300             # rehearse

Documents are drawn evenly from 1 to 4,095 tokens, 2,048 in the mean; the last one is cut. Keys are not compressed here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.harness import options
from benchmarks.harness.session import Session
from benchmarks.harness.setting import Setting, large, published
from benchmarks.harness.workloads import Maker, Workload, nsa_inputs
from flexnsa import native_sparse_attention


def row(longest: int, *, packed: bool) -> Maker:
    """A row of documents of up to so many tokens, or a whole one."""

    def make(setting: Setting, length: int) -> Workload:
        lengths = torch.randint(1, longest + 1, (length,), generator=torch.Generator().manual_seed(0))
        ids = torch.arange(length).repeat_interleave(lengths)[None, :length].to(setting.device) if packed else None

        def attend(q: Tensor, gates: Tensor, *kv: Tensor) -> Tensor:
            k, v, k_win, v_win, k_cmp, v_cmp = kv
            others = {"k_win": k_win, "v_win": v_win, "k_cmp": k_cmp, "v_cmp": v_cmp}
            called = {"config": setting.config, "impl": setting.impl, "document_ids": ids, "nonnegative_gates": True}
            return native_sparse_attention(q, k, v, gates, **others, **called)

        inputs = nsa_inputs(setting, length)
        return Workload("row", setting.compile(attend), inputs, inputs)

    return make


def main(argv: Sequence[str] | None = None) -> None:
    parser = options.parser(__doc__, seconds=120, lengths=[8192, 32768, 65536], rounds=9, tiny=False)
    arguments = parser.parse_args(argv)
    makers = {name: row(60 if arguments.tiny else 4095, packed=name == "packed") for name in ("whole", "packed")}
    recording = options.open_recording(arguments, __doc__)
    for setting in (published(arguments.device, tiny=arguments.tiny), large(arguments.device)):
        session = Session(setting, recording, arguments.seconds)
        for length in arguments.lengths:
            session.race(f"{setting.num_heads} / {setting.num_kv_heads}", makers, length, arguments.rounds)


if __name__ == "__main__":
    main()
