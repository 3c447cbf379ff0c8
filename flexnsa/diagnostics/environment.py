"""What a run depends on beside its options: software, machine, threads, and the variables that change them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.cuda import nccl

from flexnsa.files import write_whole
from flexnsa.measure.recording import environment
from flexnsa.measure.table import format_table
from flexnsa.training import Trainer

FILE_NAME = "environment.json"
PREFIXES = ("CUDA_", "GLOO_", "KMP_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "TRITON_")
"""Of the variables that PyTorch and the libraries below it read."""


def describe_environment() -> dict[str, Any]:
    """Describe it in plain values; what is not there is None, or an empty list."""
    cuda = torch.cuda.is_available()
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **environment(),
        "interop_threads": torch.get_num_interop_threads(),
        "cuda": torch.version.cuda,
        "driver": driver_version(),
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "nccl": ".".join(map(str, nccl.version())) if cuda else None,
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())] if cuda else [],
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)},
    }


def sentence(record: dict[str, Any]) -> str:
    """Say the most important of a record in one sentence."""
    names = [gpu["name"] for gpu in record["gpus"]]
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    gpus = f"CUDA {record['cuda']} with driver {record['driver']} on {kinds}" if names else "without a GPU"
    software = f"flexnsa at commit {record['commit']} and torch {record['torch']}"
    return f"{software}, {gpus}, {record['threads']} threads on {record['cores']} cores."


def table(record: dict[str, Any]) -> str:
    """Show a record, a line for each GPU and each variable."""
    rows = [[name, str(value)] for name, value in record.items() if name not in ("gpus", "variables")]
    rows += [[f"GPU {gpu['index']}", _in_words(gpu)] for gpu in record["gpus"]]
    rows += [[name, value] for name, value in record["variables"].items()]
    return format_table(["environment", ""], rows)


def append_environment(path: Path) -> None:
    """Add a record to a file, one a line, so that a run that was started again has one of each start.

    Raises:
        OSError: the file cannot be read or written; names it.
    """
    earlier = path.read_text() if path.exists() else ""
    write_whole(path, earlier + json.dumps(describe_environment()) + "\n")


@contextmanager
def recorded_environment(trainer: Trainer, folder: Path) -> Iterator[Callable[[], None]]:
    """Have rank 0 write ``environment.json`` beside a run; a watcher of :func:`flexnsa.training.run`."""
    trainer.ranks.on_first(lambda: append_environment(folder / FILE_NAME))
    yield lambda: None


def driver_version() -> str | None:
    """Ask NVIDIA's driver for its version."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _gpu(index: int) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(index)
    return {
        "index": index,
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "memory_gib": round(found.total_memory / 2**30, 1),
        "multiprocessors": found.multi_processor_count,
    }


def _in_words(gpu: dict[str, Any]) -> str:
    return f"{gpu['name']}, {gpu['memory_gib']} GiB, {gpu['multiprocessors']} multiprocessors of {gpu['capability']}"
