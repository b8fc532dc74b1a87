#!/usr/bin/env python3
"""verbring over UDP, as two hosts would: `verbring perf` at two addresses of the loopback interface, each end on its core;
lines of LABEL wire_TEST."""
import json
import subprocess
import sys

from process import Program, end_with_parent

TESTS = "put_lat,put_flush,get_flush,put_bw,get_bw"
SIZES = "8,64k,1m"
HERE, THERE = "udp:127.92.0.1", "udp:127.92.0.2"
LIMIT_S = 50
# Of a row: its bandwidth of 8 bytes is nobody's question.
LEAST = {"put_bw": 65536, "get_bw": 65536}
QUICK_ITERATIONS = "200"


class Wire(Program):
    """With the program to run."""

    def more(self, parse):
        parse.add_argument("--program", default="verbring")


def start(program: Wire, arguments: list[str], output: int) -> subprocess.Popen[str]:
    cores = ",".join(map(str, program.cores))
    command = [program.args.program, "perf", "--cores", cores, *arguments]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE, text=True,
                            preexec_fn=end_with_parent)


def main() -> None:
    program = Wire(__doc__)
    quick = ["--iters", QUICK_ITERATIONS] if program.is_quick else []
    target = start(program, ["--device", THERE, "--listen"], subprocess.DEVNULL)
    asked = ["--device", HERE, "--connect", THERE, "--test", TESTS, "--size", SIZES, "--json", *quick]
    # It tries again until somebody listens.
    origin = start(program, asked, subprocess.PIPE)
    try:
        out, said = origin.communicate(timeout=LIMIT_S)
        target.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        sys.exit(f"no end after {LIMIT_S} s")
    finally:
        for process in (origin, target):
            process.kill()
            process.wait()
    if origin.returncode != 0:
        sys.exit(said.strip() or f"code {origin.returncode}")
    for row in map(json.loads, out.splitlines()):
        if row["size"] >= LEAST.get(row["test"], 0):
            program.out(f"wire_{row['test']}", row["size"], row["value"], row["unit"])


if __name__ == "__main__":
    main()
