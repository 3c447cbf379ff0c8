"""Do the tests pass with other versions of PyTorch and transformers? Each has an environment of its own, made once.

    python .ci/versions.py .versions 2.11.0 2.13.0 newest 2.13.0+transformers==5.23.0 2.13.0+triton==3.9.0

needs Python alone. The newest is the one that the package index has today. With a torch alone these are the CPU parity
tests; with transformers beside it, those of the integration; with triton, those of the kernels for Hopper GPUs, which
are compiled for one. The status is 1 unless all tests pass.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from urllib.request import urlopen
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
NEEDED = ["pytest", "hypothesis", "numpy", "safetensors"]
PARITY = [
    f"tests/attention/test_{name}.py"
    for name in ("parity", "reference", "semantics", "selection", "empty_rows", "implementations")
]
PARITY += ["tests/cache/test_compiled_steps.py", "tests/lm/model/test_compiled_layers.py"]
INTEGRATION = ["tests/integrations/transformers"]
HOPPER = [
    "tests/emitted/test_architectures.py",
    "tests/attention/test_plan.py",
    "-k",
    "hopper or sm_90-bf16 or test_plan",
]


def main(folder: Path, versions: list[str]) -> int:
    """Make the environments, run the tests in each, print a table, and give the status."""
    named = dict.fromkeys(newest(folder) if version == "newest" else version for version in versions)
    rows = [try_version(folder / version, *version.split("+")) for version in named]
    print(f"\n{'torch':34}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
    for installed, passed, failed, skipped, seconds in rows:
        print(f"{installed:34}{passed:8}{failed:8}{skipped:9}{seconds:9.0f}")
    good = [row for row in rows if row[1] and not row[2]]
    print(f"\nthe tests pass with {len(good)} of {len(rows)} sets of versions.")
    return 0 if len(good) == len(rows) else 1


def try_version(folder: Path, torch: str, *others: str) -> tuple[str, int, int, int, float]:
    """Give the versions that ran, and how many tests passed, failed and were skipped in how many seconds."""
    python = make_environment(folder, torch, others)
    installed = ", ".join([output(python, "-c", "import torch; print(torch.__version__)"), *others])
    print(f"\n== torch {installed}", flush=True)
    report = folder.resolve() / "report.xml"
    report.unlink(missing_ok=True)
    tests = PARITY if not others else HOPPER if others[0].startswith("triton==") else INTEGRATION
    start = time.monotonic()
    subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,  # the report says what did not pass
    )
    seconds = time.monotonic() - start
    if not report.exists():
        return installed, 0, 1, 0, seconds
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    tests, failures, errors, skipped = (int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped"))
    return installed, tests - failures - errors - skipped, failures + errors, skipped, seconds


def make_environment(folder: Path, torch: str, others: Sequence[str]) -> Path:
    """Give the Python of an environment with a version of torch, built for CPUs where the index of these answers."""
    python = folder / "bin" / "python"
    done = folder / ".installed"
    if not done.exists():
        print(f"making {folder}", flush=True)
        venv.create(folder, with_pip=True, symlinks=True, clear=True)  # also what an earlier start has left half made
        run(python, "-m", "pip", "install", "--quiet", *cpu_index(), f"torch=={torch}")
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        if others:  # what else these need is theirs to say
            packages = [
                f"torch=={torch}",
                *(line for line in lines if line.startswith("triton==") and not others[0].startswith("triton==")),
                "accelerate",
                *others,
            ]
        else:
            kept = [line for line in lines if not line.startswith(("torch==", "triton=="))]
            (folder / "constraints.txt").write_text("\n".join(kept) + "\n")
            packages = ["--constraint", str(folder / "constraints.txt")]
        run(python, "-m", "pip", "install", "--quiet", *packages, *NEEDED)
        done.touch()
    return python


def newest(folder: Path) -> str:
    """Ask the index for its newest torch; nothing is installed."""
    asking = folder / "asking"
    if not asking.exists():
        venv.create(asking, with_pip=True, symlinks=True)
    options = ["--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-", *cpu_index()]
    report = json.loads(output(asking / "bin" / "python", "-m", "pip", "install", *options, "torch"))
    return report["install"][0]["metadata"]["version"].partition("+")[0]


@cache
def cpu_index() -> list[str]:
    """Give pip's option for wheels without CUDA, or none, which is the default index, where these do not answer."""
    try:
        urlopen(f"{CPU_WHEELS}/torch/", timeout=10).close()
    except OSError:
        print(f"{CPU_WHEELS} does not answer: taking torch from the default index", flush=True)
        return []
    return ["--index-url", CPU_WHEELS]


def run(*command: object) -> None:
    """Run to the end, which has to be a good one."""
    subprocess.run([str(word) for word in command], check=True)


def output(*command: object) -> str:
    """Give what a command prints."""
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
