"""The selected branch by group size on a GPU: first whether it is right, then its time, memory and kernels.

    python -m benchmarks kernels.selected_gpu --json selected.json
    python -m benchmarks kernels.selected_gpu --device cpu --tiny --lengths 256    # rehearse

Errors are relative to the formula in float64, beside those of plain PyTorch in the same precision; a second run has to
repeat every bit. Times are medians over CUDA events, in ms, with the second-level cache flushed before each; memory is
the allocator's, above what there was before the pass, in MiB. ``attention.long`` checks great lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from benchmarks.harness import options
from benchmarks.harness.check import relative_error
from benchmarks.harness.launches import time_kernels
from benchmarks.harness.memory import AllocatorProbe
from benchmarks.harness.phases import lists_phase, selected_phase
from benchmarks.harness.session import Point, Session
from benchmarks.harness.setting import Setting, published
from flexnsa import NSAConfig, selected_attention
from flexnsa.attention.selection import top_blocks
from flexnsa.attention.triton import selected
from flexnsa.lm.measure.memory import MIB
from flexnsa.masks.document import document_positions
from flexnsa.masks.positions import Positions

GROUPS = {"G16": (64, 4), "G4": (64, 16), "G8": (64, 8), "G1": (64, 64), "G6": (60, 10)}
"""Query heads and key heads that are timed, by group size."""
KV_HEADS = 2
"""Key heads of a sample."""
Attention = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Sizes that are compared with float64: query heads of a key head, and head dimensions of keys and of values."""

    group: int
    dims: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 64
    batch: int = 1
    documents: int = 1


SAMPLES = {
    "bf16 G16": Sample(group=16),
    "bf16 G6 D64 batch 2": Sample(group=6, dims=(64, 64), batch=2),
    "bf16 G16 documents": Sample(group=16, documents=9),
    "bf16 G4": Sample(group=4),
    "bf16 G1": Sample(group=1),
    "bf16 G8 192/128": Sample(group=8, dims=(192, 128)),
    "fp32 G4": Sample(group=4, dims=(64, 64), dtype=torch.float32),
    "fp32 G4 128 documents": Sample(group=4, dtype=torch.float32, documents=5),
    "fp16 G2 80/96": Sample(group=2, dims=(80, 96), dtype=torch.float16),
    "bf16 G32 256": Sample(group=32, dims=(256, 256)),
    "bf16 G3 blocks of 32": Sample(group=3, dims=(64, 64), block_size=32),
    "bf16 G5 blocks of 128": Sample(group=5, block_size=128),
    "fp32 G2 192/128 blocks of 16": Sample(group=2, dims=(192, 128), dtype=torch.float32, block_size=16),
    "bf16 G80": Sample(group=80, dims=(64, 64)),
}


def check(sample: Sample, setting: Setting, length: int, point: Point) -> None:
    """Compare outputs, log-sum-exps and gradients with float64, and a second run with the first."""
    torch.manual_seed(0)
    heads = {"q": sample.group * KV_HEADS, "k": KV_HEADS, "v": KV_HEADS}
    dims = {"q": sample.dims[0], "k": sample.dims[0], "v": sample.dims[1]}
    inputs = {
        name: torch.randn(sample.batch, heads[name], length, dims[name], device=setting.device, dtype=sample.dtype)
        for name in heads
    }
    attention = attention_to_random_blocks(sample, setting.device, length)
    with mock.patch.multiple(selected, CHUNK=512, LEAST_CHUNK=256, LIST_ROWS=1024):  # several of each
        ours, again = (results(attention, inputs, setting.impl) for _ in range(2))
    plain = results(attention, inputs, "reference")
    exact = results(attention, {name: x.double() for name, x in inputs.items()}, "reference")
    point["repeats"] = point["right"] = all(torch.equal(ours[name], again[name]) for name in ours)
    for name, truth in exact.items():
        error, plain_error = relative_error(ours[name], truth), relative_error(plain[name], truth)
        factor = 2 if name in ("out", "lse") else 3
        point["right"] &= error <= factor * plain_error + 5e-7
        point[name] = f"{error:.1e} (plain {plain_error:.1e})"


