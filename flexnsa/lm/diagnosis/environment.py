"""The environment of a run: software, machine, threads, and the variables that change them."""

from __future__ import annotations

import os
import platform
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.cuda import nccl

from flexnsa.files import FileWarning, read_whole, write_whole
from flexnsa.lm.checkpoint.checksum import sealed, unsealed
from flexnsa.lm.measure.table import Report, format_table
from flexnsa.lm.training.trainer import Trainer

FILE_NAME = "environment.json"
PREFIXES = ("CUDA_", "GLOO_", "KMP_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "TRITON_")
"""Prefixes of variables that PyTorch and its libraries read."""


def describe_environment() -> dict[str, Any]:
    """Return the environment as plain values; what is missing is None, or an empty list."""
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


def report_environment(record: dict[str, Any]) -> Report:
    """Report what :func:`describe_environment` returned, with a line for each GPU and each variable."""
    names = [gpu["name"] for gpu in record["gpus"]]
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    gpus = f"CUDA {record['cuda']} with driver {record['driver']} on {kinds}" if names else "without a GPU"
    software = f"flexnsa at commit {record['commit']} and torch {record['torch']}"
    rows = [[name, str(value)] for name, value in record.items() if name not in ("gpus", "variables")]
    for gpu in record["gpus"]:
        multiprocessors = f"{gpu['multiprocessors']} multiprocessors of {gpu['capability']}"
        rows.append([f"GPU {gpu['index']}", f"{gpu['name']}, {gpu['memory_gib']} GiB, {multiprocessors}"])
    return Report(
        sentence=f"{software}, {gpus}, {record['threads']} threads on {record['cores']} cores.",
        table=format_table(["environment", ""], [*rows, *map(list, record["variables"].items())]),
        record={"environment": record},
    )


def append_environment(path: Path) -> None:
    """Add a record as a line to a file, so that a run has a record of each start.

    Lines that differ from their checksum are dropped, with a warning.

    Raises:
        OSError: the file cannot be read or written; names it.
    """
    lines = read_whole(path).split(b"\n") if path.exists() else []
    whole: list[bytes] = []
    for line in lines:
        with suppress(ValueError):
            unsealed(line)
            whole.append(line)
    if any(line not in whole for line in lines if line):
        warnings.warn(f"{path}: damaged, and written anew without its damaged lines", FileWarning, stacklevel=2)
    write_whole(path, b"".join(line + b"\n" for line in (*whole, sealed(describe_environment()))))


@contextmanager
def recorded_environment(trainer: Trainer, folder: Path) -> Iterator[Callable[[], None]]:
    """Write ``environment.json`` on rank 0; a watcher of :func:`flexnsa.lm.training.run`."""
    trainer.ranks.on_first(lambda: append_environment(folder / FILE_NAME))
    yield lambda: None


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, or None."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "index": index,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
    }


def environment(commit: str | None = None) -> dict[str, Any]:
    """Describe the machine and the software that a measurement depends on."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "load_average": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _installed("triton"),
        "commit": commit or git_commit(),
    }


def cpu_name() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def git_commit() -> str | None:
    """Return the commit of this checkout, marked ``+`` if the package was changed since."""
    here = Path(__file__).resolve().parents[3]

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", "flexnsa") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
