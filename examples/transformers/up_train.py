"""Up-training: a dense model becomes one with NSA layers, and learns on from there, on text of your own.

python examples/transformers/up_train.py my_text.txt [folder or name of a Llama, Qwen or other dense model]
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from flexnsa import NSAConfig
from flexnsa.lm import parameter_groups
from flexnsa.transformers import UpTraining, convert


def main(
    text: str = __file__, name: str | None = None, steps: int = 30, seq_len: int = 256, out: str = ""
) -> list[float]:
    tokens = tokens_of(Path(text), name)
    dense = tiny_llama() if name is None else AutoModelForCausalLM.from_pretrained(name)

    # Each branch begins with the dense keys and values; gates at 1 for the selected branch, at 0.02 for the others.
    model = convert(dense, NSAConfig(num_selected_blocks=8, window_size=128))

    # At first only what is new learns, and the new branches open step by step.
    schedule = UpTraining(frozen_steps=steps // 3, opening_steps=steps // 2)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=out or folder,
            max_steps=steps,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        # Compressors read whole blocks, and learn at a tenth of the rate.
        optimizer = torch.optim.AdamW(parameter_groups(model, lr=arguments.learning_rate))
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=rows(tokens, seq_len),
            callbacks=[schedule],
            optimizers=(optimizer, None),
        )
        trainer.train()
        model.save_pretrained(out or folder)
        again = AutoModelForCausalLM.from_pretrained(out or folder)
        print(f"saved, and loaded again as {type(again).__name__}")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def tokens_of(text: Path, name: str | None) -> list[int]:
    if name is None:
        return list(text.read_bytes())
    return AutoTokenizer.from_pretrained(name)(text.read_text())["input_ids"]


def rows(tokens: list[int], seq_len: int) -> list[dict[str, list[int]]]:
    cut = [tokens[start : start + seq_len] for start in range(0, len(tokens) - seq_len, seq_len)]
    return [{"input_ids": row, "labels": row} for row in cut]


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=256))


if __name__ == "__main__":
    losses = main(*sys.argv[1:3])
    print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} in the end")
