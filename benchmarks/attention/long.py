"""Check attention at a length whose tensors no 32-bit offset spans: some queries of a whole sequence against fp64.

    python -m benchmarks attention.long --json long.json                                    # 524,288 tokens on an H200
    python -m benchmarks attention.long --device cpu --tiny --length 700 --json long.json   # rehearse

Forward and backward run over the whole sequence, with an upstream gradient of zero but for a few queries, the first
and the last among them. So the gradients of all keys follow from these queries alone, which the oracle computes in
fp64 from the same blocks. Errors are Euclidean, relative to the tensor's own length. The blocks are compared with
those that the oracle selects: where they differ, nearly equal scores were told apart by rounding.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import options
from benchmarks.harness.setting import Setting, published
from flexnsa import native_sparse_attention
from flexnsa.attention.dispatch import REFERENCE, attend, by_branch
from flexnsa.attention.interface import Call, Keys
from flexnsa.config import num_compressed
from flexnsa.masks.positions import Positions

KEYS = ("k_cmp", "v_cmp", "k", "v", "k_win", "v_win")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options.parser(__doc__, json=options.RESULTS / "long.json", impl="triton", tiny=False)
    parser.add_argument("--length", type=int, default=524_288, help="tokens; default: %(default)s")
    parser.add_argument("--queries", type=int, default=12, help="how many are checked; default: %(default)s")
    parser.add_argument("--recompute", nargs="*", default=[], help="branches to run again in backward")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    recording = options.open_recording(arguments, __doc__)
    setting = published(arguments.device, tiny=arguments.tiny, impl=arguments.impl)
    recording.note(setting=setting.to_dict(), recompute=arguments.recompute)
    tensors, point = run(setting, arguments.length, arguments.queries, arguments.recompute)
    recording.add(point)
    print(*(f"{name} {value}" for name, value in point.items()), flush=True)
    point = {"seq_len": arguments.length, "kind": "error"} | compare(setting, tensors)
    recording.add(point)
    print(*(f"{name} {value}" for name, value in point.items()), flush=True)


def run(
    setting: Setting, length: int, queries: int, recompute: Sequence[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Run forward and backward; keep all inputs, and what came of the queries and for the keys."""
    torch.manual_seed(0)
    x = {"q": setting.draw(setting.num_heads, length), "gates": setting.draw(setting.num_heads, length, 3)}
    x |= {
        name: setting.draw(
            setting.num_kv_heads, num_compressed(length, setting.config) if name.endswith("cmp") else length
        )
        for name in KEYS
    }
    rows = torch.linspace(0, length - 1, queries, device=setting.device).long()
    upstream = torch.zeros_like(x["q"])
    upstream[:, :, rows] = setting.random(1, setting.num_heads, queries, setting.head_dim)
    started = time.perf_counter()
    settings = {"config": setting.config, "impl": setting.impl, "recompute": recompute}
    out, aux = native_sparse_attention(**x, **settings, return_aux=True)
    blocks = aux.block_indices
    assert blocks is not None
    blocks = blocks[:, :, rows].clone()
    del aux
    gradients = dict(zip(x, torch.autograd.grad(out, list(x.values()), upstream), strict=True))
    point: dict[str, Any] = {"seq_len": length, "kind": "run"}
    if setting.device == "cuda":
        torch.cuda.synchronize()
        point["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    point["first_call_s"] = time.perf_counter() - started
    unchecked = torch.ones(length, dtype=torch.bool, device=setting.device).index_fill(0, rows, False)
    for name in ("q", "gates"):
        point[f"other rows of d{name} are 0"] = not bool((gradients[name].any(-1) & unchecked).any())
        gradients[name] = gradients[name][:, :, rows]
    tensors = {f"d{name}": gradient for name, gradient in gradients.items()}
    tensors |= {name: x[name].detach() for name in KEYS}
    tensors |= {name: x[name].detach()[:, :, rows] for name in ("q", "gates")}
    return tensors | {
        "rows": rows,
        "blocks": blocks,
        "out": out.detach()[:, :, rows],
        "upstream": upstream[:, :, rows],
    }, point


def compare(setting: Setting, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Compute the same for one kv head after the other by the oracle."""
    groups, rows = setting.num_heads // setting.num_kv_heads, tensors["rows"]
    token = rows.to(torch.int32)[None]
    positions = Positions(token, torch.zeros_like(token), torch.zeros_like(token))
    call = Call(setting.config, setting.head_dim**-0.5, positions=positions, window_positions=positions)
    squares: dict[str, list[float]] = {}
    same = 0
    for head in range(setting.num_kv_heads):
        heads = slice(head * groups, (head + 1) * groups)
        inputs = {name: tensors[name][:, heads].double().requires_grad_() for name in ("q", "gates")}
        inputs |= {name: tensors[name][:, head : head + 1].double().requires_grad_() for name in KEYS}
        blocks = tensors["blocks"][:, head : head + 1]
        keys = Keys(inputs["k_cmp"], inputs["v_cmp"], inputs["k"], inputs["v"], inputs["k_win"], inputs["v_win"])
        same += int((REFERENCE.select(inputs["q"], inputs["k_cmp"], call, None, None) == blocks).all(-1).sum())
        out, _ = attend(REFERENCE, inputs["q"], keys, by_branch(inputs["gates"]), call, block_indices=blocks)
        upstream = tensors["upstream"][:, heads].double()
        exact = dict(zip(inputs, torch.autograd.grad(out, list(inputs.values()), upstream), strict=True))
        results = {"out": (out.detach(), tensors["out"][:, heads])}
        for name, gradient in exact.items():
            part = heads if name in ("q", "gates") else slice(head, head + 1)
            results[f"d{name}"] = gradient, tensors[f"d{name}"][:, part]
        for name, (want, got) in results.items():
            sums = squares.setdefault(name, [0.0, 0.0])
            sums[0] += float((got.double() - want).square().sum())
            sums[1] += float(want.square().sum())
    errors = {name: (wrong / whole) ** 0.5 for name, (wrong, whole) in squares.items()}
    return errors | {"queries with the oracle's blocks": f"{same} of {len(rows) * setting.num_kv_heads}"}


if __name__ == "__main__":
    main()
