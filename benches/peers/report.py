"""From the values of all runs to rows, and from rows to text."""
import re
import statistics
from dataclasses import dataclass

from rows import BUDGETS, DEFINITIONS, FLOORS, REFERENCE, is_rate

# Not peers: ours, in whichever form, and the machine.
NO_PEERS = ("verbring", "verbring-pinned", "verbring-deferred", "floor")
# Hand-overs whose ratio is less are the same distance.
GAP = 1.8
# What does not mind where the other core is.
ONE_CORE = re.compile(r"pair|hold64|locked_.*|memcpy_.*|rdtsc.*|nop_.*|tail_clock.*")
HANDOVER = "handover"
PERCENTILES = ("p50", "p99", "p99.9", "p99.99", "max")


@dataclass(frozen=True)
class Figure:
    """The median of a peer's runs: of the undisturbed ones at the common distance of the cores; where there are none,
    of others, and it is marked."""
    value: float
    least: float
    most: float
    count: int
    mark: str

    @classmethod
    def of(cls, seen: list[tuple[float, bool, bool]]) -> "Figure":
        for is_calm, is_common in ((True, True), (False, True), (True, False), (False, False)):
            chosen = [value for value, *marks in seen if marks == [is_calm, is_common]]
            if chosen:
                break
        mark = ("" if is_calm else "~") + ("" if is_common else "^")
        return cls(statistics.median(chosen), min(chosen), max(chosen), len(chosen), mark)

    def times(self, factor: float) -> "Figure":
        return Figure(self.value * factor, self.least * factor, self.most * factor, self.count, self.mark)

    def spread(self) -> str:
        return f"{number(self.least)}..{number(self.most)} n{self.count}"


class Row:
    """A test at a size: the figures of all who have it."""

    def __init__(self, test: str, size: int, unit: str, peers: dict[str, Figure]) -> None:
        self.test, self.size, self.unit, self.peers = test, size, unit, peers

    def of(self, peer: str) -> float | None:
        return self.peers[peer].value if peer in self.peers else None

    def best(self, pattern: str = ".*") -> tuple[str, float] | tuple[None, None]:
        """The best of the peers whose name matches."""
        there = {name: figure.value for name, figure in self.peers.items()
                 if name not in NO_PEERS and re.fullmatch(pattern, name)}
        if not there:
            return None, None
        name = (max if is_rate(self.unit) else min)(there, key=there.__getitem__)
        return name, there[name]


Rows = dict[tuple[str, int], Row]


def stretches(run: dict) -> list[tuple[list[tuple], float, float]]:
    """The rows of a run in parts, each with the hand-over before and after it. The driver asks at both ends of a run; a
    long program may say `handover` between its rows."""
    parts, before, rows = [], run["handover_ns"][0], []
    for row in run["rows"]:
        if row[1] == HANDOVER:
            parts.append((rows, before, row[3]))
            before, rows = row[3], []
        else:
            rows.append(row)
    return [*parts, (rows, before, run["handover_ns"][1])]


def least_far(runs: list[dict]) -> float:
    """The hand-over from which on the cores are far apart: what has been seen is parted at its widest gap."""
    seen = sorted(ns for run in runs for _, *ends in stretches(run) for ns in ends if ns > 0)
    gap, above = max(((above / below, above) for below, above in zip(seen, seen[1:])), default=(1.0, 0.0))
    return above if gap >= GAP else float("inf")


def distance(ends: tuple[float, float], far: float) -> str:
    """Near, far, or "" if that changed meanwhile."""
    names = {"far" if ns >= far else "near" for ns in ends}
    return names.pop() if len(names) == 1 else ""


def common_distance(runs: list[dict]) -> str:
    """That at which most programs have been seen."""
    far = least_far(runs)
    seen = {(run["program"], distance((before, after), far)) for run in runs for _, before, after in stretches(run)}
    counts = {name: sum(there == name for _, there in seen) for name in ("near", "far")}
    return max(counts, key=counts.__getitem__)


def rows_of(runs: list[dict]) -> Rows:
    seen: dict[tuple[str, int], dict[str, list[tuple[float, bool, bool]]]] = {}
    units, common, far = {}, common_distance(runs), least_far(runs)
    for run in runs:
        for part, before, after in stretches(run):
            is_there = distance((before, after), far) == common
            for peer, test, size, value, unit in part:
                is_common = is_there or ONE_CORE.fullmatch(test) is not None
                seen.setdefault((test, size), {}).setdefault(peer, []).append((value, run["is_calm"], is_common))
                units[test] = unit
    order = list(DEFINITIONS)
    keys = sorted(seen, key=lambda key: (order.index(key[0]) if key[0] in order else len(order), *key))
    return {key: Row(*key, units[key[0]], {peer: Figure.of(values) for peer, values in seen[key].items()})
            for key in keys}


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def opponent(rows: Rows, row: Row) -> tuple[str, Figure, str] | None:
    """Whom ours is laid beside: the best peer, or where that is better its row of another name, with a note."""
    found = []
    if (best := row.best()[0]) is not None:
        found.append((best, row.peers[best], ""))
    if row.test in REFERENCE:
        test, factor, note = REFERENCE[row.test]
        other = rows.get((test, row.size))
        if other and (best := other.best()[0]) is not None:
            found.append((best, other.peers[best].times(factor), note))
    choose = max if is_rate(row.unit) else min
    return choose(found, key=lambda each: each[1].value) if found else None


