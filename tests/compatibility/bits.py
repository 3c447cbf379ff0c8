"""Compare two checkouts bit for bit: the same computations in each, in fp32, on one and on two threads.

``python tests/compatibility/bits.py BEFORE AFTER``, two folders that hold a ``flexnsa`` each. Prints a table, and ends
with status 1 if any tensor differs. Both must run on one machine: another processor or BLAS rounds otherwise, which is
why this is no test. The same computations in fp64 are one, ``test_numbers.py``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

IMPLS = ("sdpa", "reference")
THREADS = (1, 2)

Hashes = dict[str, dict[str, str]]
"""Of each computation, the sha256 of each of its tensors."""


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    arguments = parser.parse_args()
    wrong = 0
    for threads in THREADS:
        before, after = hashes_of(arguments.before, threads), hashes_of(arguments.after, threads)
        again = before if after == before else hashes_of(arguments.before, threads)  # does it equal itself?
        for name, tensors in before.items():
            unsteady = [key for key, value in tensors.items() if again[name][key] != value]
            found = after.get(name, {})
            different = [key for key, value in tensors.items() if found.get(key) != value and key not in unsteady]
            wrong += len(different)
            verdict = f"{len(tensors) - len(unsteady) - len(different):3} of {len(tensors):3} tensors bit-equal"
            print(f"{threads} thread{'s'[: threads - 1]:1}  {name:60} {verdict}", flush=True)
            for title, keys in (("differ", different), ("differ from run to run", unsteady)):
                if keys:
                    print(f"            {title}: {', '.join(keys)}")
    print(f"{wrong} tensors differ" if wrong else "every tensor is bit-equal")
    raise SystemExit(bool(wrong))


def hashes_of(checkout: Path, threads: int) -> Hashes:
    """Run everything in a process that imports the flexnsa of this folder."""
    if not (checkout / "flexnsa" / "__init__.py").exists():
        raise SystemExit(f"{checkout}: expected a folder that holds flexnsa/")
    environment = os.environ | {"PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, __file__, "--run", str(threads), str(checkout.resolve())]
    return json.loads(subprocess.check_output(command, env=environment, text=True))


def run(threads: int, checkout: Path) -> Hashes:
    """Compute everything here."""
    import torch
    from attention_cases import ATTENTION_CASES, run_attention_case
    from layer_cases import LAYER_CASES

    import flexnsa

    assert Path(flexnsa.__file__).parent.parent == checkout, f"{flexnsa.__file__} is not of {checkout}"
    torch.set_num_threads(threads)
    found: Hashes = {}
    for impl in IMPLS:
        for name, case in ATTENTION_CASES.items():
            tensors = run_attention_case(case, impl, torch.float32)
            found[f"{impl}: {name}"] = {key: _hash(x) for key, x in tensors.items()}
        for name, compute in LAYER_CASES.items():
            found[f"{impl}: {name}"] = {key: _hash(x) for key, x in compute(impl, torch.float32).items()}
    return found


def _hash(x: Tensor) -> str:
    content = x.contiguous().numpy().tobytes()
    return hashlib.sha256(f"{x.dtype} {tuple(x.shape)} ".encode() + content).hexdigest()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(run(int(sys.argv[2]), Path(sys.argv[3]))))
    else:
        main()
