"""The results as a picture: latency over size, bandwidth over size, tails. Usage: picture.py RESULTS.json"""
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from report import PERCENTILES, Rows, rows_of  # noqa: E402
from rows import FLOORS  # noqa: E402

FLOOR = {"linestyle": "--", "color": "grey", "zorder": 4}


def curves(axis: Axes, rows: Rows, test: str, title: str, unit: str) -> None:
    """A test over the size: peers thin, ours bold, the machine dashed."""
    there = {size: row for (name, size), row in rows.items() if name == test}
    for peer in sorted({peer for row in there.values() for peer in row.peers}):
        points = sorted((size, row.peers[peer].value) for size, row in there.items() if peer in row.peers)
        if peer == "verbring":
            axis.plot(*zip(*points), label=peer, marker="o", color="black", linewidth=2.5, zorder=3)
        elif len(points) > 1:
            axis.plot(*zip(*points), label=peer, marker=".", linewidth=0.8, zorder=2)
    floors = [(size, FLOORS[test](rows, row)) for size, row in sorted(there.items())] if test in FLOORS else []
    floors = [(size, value) for size, value in floors if value is not None]
    if len(floors) == 1:
        axis.axhline(floors[0][1], label="hand-over over two lines", **FLOOR)
    elif floors:
        axis.plot(*zip(*floors), label="best copy here", **FLOOR)
    axis.set(title=title, xscale="log", yscale="log", xlabel="bytes", ylabel=unit)
    axis.grid(True, which="major", alpha=0.3)
    legend(axis, 6)


def distributions(axis: Axes, rows: Rows) -> None:
    lines: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows.values():
        if row.test.startswith("tail_"):
            what, percentile = row.test.removeprefix("tail_").rsplit("_", 1)
            for peer, figure in row.peers.items():
                lines.setdefault((peer, what), {})[percentile] = figure.value
    for (peer, what), values in sorted(lines.items()):
        points = [(percentile, values[percentile]) for percentile in PERCENTILES if percentile in values]
        style = FLOOR if peer == "floor" else {"linewidth": 2}
        axis.plot(*zip(*points), marker=".", label=f"{peer} {what}", **style)
    axis.set(title="single operations", yscale="log", ylabel="ns")
    axis.grid(True, alpha=0.3)
    legend(axis, 7)


def legend(axis: Axes, size: int) -> None:
    if axis.lines:
        axis.legend(fontsize=size)


def main() -> None:
    path = Path(sys.argv[1])
    results = json.loads(path.read_text())
    rows = rows_of(results["runs"])
    figure, axes = plt.subplots(2, 3, figsize=(18, 10))
    curves(axes[0][0], rows, "put_lat", "put, one way", "us")
    curves(axes[0][1], rows, "put_flush", "put and its completion, alone", "us")
    curves(axes[0][2], rows, "put_bw_hot", "put, one place", "GB/s")
    curves(axes[1][0], rows, "put_bw", "put, walking slots", "GB/s")
    curves(axes[1][1], rows, "put_read_bw", "put, and the target reads", "GB/s")
    distributions(axes[1][2], rows)
    figure.suptitle(results["machine"])
    figure.tight_layout()
    for kind in ("svg", "png"):
        figure.savefig(path.with_suffix(f".{kind}"))


if __name__ == "__main__":
    main()
