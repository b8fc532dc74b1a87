"""What the rows mean, what they are held against, and the budgets."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from report import Row, Rows

    Finder = Callable[[Rows], float | None]
    RowFinder = Callable[[Rows, Row], float | None]

UCX = r"ucx.*"


def is_rate(unit: str) -> bool:
    return unit.endswith("/s")


DEFINITIONS = {
    "put_lat": "us, half a round trip of puts; each end polls the last word of what the other puts. Ours: `execute`",
    "put_signal_lat": "us, half a round trip of put_signal (`execute`), each end polls the signal word; peers: am_lat "
                      "of ucx_perftest, whose receiver is called with the message",
    "am_lat": "us, half a round trip of active messages, ucx_perftest's own median",
    "put_word_lat": "us, half a round trip of 8 bytes out of the sqe",
    "put_flush": "us, one put and its completion at the origin. Ours: push, submit, poll, reap. Peers: put and flush",
    "put_executed": "us, the same past our rings, by `execute`",
    "get_flush": "us, one get and its completion at the origin",
    "put_b100": "us, 100 puts to places 64 bytes apart and 100 cqes; peers: 100 bare puts and one flush",
    "put_b100_silent": "us, the same with one cqe",
    "put_word_b100": "us, the same with bytes out of the sqe and 100 cqes",
    "get_b100": "us, 100 gets and 100 cqes; peers: 100 gets and one flush, or 100 times get and flush",
    "fadd": "us, one fetch-add with the old value; the target leaves the word alone",
    "cswap": "us, one compare-swap with the old value",
    "fadd_b100": "us, 100 fetch-adds with 100 cqes and old values, all on one word",
    "cswap_b100": "us, 100 compare-swaps that succeed, with 100 cqes and old values",
    "put_rate": "Mmsg/s, windows of 64 puts of 8 bytes and one completion",
    "put_bw": "GB/s, windows over 64 slots (4 KiB) or 16 (above), right behind each other; 100 MiB: one slot, cold",
    "put_bw_hot": "GB/s, one place to one place",
    "put_bw_staggered": "GB/s, as put_bw, slots 64 bytes off the power of two",
    "get_bw": "GB/s, as put_bw",
    "get_bw_hot": "GB/s, as put_bw_hot",
    "get_bw_staggered": "GB/s, as put_bw_staggered",
    "put_read_bw": "GB/s, as put_bw, and the target sums what arrived before it acknowledges the walk; 100 MiB in "
                   "chunks of 1 MiB with a flag each",
    "wire_put_lat": "us, put_lat between two addresses of the loopback interface: ours RoCEv2 over UDP, with the ICRC that "
                    "it asks for at both ends; peers over TCP",
    "wire_put_flush": "us, put_flush, the same way",
    "wire_get_flush": "us, get_flush, the same way",
    "wire_put_bw": "GB/s, put_bw, the same way",
    "wire_get_bw": "GB/s, get_bw, the same way",
    "random_kinds": "ns each, puts, put_words, gets, fetch-adds and compare-swaps in an order nobody can guess, in 100",
    "random_sizes": "ns each, puts of 1 to 64 bytes in an order nobody can guess, in 100",
    "xcore_1": "ns, one nop from an application's core through an engine on the other and back; io_uring: by SQPOLL",
    "xcore_100": "ns each, the same 100 at a time",
    "spsc_b32": "Mops/s, entries of 64 bytes from core to core in batches of 32",
    "port_nop_b32": "Mops/s, nops pushed by a thread to an engine on the other core, one completion in 32",
    "pair": "ns, a block and back, its first byte touched",
    "hold64": "ns a block, 64 blocks and back in the same order, their first bytes touched",
}

# Where peers have no such row: which of theirs is laid beside it, by which factor, and what to say.
REFERENCE = {
    "put_executed": ("put_flush", 1, "put and flush"),
    "put_b100_silent": ("put_b100", 1, "100 puts, one flush"),
    "put_word_b100": ("put_b100", 1, "100 puts, one flush"),
    "put_signal_lat": ("am_lat", 1, "am_lat"),
    "put_word_lat": ("put_lat", 1, "put_lat"),
    "get_b100": ("get_flush", 100, "100 x get and flush"),
    "fadd_b100": ("fadd", 100, "100 x one alone"),
    "cswap_b100": ("cswap", 100, "100 x one alone"),
    "put_bw_staggered": ("put_bw", 1, "put_bw"),
    "get_bw_staggered": ("get_bw", 1, "get_bw"),
    "port_nop_b32": ("spsc_b32", 1, "spsc_b32, without engine and completions"),
}


def floor_of(test: str, size: int | None = None, factor: float = 1.0) -> RowFinder:
    def find(rows: Rows, row: Row) -> float | None:
        found = rows.get((test, row.size if size is None else size))
        value = found.of("floor") if found else None
        return None if value is None else value * factor
    return find


def memcpy(is_hot: bool) -> RowFinder:
    """The best way of copying so much here."""
    def find(rows: Rows, row: Row) -> float | None:
        ends = "_hot" if is_hot else ""
        tests = [f"memcpy_{how}{ends}" for how in ("libc", "movsb", "avx2", "avx512", "nt")]
        there = [rows[test, row.size].of("floor") for test in tests if (test, row.size) in rows]
        return max((value for value in there if value is not None), default=None)
    return find


# What the machine itself needs for it.
FLOORS: dict[str, RowFinder] = {
    "put_lat": lambda rows, row: floor_of("handover_two_lines", 8, 1e-3)(rows, row) if row.size == 8 else None,
    "put_word_lat": floor_of("handover_two_lines", 8, 1e-3),
    "put_signal_lat": floor_of("handover_two_lines", 8, 1e-3),
    "fadd": floor_of("locked_add", 8, 1e-3),
    "cswap": floor_of("locked_cas", 8, 1e-3),
    "fadd_b100": floor_of("locked_add", 8, 0.1),
    "cswap_b100": floor_of("locked_cas", 8, 0.1),
    "put_bw": memcpy(is_hot=False),
    "get_bw": memcpy(is_hot=False),
    "put_bw_hot": memcpy(is_hot=True),
    "get_bw_hot": memcpy(is_hot=True),
    "put_read_bw": memcpy(is_hot=False),
}


def ours(test: str, size: int, factor: float = 1.0) -> Finder:
    def find(rows: Rows) -> float | None:
        row = rows.get((test, size))
        value = row.of("verbring") if row else None
        return None if value is None else value * factor
    return find


def peer(test: str, size: int, factor: float = 1.0, pattern: str = ".*") -> Finder:
    def find(rows: Rows) -> float | None:
        row = rows.get((test, size))
        value = row.best(pattern)[1] if row else None
        return None if value is None else value * factor
    return find


def floor(test: str, size: int, factor: float = 1.0, plus: float = 0.0) -> Finder:
    def find(rows: Rows) -> float | None:
        row = rows.get((test, size))
        value = row.of("floor") if row else None
        return None if value is None else value * factor + plus
    return find


def least_of(*finders: Finder) -> Finder:
    """Of those that are there."""
    def find(rows: Rows) -> float | None:
        there = [value for value in (finder(rows) for finder in finders) if value is not None]
        return min(there, default=None)
    return find


def fixed(value: float) -> Finder:
    return lambda rows: value


def best_of(*finders: Finder) -> Finder:
    """Where one of them has nothing, there is nothing."""
    def find(rows: Rows) -> float | None:
        values = [finder(rows) for finder in finders]
        return None if None in values else min(values)
    return find


@dataclass(frozen=True)
class Budget:
    """What ours has to reach at least, and what it should."""
    name: str
    ours: Finder
    least: Finder
    stretch: Finder
    note: str
    is_rate: bool = False
    needs_avx512: bool = False


def _budgets() -> Iterator[Budget]:
    hand, us = "handover_two_lines", 1e-3
    yield Budget("put 8 B one way", ours("put_lat", 8), floor(hand, 8, 1.05 * us),
                 best_of(floor(hand, 8, us), peer("put_lat", 8)),
                 "us; 1.05 x the hand-over over two lines; below it and ahead of every peer")
    for name, test in (("put 8 B + cqe alone, through the rings", "put_flush"),
                       ("put 8 B + cqe alone, execute", "put_executed")):
        yield Budget(name, ours(test, 8), peer("put_flush", 8, 0.65, UCX), peer("put_flush", 8, 0.45, UCX),
                     "us; 0.65 x UCX put + flush")
    yield Budget("100 puts of 8 B, 100 cqes", ours("put_b100", 8), peer("put_b100", 8, 0.70, UCX),
                 peer("put_b100", 8, 0.55, UCX), "us; 0.70 x UCX 100 bare puts + one flush")
    yield Budget("100 puts of 8 B, silent", ours("put_b100_silent", 8), peer("put_b100", 8, 0.55, UCX),
                 peer("put_b100", 8, 0.40, UCX), "us; 0.55 x UCX 100 bare puts + one flush")
    yield Budget("100 gets of 8 B, 100 cqes", ours("get_b100", 8),
                 least_of(peer("get_flush", 8, 40, UCX), peer("get_b100", 8, 0.4, UCX)),
                 least_of(peer("get_flush", 8, 30, UCX), peer("get_b100", 8, 0.3, UCX)),
                 "us; 0.4 x UCX, 100 times get + flush or 100 gets + one flush")
    for test, lock in (("fadd_b100", "locked_add"), ("cswap_b100", "locked_cas")):
        yield Budget(f"{test}, each", ours(test, 8, 10), floor(lock, 8, plus=3.5), floor(lock, 8, plus=2.5),
                     "ns; the bare instruction + 3.5")
    yield Budget("random kinds, each", ours("random_kinds", 8), fixed(12), fixed(8), "ns", needs_avx512=True)
    yield Budget("random sizes 1 to 64 B, each", ours("random_sizes", 32), fixed(6), fixed(5), "ns", needs_avx512=True)
    for kind in ("put_bw", "put_bw_hot", "get_bw", "get_bw_hot", "put_read_bw"):
        for size in (65536, 1 << 20):
            yield Budget(f"{kind} {size >> 10} KiB", ours(kind, size), peer(kind, size), peer(kind, size, 1.1),
                         "GB/s; the best peer", is_rate=True)
    for size, name in ((8, "8 B"), (65536, "64 KiB"), (1 << 20, "1 MiB")):
        yield Budget(f"put {name} one way, UDP", ours("wire_put_lat", size), peer("wire_put_lat", size, 1, "libfabric.*"),
                     peer("wire_put_lat", size), "us; libfabric's tcp; every peer over TCP")
    for kind in ("put_bw", "get_bw"):
        for size in (65536, 1 << 20):
            yield Budget(f"{kind} {size >> 10} KiB, UDP", ours(f"wire_{kind}", size),
                         peer(f"wire_{kind}", size, 1, "libfabric.*"), peer(f"wire_{kind}", size),
                         "GB/s; libfabric's tcp; every peer over TCP", is_rate=True)
    for kind, least, stretch in (("put_bw", 1.3, 1.9), ("get_bw", 1.3, 1.9), ("put_read_bw", 1.4, 1.7)):
        yield Budget(f"{kind} 100 MiB", ours(kind, 100 << 20), peer(kind, 100 << 20, least),
                     peer(kind, 100 << 20, stretch), f"GB/s; {least} x the best peer", is_rate=True)
    yield Budget("put_signal one way", ours("put_signal_lat", 8), peer("am_lat", 8, 1, UCX), floor(hand, 8, us),
                 "us; UCX am")
    for test, part, stretch in (("xcore_1", 0.5, 285), ("xcore_100", 0.2, 12)):
        yield Budget(test, ours(test, 64), peer(test, 64, part, "io_uring"), fixed(stretch),
                     f"ns; {part} x io_uring SQPOLL")
    yield Budget("port to engine, 64 B entries, in 32s", ours("port_nop_b32", 64), peer("spsc_b32", 64, 1, "rtrb"),
                 peer("spsc_b32", 64, 2, "rtrb"), "Mops/s; rtrb's ring alone, ours with engine and completions",
                 is_rate=True)
    for size in (4096, 65536):
        for test, least, stretch in (("pair", 0.65, 0.6), ("hold64", 0.3, 0.15)):
            yield Budget(f"slab {test} {size >> 10} KiB", ours(test, size), peer(test, size, least),
                         peer(test, size, stretch), f"ns; {least} x the best allocator")


BUDGETS = list(_budgets())
