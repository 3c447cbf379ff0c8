"""MSA or QSA at released sizes: correctness, then time and memory of a step, of its parts, and of dense attention.

    python -m benchmarks attention.selectors --json benchmarks/results/msa_h200.json        # about 2 minutes on an H200
    python -m benchmarks attention.selectors --selector qsa --json benchmarks/results/qsa_h200.json
    python -m benchmarks attention.selectors --device cpu --tiny --lengths 300 --json msa.json    # rehearse

MSA has the sizes of MiniMax-M3 (64 query and 4 key heads of 128), QSA those of Qwen's ``qwen4_exp`` (16 and 2 of 256).
A step is selection and attention, forward and backward; the loss compares 256 queries of each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks.harness import options
from benchmarks.harness.check import relative_error
from benchmarks.harness.session import Session
from benchmarks.harness.setting import Setting, published
from benchmarks.harness.workloads import Maker, Workload, dense_inputs, sdpa
from flexnsa import NSAConfig, select_blocks, selected_attention, selection_loss
from flexnsa.config import num_compressed

SIZES: dict[str, dict[str, Any]] = {
    "msa": {"config": NSAConfig.msa()},
    "qsa": {"config": NSAConfig.qsa(), "num_heads": 16, "num_kv_heads": 2, "head_dim": 256},
}
TINY = {
    "msa": {"config": NSAConfig.msa(select_block_size=16, num_selected_blocks=4)},
    "qsa": {"config": NSAConfig.qsa(num_selected_blocks=20)},
}


def inputs(setting: Setting, length: int) -> tuple[Tensor, ...]:
    """Random q, k and v, index queries of each key head, and one head of index keys."""
    scoring = setting.config.scoring
    index = replace(setting, head_dim=min(128, setting.head_dim))
    queries = index.draw(setting.num_kv_heads * (scoring.index_heads or 1), length)
    return *dense_inputs(setting, length), queries, index.draw(1, num_compressed(length, scoring))


def step(setting: Setting, length: int, *, loss: bool = False, **given: Any) -> Workload:
    """Selection, unless blocks are given, attention, and the loss of the indexer."""
    of = {"config": setting.config, "impl": setting.impl}

    def attend(q: Tensor, k: Tensor, v: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        blocks = given.get("blocks")
        if blocks is None:
            blocks = select_blocks(q, None, q_index=q_index, k_index=k_index, **of)
        out = selected_attention(q, k, v, blocks.expand(-1, k.shape[1], -1, -1), **of)[0]
        return out + selection_loss(q, k, k_index, q_index=q_index, **of).to(out.dtype) if loss else out

    tensors = given.get("tensors") or inputs(setting, length)
    return Workload("selector", setting.compile(attend), tensors, tensors if loss else tensors[:3])


def select(setting: Setting, length: int) -> Workload:
    """Scores and top-n."""
    q, _, _, *index = inputs(setting, length)
    of = {"config": setting.config, "impl": setting.impl}
    call = setting.compile(lambda q, q_index, k_index: select_blocks(q, None, q_index=q_index, k_index=k_index, **of))
    return Workload("selection", call, (q, *index), ())


def makers(selector: str) -> dict[str, Maker]:
    """What is timed, by name."""
    return {
        selector.upper(): step,
        f"{selector.upper()} with loss": lambda setting, length: step(setting, length, loss=True),
        "selection": select,
        "cuDNN SDPA": sdpa("cuDNN SDPA", SDPBackend.CUDNN_ATTENTION),
    }


def check(setting: Setting, length: int) -> dict[str, float]:
    """Errors of a step in its precision, relative to fp64 on the same blocks, and the share of equal choices."""
    torch.manual_seed(0)
    exact, tensors = replace(setting, impl="reference", backend=None, dtype=torch.float64), inputs(setting, length)
    wide = tuple(x.detach().double().requires_grad_() for x in tensors)
    blocks = select(setting, length).function(*(x.detach() for x in (tensors[0], *tensors[3:])))
    same = select_blocks(wide[0], None, q_index=wide[3], k_index=wide[4], config=setting.config, impl="reference")
    found = {"rows_selected_as_in_fp64": (blocks == same).all(-1).float().mean().item()}
    results = []
    for each, given in ((setting, tensors), (exact, wide)):
        work = step(each, length, loss=True, blocks=same, tensors=given)
        out = work.forward()
        results.append((out, *work.backward(out, torch.linspace(-1, 2, out.numel()).view_as(out).to(out))))
    for name, got, want in zip(("out", "dq", "dk", "dv", "dq_index", "dk_index"), *results, strict=True):
        found[name] = relative_error(got, want.detach())
    print(found, flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = options.parser(__doc__, seconds=280, lengths=[32768, 8192, 131072], rounds=5, tiny=False)
    parser.add_argument("--selector", default="msa", choices=SIZES, help="default: %(default)s")
    arguments = parser.parse_args(argv)
    sizes = (TINY if arguments.tiny else SIZES)[arguments.selector]
    setting = replace(published(arguments.device, tiny=arguments.tiny), **sizes)
    recording = options.open_recording(arguments, __doc__)
    recording.note(setting=setting.to_dict(), errors=check(setting, 300 if arguments.tiny else 3001))
    session = Session(setting, recording, arguments.seconds)
    for length in arguments.lengths:
        session.race(arguments.selector, makers(arguments.selector), length, arguments.rounds)
    recording.save()


if __name__ == "__main__":
    main()
