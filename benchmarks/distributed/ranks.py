"""Check and measure several GPUs: equal to one, tokens a second under DDP, attention with its tokens sharded over them.

    python -m benchmarks distributed.ranks --json ranks.json                        # every GPU of the machine
    python -m benchmarks distributed.ranks --device cpu --tiny --ranks 2 --json ranks.json      # rehearse, over gloo

One command: it starts a process for each GPU, writes the file after every point, and has ended, whatever hangs, when
``--deadline`` seconds are over. Checks compare a layer with sharded tokens, and steps of a model under DDP, FSDP2 and
both with sharded tokens, with one GPU; each may err as far from float32 as two (of gradients, three) runs of one GPU.
Then tokens a second of a model with NSA and with dense attention, on one GPU and on all, under DDP and FSDP2. Then
attention from projected heads to output, rotation, compression and gates included, of sequences whose tokens are
sharded, and on one GPU where that has the memory, while the others do the same; and how long the communication of keys
takes alone. Times are medians of the slowest process. It fails where a check does.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from benchmarks.distributed.checks import layer_check, step_checks
from benchmarks.distributed.speed import attention_speed, training_speed
from benchmarks.distributed.together import Together
from benchmarks.harness import options
from benchmarks.harness.recording import Recording
from benchmarks.harness.setting import published
from flexnsa.lm.parallel import joined_ranks, rank_device


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options.parser(
        __doc__, json=options.RESULTS / "ranks.json", deadline=540, rounds=5, impl="triton", tiny=False
    )
    parser.add_argument("--ranks", type=int, help="processes; default: one for each GPU")
    parser.add_argument(
        "--lengths", type=int, nargs="*", default=[131072, 524288, 262144, 1048576], help="of attention"
    )
    parser.add_argument(
        "--alone-up-to", type=int, default=524288, help="tokens that one GPU gets; default: %(default)s"
    )
    parser.add_argument(
        "--check-at", type=int, default=4096, help="tokens of the checks; 0: none; default: %(default)s"
    )
    parser.add_argument("--train-at", type=int, default=8192, help="tokens of a row of steps; 0: none")
    parser.add_argument("--eager", action="store_true", help="run attention without torch.compile around it")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.ranks is None:
        arguments.ranks = torch.cuda.device_count() if arguments.device == "cuda" else 2
    least = 1024 * arguments.ranks  # tokens, whose chunks are as long as the window
    if arguments.tiny:
        arguments.lengths, arguments.alone_up_to = [least, 2 * least], least
        arguments.train_at, arguments.rounds = 128, 2
    if arguments.check_at is None:
        arguments.check_at = least if arguments.tiny else max(4096, least)
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    if arguments.until is not None:
        measure(arguments)
        return
    until = time.time() + arguments.deadline
    # Without the name by which the runner was told to start this.
    arguments_of_ranks = [word for word in (sys.argv[1:] if argv is None else argv) if word != "distributed.ranks"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.ranks)]
    command = [*launcher, "-m", "benchmarks", "distributed.ranks", *arguments_of_ranks, "--until", str(until)]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        status = process.wait(max(1.0, until - time.time()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise SystemExit(f"stopped after {arguments.deadline} s; what was measured is in {arguments.json}") from None
    if status:
        raise SystemExit(status)
    points = json.loads(arguments.json.read_text())["points"]
    if not all(point.get("holds") for point in points if point["kind"] == "check"):
        raise SystemExit("a check does not hold")


def measure(arguments: argparse.Namespace) -> None:
    """What each of the processes does."""
    device = rank_device(torch.device(arguments.device))
    setting = published(arguments.device, tiny=arguments.tiny, dim=1024, impl=arguments.impl)
    with joined_ranks("ddp", device) as ranks:
        recording = Recording(
            arguments.json if ranks.rank == 0 else None, options.about(__doc__), commit=arguments.commit
        )
        recording.note(setting=setting.to_dict(), ranks=ranks.world_size, argv=sys.argv[1:])
        together = Together(ranks, device, recording, arguments.until, arguments.rounds)
        if arguments.check_at:
            layer_check(together, setting, arguments.check_at)
            step_checks(together, arguments.check_at, tiny=arguments.tiny)
        if arguments.train_at:
            training_speed(together, arguments.train_at, tiny=arguments.tiny)
        for length in arguments.lengths:
            attention_speed(together, setting, length, compiled=not arguments.eager, sharded=True)
            if length <= arguments.alone_up_to:
                attention_speed(together, setting, length, compiled=not arguments.eager, sharded=False)


if __name__ == "__main__":
    main()