def attention_to_random_blocks(sample: Sample, device: str, length: int) -> Attention:
    """Attend to forced blocks and random others, in documents of unequal lengths that begin anywhere."""
    size = sample.block_size
    config = NSAConfig(compress_block_size=size, compress_stride=size, select_block_size=size, num_selected_blocks=8)
    positions, document_ids = Positions.of_sequence(length, device), None
    if sample.documents > 1:
        first_tokens = torch.zeros(length, dtype=torch.int64)
        first_tokens[torch.randperm(length - 1)[: sample.documents - 1] + 1] = 1
        document_ids = first_tokens.cumsum(0).expand(sample.batch, -1).to(device)
        positions = document_positions(document_ids, config)
    scores = torch.rand(sample.batch, KV_HEADS, length, -(-length // size), device=device)
    blocks = top_blocks(scores, positions, config=config)
    return partial(selected_attention, block_indices=blocks, config=config, document_ids=document_ids)


def results(attention: Attention, inputs: dict[str, Tensor], impl: str) -> dict[str, Tensor]:
    """Return out, lse and the gradients of q, k and v, to which both contribute."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    out, lse = attention(**leaves, impl=impl)
    assert lse is not None
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    gradients = torch.autograd.grad((out * upstream).sum() + lse.sin().sum(), list(leaves.values()))
    named = zip(("dq", "dk", "dv"), gradients, strict=True)
    return {"out": out.detach(), "lse": lse.detach(), **dict(named)}


def measure(session: Session, setting: Setting, length: int, point: Point) -> None:
    """Time forward, backward and the lists of queries; on a GPU their memory and kernels, too."""
    workload = selected_phase(setting, length)
    out = workload.forward()
    upstream = torch.randn_like(out)

    def forward() -> None:
        with torch.no_grad():
            workload.forward()

    def backward() -> None:
        torch.autograd.grad(out, workload.differentiate, upstream, retain_graph=True)

    for name, run in {"forward": forward, "backward": backward}.items():
        point[name] = session.clock.median(run, 5, warm_up=1)
        if session.clock.cuda:
            point[f"{name} MiB"] = peak_mib(run)
            point[f"{name} kernels"] = {kernel.name[:40]: round(kernel.ms, 3) for kernel in time_kernels(run)[:12]}
    if session.clock.cuda:
        point["lists"] = session.clock.median(lists_phase(setting, length).run, 5, warm_up=1)


def peak_mib(call: Callable[[], object]) -> int:
    with AllocatorProbe("cuda") as probe:
        call()
        probe.mark("call")
    return round(probe.peak["call"] / MIB)


def main(argv: Sequence[str] | None = None) -> None:
    parser = options.parser(
        __doc__, json=options.RESULTS / "selected.json", seconds=400, lengths=[8192, 65536, 32768], tiny=False
    )
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS), help="default: all")
    parser.add_argument("--skip-check", action="store_true", help="measure without checking first")
    arguments = parser.parse_args(argv)
    recording = options.open_recording(arguments, __doc__)
    setting = replace(published(arguments.device, tiny=arguments.tiny), backend=None)
    session = Session(setting, recording, arguments.seconds)

    def take(kind: str, name: str, action: Callable[[Point], object]) -> None:
        point: Point = {"kind": kind, "name": name}
        session.attempt(point, partial(action, point))
        recording.add(point)
        print(*(f"{field} {value}" for field, value in point.items()), flush=True)

    for name, sample in ({} if arguments.skip_check else SAMPLES).items():
        take("check", name, partial(check, sample, setting, 130 if arguments.tiny else 1999))
    for length in arguments.lengths:
        for name in arguments.groups:
            heads, kv_heads = GROUPS[name]
            heads, kv_heads = (heads // kv_heads, 1) if arguments.tiny else (heads, kv_heads)
            sized = replace(setting, num_heads=heads, num_kv_heads=kv_heads)
            take("time", f"{name} {length // 1024}k", partial(measure, session, sized, length))


if __name__ == "__main__":
    main()
