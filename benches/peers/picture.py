"""The results as a picture: latency over size, bandwidth over size, tails. Usage: picture.py DIRECTORY"""
import json
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

directory = Path(sys.argv[1])
results = json.loads((directory / "results.json").read_text())
values = {}
for row in results["rows"]:
    for peer, seen in row["peers"].items():
        calm = [value for value, disturbed in seen if not disturbed] or [value for value, _ in seen]
        values[row["test"], peer, row["size"]] = statistics.median(calm)


def curves(axis, test, title, unit):
    peers = sorted({peer for t, peer, _ in values if t == test})
    for peer in peers:
        points = sorted((size, value) for (t, p, size), value in values.items() if (t, p) == (test, peer))
        if len(points) < 2:
            continue
        is_ours = peer == "verbring"
        axis.plot(*zip(*points), label=peer, marker="o" if is_ours else ".", zorder=3 if is_ours else 2,
                  color="black" if is_ours else None, linewidth=2.5 if is_ours else 1)
    floors = {test: "handover_two_lines"} if test == "put_lat" else {}
    for floor in floors.values():
        for (t, peer, _), value in values.items():
            if (t, peer) == (floor, "floor"):
                axis.axhline(value * 1e-3, linestyle="--", color="grey", label="hand-over over two lines")
    if test.endswith("_bw") or test.endswith("_hot"):
        ends = "_hot" if test.endswith("_hot") else ""
        best = {}
        for (t, peer, size), value in values.items():
            if peer == "floor" and t in {f"memcpy_{how}{ends}" for how in ("libc", "movsb", "avx2", "avx512", "nt")}:
                best[size] = max(value, best.get(size, 0))
        if best:
            axis.plot(*zip(*sorted(best.items())), linestyle="--", color="grey", label="best copy here")
    axis.set(title=title, xscale="log", yscale="log", xlabel="bytes", ylabel=unit)
    axis.grid(True, which="major", alpha=0.3)
    axis.legend(fontsize=6)


figure, axes = plt.subplots(2, 3, figsize=(18, 10))
curves(axes[0][0], "put_lat", "put, one way", "us")
curves(axes[0][1], "put_flush", "put and its completion, alone", "us")
curves(axes[0][2], "put_bw_hot", "put, one place", "GB/s")
curves(axes[1][0], "put_bw", "put, walking slots", "GB/s")
curves(axes[1][1], "put_read_bw", "put, and the target reads", "GB/s")
ranks = ["p50", "p99", "p99.9", "p99.99", "max"]
for what in sorted({t.rsplit("_", 1)[0] for t, _, _ in values if t.startswith("tail_")}):
    line = [next((v for (t, _, _), v in values.items() if t == f"{what}_{rank}"), None) for rank in ranks]
    if all(value is not None for value in line):
        axes[1][2].plot(ranks, line, marker=".", label=what.removeprefix("tail_"))
axes[1][2].set(title="distribution of single operations", yscale="log", ylabel="ns")
axes[1][2].grid(True, alpha=0.3)
axes[1][2].legend(fontsize=7)
figure.suptitle(results["machine"])
figure.tight_layout()
for kind in ("svg", "png"):
    figure.savefig(directory / f"results.{kind}")
