#!/usr/bin/env python3
"""ucx_perftest's latencies (its own medians): a server and a client, each on its core; lines of LABEL-uct and -ucp."""
import argparse
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from process import Program, end_with_parent, pin

LISTENING = "0A"
LIMIT_S = 15
UCT = ["-d", "memory", "-x", "posix", "-D", "short"]
# Label's end, our test, ucx_perftest's, its arguments, sizes.
ROWS = [
    ("uct", "am_lat", "am_lat", UCT, (8,)),
    ("uct", "put_lat", "put_lat", UCT, (8, 64, 512, 4096, 65536, 1 << 20)),
    ("ucp", "am_lat", "ucp_am_lat", [], (8,)),
    ("ucp", "put_lat", "ucp_put_lat", [], (8,)),
]


class Perftest(Program):
    """With the program to run."""

    def more(self, parse: argparse.ArgumentParser) -> None:
        parse.add_argument("--perftest", default="ucx_perftest")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_listening(port: int) -> bool:
    """Asked without a connection, which the server would take for its client."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and int(fields[1].rsplit(":", 1)[1], 16) == port:
                return True
    return False


def start(command: list[str], core: int, environment: dict[str, str], output: int) -> subprocess.Popen[str]:
    def before() -> None:
        end_with_parent()
        pin(core)
    return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.DEVNULL, text=True,
                            preexec_fn=before)


def median_us(program: Perftest, test: str, arguments: list[str], size: int) -> float | None:
    """One run; no result is none."""
    count = 1000 if size > 65536 else 10_000 if size > 4096 else 50_000
    count = count // 5 if program.is_quick else count
    port = free_port()
    common = ["-p", str(port), "-t", test, "-s", str(size), "-n", str(count), "-w", str(count // 10), *arguments]
    environment = dict(os.environ, UCX_LOG_LEVEL="error")
    if not arguments:
        environment["UCX_TLS"] = "posix"
    server = start([program.args.perftest, *common], program.cores[1], environment, subprocess.DEVNULL)
    client = None
    try:
        end = time.monotonic() + LIMIT_S
        while not is_listening(port):
            if server.poll() is not None or time.monotonic() > end:
                return None
            time.sleep(0.01)
        client = start([program.args.perftest, "127.0.0.1", *common, "-f", "-v"], program.cores[0], environment,
                       subprocess.PIPE)
        lines = client.communicate(timeout=LIMIT_S)[0].splitlines()
        server.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return None
    finally:
        for process in (server, client):
            if process is not None:
                process.kill()
                process.wait()
    # iterations, median, average since the last line, average, ...
    values = [line.split(",") for line in lines if line[:1].isdigit()]
    return float(values[-1][1]) if values else None


def main() -> None:
    program = Perftest(__doc__)
    found = 0
    for end, test, theirs, arguments, sizes in ROWS:
        for size in sizes[:1] if program.is_quick else sizes:
            value = median_us(program, theirs, arguments, size)
            if value is None:
                print(f"# {program.label}-{end} {test} {size}: no result", flush=True)
                continue
            print(f"{program.label}-{end} {test} {size} {value:.5g} us", flush=True)
            found += 1
    if found == 0:
        sys.exit("ucx_perftest gave no result")


if __name__ == "__main__":
    main()
