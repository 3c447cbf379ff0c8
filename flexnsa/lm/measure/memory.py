"""The resident set of this process, buffers of libraries included, and the peaks of its memory."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

MIB = 2**20
_STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    """Return the resident bytes; where the system does not report them (not Linux), their peak."""
    return 1024 * kilobytes(_STATUS, "VmRSS") or peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Return the peak of the resident bytes, since the last reset if there was one."""
    # Not getrusage where possible: there a new process starts with the peak of its parent
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * kilobytes(_STATUS, "VmHWM") or (peak if sys.platform == "darwin" else peak * 1024)


def peaks_in_mib(device: torch.device) -> dict[str, float]:
    """Return the peaks of this process in MiB, the one to look at first before the others.

    On CUDA ``allocated_mib`` and ``reserved_mib`` of PyTorch's allocator come before ``resident_mib``.
    """
    peaks = {"resident_mib": peak_resident_bytes() / MIB}
    if device.type == "cuda":
        held = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        peaks = {"allocated_mib": held[0] / MIB, "reserved_mib": held[1] / MIB} | peaks
    return peaks


def kilobytes(file: Path, name: str) -> int:
    """Read a line such as ``VmRSS:  1234 kB`` of a file below /proc; 0 if there is none."""
    lines = file.read_text().splitlines() if file.exists() else []
    values = [line.split()[1] for line in lines if line.startswith(name + ":")]
    return int(values[0]) if values else 0