def table(rows: Rows, is_all: bool) -> list[str]:
    out = [f"{'test':17}{'size':>10} {'unit':7}{'ours':>9}{'best peer':>10} {'':19}{'ours/peer':>10}"
           f"{'floor':>10}{'ours/floor':>11}  spread of ours; of the peer"]
    for row in rows.values():
        if row.test.startswith("tail_") or ("verbring" not in row.peers and not is_all):
            continue
        ours, against = row.peers.get("verbring"), opponent(rows, row)
        floor = FLOORS[row.test](rows, row) if row.test in FLOORS else None
        name, peer, note = against or ("", None, "")
        spreads = [ours.spread() if ours else "-"]
        if peer:
            spreads.append(peer.spread() + (f" ({note})" if note else ""))
        to_peer = ours.value / peer.value if ours and peer else None
        to_floor = ours.value / floor if ours and floor else None
        out.append(f"{row.test:17}{row.size:>10} {row.unit:7}{marked(ours):>9} {marked(peer):>9} {name:19}"
                   f"{ratio(to_peer):>10}{number(floor):>10}{ratio(to_floor):>11}  {'; '.join(spreads)}")
        if is_all:
            order = sorted(row.peers.items(), key=lambda each: each[1].value, reverse=is_rate(row.unit))
            out += [f"{'':35}{marked(figure):>9} {name:20} {figure.spread()}" for name, figure in order]
    return out


def marked(figure: Figure | None) -> str:
    return number(figure.value) + figure.mark if figure else "-"


def ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def tails(rows: Rows) -> list[str]:
    """The distributions, one a line."""
    named = {}
    for row in rows.values():
        if row.test.startswith("tail_"):
            what, percentile = row.test.removeprefix("tail_").rsplit("_", 1)
            for peer, figure in row.peers.items():
                named.setdefault((peer, what), {})[percentile] = figure
    if not named:
        return []
    out = [f"{'single operations, ns':40}" + "".join(f"{percentile:>10}" for percentile in PERCENTILES)]
    for (peer, what), figures in named.items():
        out.append(f"{peer + ' ' + what:40}" + "".join(f"{marked(figures.get(p)):>10}" for p in PERCENTILES))
    return out


def budgets(rows: Rows, has_avx512: bool) -> list[str]:
    """For each budget whether it is kept."""
    out = [f"{'budget':42}{'ours':>9}{'least':>9}{'stretch':>9}  verdict"]
    for budget in BUDGETS:
        ours, least, stretch = budget.ours(rows), budget.least(rows), budget.stretch(rows)
        if ours is None or least is None:
            verdict = "not measured"
        else:
            sign = -1 if budget.is_rate else 1
            if sign * ours > sign * least:
                verdict = f"not reached: {least / ours if budget.is_rate else ours / least:.2f}x of the budget"
            elif stretch is not None and sign * ours <= sign * stretch:
                verdict = "reached stretch"
            else:
                verdict = "reached least"
        note = budget.note
        if budget.needs_avx512 and not has_avx512:
            note += "; the budget is for AVX-512, which this processor has not"
        out.append(f"{budget.name:42}{number(ours):>9}{number(least):>9}{number(stretch):>9}  {verdict} ({note})")
    return out


def apart(runs: list[dict]) -> str:
    """A line about the distance of the cores."""
    far, seen = least_far(runs), {}
    for run in runs:
        for _, *ends in stretches(run):
            seen.setdefault(distance((ends[0], ends[1]), far), []).append(ends)
    parts = []
    for name in ("near", "far"):
        if name in seen:
            ns = [each for ends in seen[name] for each in ends]
            parts.append(f"{name}, {number(min(ns))}..{number(max(ns))} ns, {len(seen[name])} times")
    return f"a line from core to core: {'; '.join(parts)}; changed meanwhile: {len(seen.get('', []))}. " \
           f"Rows of two cores: {common_distance(runs)}"


def text(results: dict, is_all: bool) -> str:
    rows = rows_of(results["runs"])
    lines = [f"# {results['machine']}", f"# {', '.join(f'{k} {v}' for k, v in results['versions'].items())}"]
    lines += [f"# not here: {name}: {why}" for name, why in results["missing"].items()]
    lines += [f"# failed: {name}: {why}" for name, why in results["faults"].items()]
    lines += [f"# {apart(results['runs'])}"]
    lines += ["# ratios: below 1 is for us in times, above 1 in rates",
              "# ~: no undisturbed run", "# ^: no run with the cores at that distance", ""]
    lines += table(rows, is_all) + [""] + tails(rows) + [""] + budgets(rows, results["has_avx512"])
    lines += ["", "What the numbers include:"]
    lines += [f"  {test}: {what}" for test, what in DEFINITIONS.items() if any(test == there for there, _ in rows)]
    return "\n".join(lines) + "\n"
