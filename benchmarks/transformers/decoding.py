"""Time of a token in transformers' own ``generate``: a dense Llama, the same by one argument, and converted.

    python -m benchmarks transformers.decoding --json benchmarks/results/transformers_decoding.json

All have the same random weights, of the sizes of Llama 3.2 1B with default rotary embedding, in bf16; the library's
own decoder has weights of its own, of the same sizes. The prompt is random. The second call of ``generate`` is timed,
by when its streamer gets tokens: ``first_ms`` is the prompt, ``token_ms`` the median of the others. PyTorch's
dense attention makes a plan of cuDNN's for every length, so the dense model is there without cuDNN, too. Points that
the file holds already are not measured again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

import flexnsa.transformers as integration
from benchmarks.harness import options
from flexnsa import NSAConfig
from flexnsa.lm.transformers_model import FlexNSAConfig, FlexNSAForCausalLM

SIZES: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
SIZES |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32_000, "pad_token_id": 0}
SIZES |= {"max_position_embeddings": 131_072, "eos_token_id": None}
TINY = SIZES | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
STATIC = ", static cache"
"""Of which transformers compiles a step."""
IMPLEMENTATIONS = ("dense", "dense without cuDNN", "converted", "selected branch", "own decoder", "drop-in")
IMPLEMENTATIONS += f"dense{STATIC}", f"drop-in{STATIC}"


class Stamps:
    """A streamer that keeps when its tokens came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _tokens: torch.Tensor) -> None:
        """Be told of the prompt, and then of each token, which by then is on the CPU."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Be told that there are no more."""


def make(name: str, sizes: dict[str, Any], device: str) -> Any:
    torch.manual_seed(0)
    torch.backends.cuda.enable_cudnn_sdp(name != "dense without cuDNN")
    with torch.device(device):
        model: Any = own_decoder(sizes) if name == "own decoder" else LlamaForCausalLM(LlamaConfig(**sizes))
    model = model.to(dtype=torch.bfloat16).eval()
    if name.startswith("drop-in"):
        model.set_attn_implementation("flexnsa")
    elif name in ("converted", "selected branch"):
        branches = ["slc"] if name == "selected branch" else ["cmp", "slc", "win"]
        model = integration.convert(model, NSAConfig(), branches=branches)
    return model.requires_grad_(False)


def own_decoder(sizes: dict[str, Any]) -> Any:
    """Make the library's decoder with heads, layers and a vocabulary like those of a Llama."""
    names = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "hidden_size": "dim"}
    names |= {"num_key_value_heads": "num_kv_heads", "head_dim": "head_dim", "vocab_size": "vocab_size"}
    config = {name: sizes[theirs] for theirs, name in names.items()}
    return FlexNSAForCausalLM(FlexNSAConfig(**config, eos_token_id=None, pad_token_id=0))


def measure(point: dict[str, Any], sizes: dict[str, Any], device: str, tokens: int) -> dict[str, Any]:
    """Generate twice, and time the second time."""
    model = make(point["name"], sizes, device)
    prompt = torch.randint(sizes["vocab_size"], (point["batch"], point["context"]), device=device)
    arguments: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "do_sample": False}
    if point["name"].endswith(STATIC):
        arguments["cache_implementation"] = "static"
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for count in (3, tokens):
        stamps = Stamps()
        begin = time.perf_counter()
        model.generate(prompt, **arguments, max_new_tokens=count, min_new_tokens=count, streamer=stamps)
    each = [1e3 * (b - a) for a, b in zip(stamps.times[1:], stamps.times[2:], strict=False)]
    result: dict[str, Any] = {"first_ms": 1e3 * (stamps.times[1] - begin), "token_ms": statistics.median(each)}
    if device == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def measure_each(
    points: Iterable[dict[str, Any]], measured: Callable[..., Any], arguments: argparse.Namespace, doc: str | None
) -> None:
    """Measure and record points that the file does not hold already, until the deadline."""
    recording, begin = options.open_recording(arguments, doc, keep=True), time.monotonic()
    for point in points:
        if any(point.items() <= old.items() and "label" not in old for old in recording.points):
            continue
        if time.monotonic() - begin > arguments.deadline:
            print("the deadline is over; the same command resumes here")
            return
        try:
            found = measured(point)
        except (RuntimeError, ValueError, TypeError) as error:
            found = {"label": f"{type(error).__name__}: {error}"[:300]}
        recording.add(point | found, tuple(point))
        print(recording.points[-1], flush=True)
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    sizes, batch = TINY if arguments.tiny else SIZES, arguments.batch
    points = [{"name": name, "context": x, "batch": batch} for x in arguments.contexts for name in arguments.names]
    measure_each(points, lambda x: measure(x, sizes, arguments.device, arguments.tokens), arguments, __doc__)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options.parser(__doc__, contexts=[32_768, 65_536], deadline=240, tiny=False)
    parser.add_argument("--names", nargs="+", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS, help="default: all")
    parser.add_argument("--batch", type=int, default=1, help="rows; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=65, help="new tokens; default: %(default)s")
    arguments = parser.parse_args(argv)
    if arguments.tiny:
        arguments.contexts, arguments.tokens = [300], 6
    return arguments


if __name__ == "__main__":
    main()
