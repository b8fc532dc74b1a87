"""What the Python programs share: arguments, pinning, blocks of repeats, output, ends that die with their parent."""
import argparse
import ctypes
import os
import signal
import statistics
import time
from typing import Callable

BLOCK_S = 0.0005
PATIENCE_S = 60
PR_SET_PDEATHSIG = 1


class Program:
    """The arguments of a program, `LABEL --cores A,B [--quick]`, and its output."""

    def __init__(self, description: str) -> None:
        parse = argparse.ArgumentParser(description=description)
        parse.add_argument("label")
        parse.add_argument("--cores", default="0,1")
        parse.add_argument("--quick", action="store_true")
        self.more(parse)
        args = parse.parse_args()
        self.args, self.label, self.is_quick = args, args.label, args.quick
        self.cores = [int(core) for core in args.cores.split(",")]
        end_with_parent()

    def more(self, parse: argparse.ArgumentParser) -> None:
        """Arguments that only one program has."""

    def out(self, test: str, size: int, value: float, unit: str) -> None:
        print(f"{self.label} {test} {size} {value:.5g} {unit}", flush=True)

    def seconds(self, call: Callable[[], object]) -> float:
        """The median over blocks, of one call."""
        repeats, block = 1, timed(call, 1)
        while block < BLOCK_S:
            repeats = int(repeats * max(1.25, min(8, 1.25 * BLOCK_S / block))) + 1
            block = timed(call, repeats)
        row_s, least = (0.02, 3) if self.is_quick else (0.06, 7)
        blocks = max(least, int(row_s / block))
        return statistics.median(timed(call, repeats) / repeats for _ in range(blocks))


def timed(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return time.perf_counter() - start


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.alarm(PATIENCE_S)


def pin(core: int) -> None:
    os.sched_setaffinity(0, {core})
