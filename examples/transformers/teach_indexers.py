"""Teach the indexers of a released model in transformers' Trainer: warm up, be killed, resume, and join the rest.

python examples/transformers/teach_indexers.py [folder or name of a DeepSeek-V3.2, GLM-5, MiniMax-M3 or Qwen4 model]
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV32Config, Trainer, TrainerCallback, TrainingArguments, set_seed

from flexnsa.optim import audit
from flexnsa.transformers import TeachSelection

PLAIN = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
assert "flexnsa" not in sys.modules
with torch.no_grad():
    torch.save(model(torch.load(sys.argv[2])).logits, sys.argv[2])
"""


def main(name: str | None = None, warmup: int = 60, steps: int = 80, seq_len: int = 192) -> list[float]:
    with TemporaryDirectory() as folder:
        # Another process begins, and is killed in the warm-up, a step after it has written a checkpoint.
        job = json.dumps([name, f"{folder}/run", warmup, steps, seq_len, False, warmup // 2 + 1])
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # as many as here, for equal bits
        child = subprocess.run([sys.executable, __file__, "--killed", job], env=os.environ | threads, check=False)
        assert child.returncode == -signal.SIGKILL
        trainer = train(name, f"{folder}/run", warmup, steps, seq_len, resume=True)
        model: Any = trainer.model
        if name is None:  # a run that nothing stops ends with the same bits, as the stage depends on the step alone
            whole: Any = train(name, f"{folder}/whole", warmup, steps, seq_len).model
            assert all(map(torch.equal, model.state_dict().values(), whole.state_dict().values()))
        trainer.save_model(f"{folder}/taught")

        # What has learned are parameters of the model's own names: a process without flexnsa loads them.
        row, file = torch.arange(seq_len)[None] % 256, f"{folder}/row"
        torch.save(row, file)
        subprocess.run([sys.executable, "-c", PLAIN, f"{folder}/taught", file], check=True)
        with torch.no_grad():
            torch.testing.assert_close(torch.load(file), model.eval()(row.to(model.device)).logits.cpu())
    logged = [entry for entry in trainer.state.log_history if "selection_loss" in entry]
    for entry in logged[:: max(1, len(logged) // 8)]:
        stage = "warm-up" if entry["step"] <= warmup else "joint"
        uniform, recall = entry["selection_loss_uniform"], entry["selection_recall"]
        print(f"step {entry['step']:3} ({stage}): loss {entry['loss']:.2f}, of indexers {entry['selection_loss']:.3f}")
        print(f"    a uniform guess has {uniform:.3f}; the worst layer recalls {recall:.3f}")
    return [logged[at]["selection_recall"] for at in (0, -1)]


def load(name: str | None) -> Any:
    """Load a model, or make one of DeepSeek-V3.2's config with other sizes and random weights."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name)
    set_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 128}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16}
    sizes |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 32}
    sizes |= {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    sizes |= {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 16, "initializer_range": 0.2}
    return AutoModelForCausalLM.from_config(DeepseekV32Config(**sizes))


class Watch(TrainerCallback):
    """Tells which parameters learn in each stage, and kills this process at a step: no code runs after that."""

    def __init__(self, warmup: int, killed: int) -> None:
        self.warmup, self.killed = warmup, killed

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if state.global_step in (0, self.warmup):
            print(audit(kwargs["model"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.global_step == self.killed:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    name: str | None, folder: str, warmup: int, steps: int, seq_len: int, resume: bool = False, killed: int = 0
) -> Trainer:
    text = b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("[a-d]*.py")))
    rows: Any = [
        {"input_ids": row, "labels": row}
        for row in torch.frombuffer(bytearray(text), dtype=torch.uint8).long().split(seq_len)[:-1]
    ]
    options = {"max_steps": steps, "save_steps": max(1, warmup // 2), "logging_steps": 1, "learning_rate": 1e-2}
    args = TrainingArguments(folder, **options, per_device_train_batch_size=4, report_to=[], disable_tqdm=True)
    teach = TeachSelection(warmup_steps=warmup, num_queries=64)
    trainer = Trainer(load(name), args, train_dataset=rows, callbacks=[teach, Watch(warmup, killed)])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    if sys.argv[1:2] == ["--killed"]:
        train(*json.loads(sys.argv[2]))
    else:
        main(*sys.argv[1:2])
