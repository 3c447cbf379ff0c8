"""What torch's flight recorder remembers of the collectives that this process has begun."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RECENT = 256
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that a rank has begun.

    Args:
        group: process group.
        number: within the group, counted from the first on every rank.
        what: operation and sizes, such as ``"all_reduce of (8, 3)"``.
        place: where it was called from.
        ended: whether the rank has come out of it.
    """

    group: str
    number: int
    what: str
    place: str
    ended: bool


def flight_path(folder: Path, rank: int) -> Path:
    """Name the file of a rank's record, as ``torchfrtrace --prefix flight.rank-`` looks for those of NCCL."""
    return folder / f"flight.rank-{rank}"


def write_flight_record(path: Path) -> list[Collective]:
    """Write the record as PyTorch pickles it, and give the last collectives; nothing where there is no recorder.

    It is on by default, for gloo as for NCCL; ``TORCH_FR_BUFFER_SIZE=0`` turns it off.
    """
    entries: list[dict[str, Any]] = []
    for written in _dumps():
        found = pickle.loads(written).get("entries", [])
        if found and not entries:  # gloo's, beside NCCL's, are of small things; the tool reads one file a rank
            temporary = path.with_name(path.name + ".tmp")
            temporary.write_bytes(written)
            temporary.replace(path)
        entries += found
    ordered = sorted(entries, key=lambda entry: entry["time_created_ns"])
    return [_collective(entry) for entry in ordered if not entry["is_p2p"]][-RECENT:]


def _dumps() -> list[bytes]:
    """Ask the recorders that this build of PyTorch has, which differ from version to version."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    module = getattr(torch._C, "_distributed_c10d", None)
    functions = (getattr(module, name, None) for name in ("_dump_nccl_trace", "_dump_fr_trace"))
    return [function() for function in functions if function is not None]


def _collective(entry: dict[str, Any]) -> Collective:
    sizes = ", ".join(str(tuple(size)) for size in entry["input_sizes"])
    own = (frame for frame in entry.get("frames", []) if not frame["filename"].startswith(_TORCH))
    place = next((f"{Path(frame['filename']).name}:{frame['line']}, {frame['name']}" for frame in own), "")
    what = f"{entry['profiling_name'].partition(':')[2]} of {sizes}"
    ended = bool(entry.get("retired")) or entry.get("state") == "completed"
    return Collective(str(entry["process_group"][0]), entry["collective_seq_id"], what, place, ended)
