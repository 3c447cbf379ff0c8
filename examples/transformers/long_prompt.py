"""From a dense model to a long prompt: convert it, teach it to select, and generate, beside the dense model.

python examples/transformers/long_prompt.py [folder or name, such as Qwen/Qwen3-1.7B]
"""

import sys
import tempfile
import time
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Trainer, TrainingArguments

from flexnsa import NSAConfig
from flexnsa.optim import index_parameters
from flexnsa.transformers import TeachSelection, convert, recall


def main(name: str | None = None, prompt: int = 32_768, new: int = 16, steps: int = 10, row: int = 1024) -> list[int]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = (random_model() if name is None else AutoModelForCausalLM.from_pretrained(name)).to(device).eval()
    x = torch.randint(model.config.vocab_size, (1, prompt), device=device)  # a text of your own, for a real model
    report("dense", model, x, new)

    # The query heads of a key head share their blocks. They select 16 of them, of 64 tokens each.
    heads = model.config.num_attention_heads // model.config.num_key_value_heads
    sizes = NSAConfig(index_heads=heads, index_block_size=16, index_stride=16)
    model = convert(model, sizes, branches=["slc"], index_rank=16, copy=False)  # no second copy of the weights
    report("converted", model, x, new)

    # The indexers alone learn where the model's own attention is, which with random weights is everywhere alike. Any
    # trainer does it, by this callback.
    model.requires_grad_(False)
    for parameter in index_parameters(model):
        parameter.requires_grad_()
    rows: Any = [{"input_ids": each, "labels": each} for each in x[0, : prompt // row * row].view(-1, row).cpu()]
    before = recall(model, x[:, :row]).nanmean().item()
    with tempfile.TemporaryDirectory() as folder:
        options = {"learning_rate": 1e-2, "max_steps": steps, "per_device_train_batch_size": 1, "disable_tqdm": True}
        arguments = TrainingArguments(folder, **options, save_strategy="no", report_to=[], use_cpu=device == "cpu")
        Trainer(model, arguments, train_dataset=rows, callbacks=[TeachSelection()]).train()
    print(f"recall of the best blocks: {before:.3f}, taught {recall(model, x[:, :row]).nanmean().item():.3f}")
    return report("taught", model.eval(), x, new)


@torch.no_grad()
def report(label: str, model: Any, x: Tensor, new: int) -> list[int]:
    """Generate, and print the time of the prompt, of a token, and the memory of the cache."""
    clock, begin = Clock(), time.perf_counter()
    options: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    options |= {"attention_mask": torch.ones_like(x), "streamer": clock, "return_dict_in_generate": True}
    out = model.generate(x, **options)
    first, *_, last = clock.times[1:]
    token, layers = (last - first) / (new - 1), out.past_key_values.layers
    size = sum(each.numel() * each.element_size() for layer in layers for each in memory(layer)) / 2**20
    print(f"{label:10} prompt {first - begin:6.2f} s, token {1e3 * token:6.1f} ms, cache {size:6.1f} MiB")
    return out.sequences[0, x.shape[1] :].tolist()


class Clock:
    """A streamer that keeps when the prompt and each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def memory(layer: Any) -> list[Tensor]:
    """Return the tensors of a layer's cache."""
    nsa = getattr(layer, "nsa", None)
    return [layer.keys, layer.values] if nsa is None else [*nsa.buffers.values()]


def random_model() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 512, "eos_token_id": None}
    return AutoModelForCausalLM.from_config(
        Qwen3Config(**sizes, **heads, max_position_embeddings=65_536, initializer_range=0.1)
    )


if __name__ == "__main__":
    main(*sys.argv[1:2])
