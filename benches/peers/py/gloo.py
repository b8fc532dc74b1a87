#!/usr/bin/env python3
"""gloo, by torch.distributed: all-reduce of float32 between two processes, in place. Ours has no such row."""
import multiprocessing
import os
import statistics
import sys
import time

from process import Program, end_with_parent, pin

SIZES = (4096, 1 << 20, 100 << 20)
REPEATS = {4096: 200, 1 << 20: 30, 100 << 20: 7}


def end(rank: int, program: Program, store: str) -> None:
    end_with_parent()
    pin(program.cores[rank])
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    import torch
    from torch import distributed
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for size in SIZES:
        numbers = torch.ones(size // 4)
        distributed.all_reduce(numbers)
        if numbers[0] != 2 or numbers[-1] != 2:
            sys.exit("a sum is wrong")
        seconds = []
        for _ in range(max(3, REPEATS[size] // (5 if program.is_quick else 1))):
            distributed.barrier()
            start = time.perf_counter()
            distributed.all_reduce(numbers)
            seconds.append(time.perf_counter() - start)
        if rank == 0:
            program.out("allreduce", size, statistics.median(seconds) * 1e6, "us")
    distributed.barrier()


def main() -> None:
    program = Program(__doc__)
    store = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"gloo-{os.getpid()}")
    ends = [multiprocessing.Process(target=end, args=(rank, program, store)) for rank in (0, 1)]
    for process in ends:
        process.start()
    for process in ends:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ends))


if __name__ == "__main__":
    main()
