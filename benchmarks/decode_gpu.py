"""Time one decoded token on a GPU: NSA's layer and attention beside flash SDPA, eager, compiled and as a CUDA graph.

    python -m benchmarks.decode --device cuda --impl flex --json decode_gpu.json        # under 4 minutes on an H200

One cache per batch size, as long as the longest context, serves every context, as it would in use: nothing is compiled
twice. Caches hold random numbers. Eager and compiled times are those of the wall over steps one after the other; a
graph's are CUDA events around each replay, the second-level cache flushed before. All are medians.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.decode_check import check_decoding
from flexnsa import NativeSparseAttention, NSAConfig
from flexnsa.cli.recording import Recording
from flexnsa.functional import attend, implementation
from flexnsa.masks.positions import Positions
from flexnsa.models import DenseAttention

Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One layer; the default is the shape of published NSA times on an H200, the width that of the paper's model."""

    dim: int = 2560
    num_heads: int = 64
    num_kv_heads: int = 4
    head_dim: int = 128
    config: NSAConfig = NSAConfig()  # noqa: RUF009  (frozen)
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    impl: str = "flex"
    backend: str = "inductor"

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """First arguments of a layer."""
        return self.dim, self.num_heads, self.num_kv_heads, self.head_dim

    def compile(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """One graph, for this batch size."""
        return torch.compile(call, fullgraph=True, dynamic=False, backend=self.backend)

    def place(self, layer: nn.Module) -> Any:
        """Put a layer on the device, frozen."""
        return layer.to(self.device, self.dtype).requires_grad_(False)

    def draw(self, *shape: int) -> Tensor:
        """Random numbers on the device."""
        return torch.randn(shape, dtype=self.dtype, device=self.device)


class Sparse:
    """NSA's layer, and its attention alone, at any context."""

    def __init__(self, shape: Shape, batch: int, capacity: int) -> None:
        self.shape = shape
        self.layer = shape.place(NativeSparseAttention(*shape.heads, config=shape.config, impl=shape.impl))
        self.cache = self.layer.new_cache(batch, capacity)
        for buffer in self.cache.buffers.values():
            buffer.normal_()
        self.x = shape.draw(batch, 1, shape.dim)
        self.q = shape.draw(batch, shape.num_heads, 1, shape.head_dim)
        self.gates = torch.rand(batch, shape.num_heads, 1, 3, dtype=shape.dtype, device=shape.device)
        self.token = torch.zeros(batch, 1, dtype=torch.int32, device=shape.device)
        self.compiled_layer, self.compiled_attention = shape.compile(self.layer), shape.compile(self._attention)

    def go_to(self, context: int) -> None:
        """Pretend that so many tokens are in the cache."""
        self.cache.lengths.fill_(context)
        self.token.fill_(context)

    def calls(self) -> dict[str, dict[str, Call]]:
        """What to time, by part and mode."""
        return {
            "layer": {
                "eager": lambda: self.layer(self.x, cache=self.cache),
                "compiled": lambda: self.compiled_layer(self.x, cache=self.cache),
            },
            "attention": {"eager": self._attention, "compiled": self.compiled_attention},
        }

    def _attention(self) -> Tensor:
        zero = torch.zeros_like(self.token)
        buffers = self.cache.buffers
        out, _ = attend(
            implementation(self.shape.impl, self.q, cached=True),
            self.q,
            buffers["k_slc"],
            buffers["v_slc"],
            self.gates,
            k_cmp=buffers["k_cmp"],
            v_cmp=buffers["v_cmp"],
            k_win=buffers["k_win"][:, :, :-1],
            v_win=buffers["v_win"][:, :, :-1],
            positions=Positions(self.token, zero, zero),
            window_positions=Positions(self.token.clamp_max(self.shape.config.window_size - 1), zero, zero),
            config=self.shape.config,
            scale=self.shape.head_dim**-0.5,
        )
        return out


class Dense:
    """A dense layer whose cache is as full as the context, so that flash SDPA needs no mask.

    ``folded`` lays the heads of a group in rows, so that each key is read once.
    """

    def __init__(self, shape: Shape, batch: int, capacity: int, *, folded: bool) -> None:
        self.shape, self.folded, self.context = shape, folded, 0
        self.layer = shape.place(DenseAttention(*shape.heads))
        self.k, self.v = shape.draw(2, batch, shape.num_kv_heads, capacity, shape.head_dim).unbind()
        self.x = shape.draw(batch, 1, shape.dim)
        self.q = shape.draw(batch, shape.num_heads, 1, shape.head_dim)
        self.token = torch.zeros(1, dtype=torch.int64, device=shape.device)
        self.project, self.w_o = shape.compile(self._project), self.layer.w_o

    def go_to(self, context: int) -> None:
        """Pretend that so many tokens are in the cache."""
        self.context = context
        self.token.fill_(context)

    def calls(self) -> dict[str, dict[str, Call]]:
        """What to time: SDPA is a kernel already, and what is around it in a layer is compiled."""
        return {
            "layer": {"compiled": lambda: self.w_o(self._attend(self.project()).transpose(1, 2).flatten(2))},
            "attention": {"eager": lambda: self._attend(self.q)},
        }

    def _project(self) -> Tensor:
        q, k, v = self.layer._project(self.x, self.token)
        self.k[:, :, self.token], self.v[:, :, self.token] = k, v
        return q

    def _attend(self, q: Tensor) -> Tensor:
        k, v = (x[:, :, : self.context + 1] for x in (self.k, self.v))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            if not self.folded:
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
            return F.scaled_dot_product_attention(rows, k, v).reshape(q.shape)


def wall_ms(call: Call, steps: int = 20, rounds: int = 5) -> float:
    """Time steps one after the other."""
    times = []
    for _ in range(rounds):
        _wait()
        start = time.perf_counter()
        for _ in range(steps):
            call()
        _wait()
        times.append((time.perf_counter() - start) / steps)
    return 1000 * statistics.median(times)


def graph_ms(call: Call, rounds: int = 40) -> float:
    """Capture one step in a CUDA graph and time its replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        graph.replay()
        end.record()
        _wait()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def race(shape: Shape, batch: int, contexts: Sequence[int], recording: Recording, end: float) -> None:
    """Measure all contestants of a batch size, longest context first."""
    makers: dict[str, Callable[[], Sparse | Dense]] = {
        "NSA": lambda: Sparse(shape, batch, max(contexts) + 4096),
        "flash SDPA": lambda: Dense(shape, batch, max(contexts) + 4096, folded=False),
        "flash SDPA, folded": lambda: Dense(shape, batch, max(contexts) + 4096, folded=True),
    }
    for name, make in makers.items():
        point = {"batch": batch, "name": name}
        contestant = _attempt(make, point, recording, end)
        if contestant is None:
            continue
        for part, calls in contestant.calls().items():
            for mode, call in calls.items():
                labels = point | {"part": part, "mode": mode}
                begin = time.perf_counter()
                if not _attempt(lambda c=contestant, call=call: _first(c, call, contexts), labels, recording, end):
                    continue
                labels |= {"first_call_s": round(time.perf_counter() - begin, 1)}
                clocks = {"wall": wall_ms} | ({"graph": graph_ms} if shape.device == "cuda" else {})
                for context, (clock, measure) in itertools.product(sorted(contexts, reverse=True), clocks.items()):
                    contestant.go_to(context)
                    measured = labels | {"context": context, "clock": clock}
                    ms = _attempt(lambda measure=measure, call=call: measure(call), measured, recording, end)
                    if ms is not None:
                        recording.add(measured | {"ms": ms})
                        print(
                            f"{batch:3d} {context:7,d} {part:9} {mode:8} {clock:5} {name:18} {ms:8.3f} ms", flush=True
                        )
        del contestant
        if shape.device == "cuda":
            torch.cuda.empty_cache()


def _first(contestant: Sparse | Dense, call: Call, contexts: Sequence[int]) -> bool:
    contestant.go_to(min(contexts))
    call()
    _wait()
    return True


def _attempt(action: Callable[[], Any], point: dict[str, Any], recording: Recording, end: float) -> Any:
    """Do it unless time is up; what goes wrong becomes a point with a label and costs no other point."""
    try:
        if time.monotonic() > end:
            raise TimeoutError("over the time limit of the run")
        return action()
    except Exception as error:
        label = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error) else ''}"
        recording.add(point | {"label": label})
        print(f"{point}: {label}", flush=True)
        return None


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(arguments: argparse.Namespace) -> None:
    """Check, measure, print, record."""
    end = time.monotonic() + arguments.seconds
    torch.set_grad_enabled(False)
    torch._dynamo.config.recompile_limit = 64
    torch.manual_seed(0)
    shape = Shape(impl=arguments.impl)
    if arguments.tiny:
        shape = Shape(
            dim=64,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            dtype=torch.float32,
            device="cpu",
            impl="sdpa",
            backend="aot_eager",
        )
    recording = Recording(arguments.json, " ".join((__doc__ or "").split()), commit=arguments.commit)
    recording.note(setting={name: str(value) for name, value in vars(shape).items()})
    report = _attempt(lambda: check_decoding(shape.device, shape.impl), {"part": "check"}, recording, end)
    recording.note(correctness=report)
    print(report, flush=True)
    for batch in arguments.batches:
        contexts = [context for context in arguments.contexts if context * batch <= arguments.most_tokens]
        race(shape, batch, contexts, recording, end)
    print(f"{arguments.json}, {time.monotonic() - end + arguments.seconds:.0f} s")
