"""Runs programs in turn on calm cores, and says how much others used the cores meanwhile."""
import ctypes
import os
import re
import resource
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

LIMIT_S = 120
CALM_SHARE = 0.05
CALM_S = 0.3
ATTEMPTS = 3
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LINE = re.compile(r"(\S+) (\S+) (\d+) ([-+.0-9eE]+) (\S+)")
# What a killed peer leaves in /dev/shm.
SEGMENTS = re.compile(r"(ucx_|vader_segment|sm_segment|osc_|mpich|fi_|ofi_|\d+:|psm|sem\.mpich).*")
SHM = Path("/dev/shm")
libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Program:
    """Something that prints result lines when called with --cores and --quick."""
    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """What a run printed, the share of the two cores that others used, and what went wrong."""
    rows: list[tuple[str, str, int, float, str]]
    share: float
    wall_s: float
    fault: str


class Schedule:
    """Waiting and repeating are for those who have time left: after a part of the work, that part of the time."""

    def __init__(self, limit_s: float, runs: int) -> None:
        self.start, self.limit_s, self.runs, self.done = time.monotonic(), limit_s, runs, 0

    def is_in_time(self) -> bool:
        return time.monotonic() - self.start <= self.limit_s * (self.done + 1) / self.runs


def busy_s(cores: list[int]) -> float:
    """Seconds that the cores have worked so far, for anybody and for the hypervisor's other guests."""
    names, total = {f"cpu{core}" for core in cores}, 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name in names:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, ticks[:8])
            total += user + nice + system + irq + softirq + steal
    return total / os.sysconf("SC_CLK_TCK")


def children_s() -> float:
    use = resource.getrusage(resource.RUSAGE_CHILDREN)
    return use.ru_utime + use.ru_stime


def wait_for_calm(cores: list[int], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        before = busy_s(cores)
        time.sleep(CALM_S)
        if busy_s(cores) - before <= CALM_SHARE * CALM_S * len(cores):
            return


def adopt_orphans() -> None:
    """What a program leaves behind becomes a child of this process, is seen by `end_children` and by the accounts."""
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children() -> None:
    """Kills and collects every child, those adopted too."""
    while True:
        own = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[1]) == os.getpid():
                own.append(int(stat.parent.name))
        if not own:
            return
        for pid in own:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass


def remove_segments(before: set[str]) -> None:
    for path in SHM.iterdir():
        if path.name not in before and SEGMENTS.fullmatch(path.name) and path.stat().st_uid == os.getuid():
            path.unlink(missing_ok=True)


def last_words(text: str) -> str:
    """The line of stderr that says most: mpirun draws frames around its own."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" -=\t")]
    return lines[-1][:200] if lines else "no result and no reason"


def run_once(program: Program, cores: list[int], is_quick: bool, temporary: str) -> Outcome:
    command = [*program.command, "--cores", ",".join(map(str, cores)), *(["--quick"] if is_quick else [])]
    environment = {**os.environ, **program.environment, "TMPDIR": temporary}
    parent, segments = os.getpid(), set(os.listdir(SHM))

    def before() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    busy, own, start = busy_s(cores), children_s(), time.monotonic()
    child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=before)
    fault = ""
    try:
        out, err = child.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        # Orphans may hold the pipes.
        end_children()
        out, err = child.communicate()
        fault = f"no end after {LIMIT_S} s"
    finally:
        child.kill()
        child.wait()
        end_children()
        remove_segments(segments)
    wall = time.monotonic() - start
    share = max(0.0, busy_s(cores) - busy - (children_s() - own)) / (len(cores) * wall)
    rows = []
    for line in out.splitlines():
        if match := LINE.fullmatch(line):
            peer, test, size, value, unit = match.groups()
            rows.append((peer, test, int(size), float(value), unit))
    if child.returncode != 0 or not rows:
        fault = fault or f"code {child.returncode}: {last_words(err)}"
    return Outcome(rows, share, wall, fault)


def handover_ns(probe: Program | None, cores: list[int], temporary: str) -> float:
    """How far apart the cores are just now; 0 if nobody knows."""
    rows = run_once(probe, cores, False, temporary).rows if probe else []
    return rows[0][3] if rows else 0.0


def measure(programs: list[Program], probe: Program | None, rounds: int, cores: list[int], is_quick: bool,
            temporary: str, calm_s: float, disturbed: float, limit_s: float) -> tuple[list[dict], dict[str, str]]:
    """Every run, those that were disturbed too, and the faults by name."""
    adopt_orphans()
    schedule = Schedule(limit_s, rounds * len(programs))
    runs, faults = [], {}
    for turn in range(1, rounds + 1):
        for program in programs:
            for _attempt in range(ATTEMPTS):
                wait_for_calm(cores, calm_s if schedule.is_in_time() else CALM_S)
                near = handover_ns(probe, cores, temporary)
                try:
                    outcome = run_once(program, cores, is_quick, temporary)
                except OSError as error:
                    outcome = Outcome([], 0.0, 0.0, str(error))
                is_calm = outcome.share <= disturbed
                print(f"# round {turn}/{rounds} {program.name}: {len(outcome.rows)} rows in {outcome.wall_s:.1f} s, "
                      f"others used {outcome.share:.0%}{'' if is_calm else ', disturbed'}"
                      f"{'; ' + outcome.fault if outcome.fault else ''}", flush=True)
                runs.append({"program": program.name, "round": turn, "share": round(outcome.share, 4),
                             "is_calm": is_calm, "rows": outcome.rows,
                             "handover_ns": [near, handover_ns(probe, cores, temporary)]})
                if outcome.fault:
                    faults[program.name] = outcome.fault
                if is_calm or not outcome.rows or not schedule.is_in_time():
                    break
            schedule.done += 1
            if not outcome.rows:
                # It will not get better, and may cost LIMIT_S each time.
                programs = [other for other in programs if other is not program]
    return runs, faults
