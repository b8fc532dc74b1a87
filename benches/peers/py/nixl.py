#!/usr/bin/env python3
"""NIXL over its UCX backend between two processes, by its Python calls; requests are made once and posted again."""
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection

os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
os.environ.setdefault("UCX_LOG_LEVEL", "error")
import numpy as np  # noqa: E402
from process import Program, end_with_parent, pin  # noqa: E402

SIZES = (8, 64, 512, 4096, 65536, 1 << 20)
LARGE = (4096, 65536, 1 << 20, 100 << 20)
REGION = (100 << 20) + 4096
STRIDE = 64
TESTS = {"WRITE": "put", "READ": "get"}


def slots(size: int) -> int:
    return 64 if size <= 4096 else 16 if size <= 1 << 20 else 1


class End:
    """An agent without a thread of its own, and its memory."""

    def __init__(self, name: str, core: int) -> None:
        pin(core)
        import nixl_cu12._api as api
        self.agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self.memory = np.ones(REGION, dtype=np.uint8)
        self.base = self.memory.ctypes.data
        self.agent.register_memory([(self.base, REGION, 0, "")], "DRAM")

    def request(self, other: str, base: int, kind: str, size: int, count: int, stride: int):
        def places(at: int):
            return self.agent.get_xfer_descs([(at + i * stride, size, 0) for i in range(count)], "DRAM")
        return self.agent.initialize_xfer(kind, places(self.base), places(base), other)

    def post(self, request) -> None:
        """Until it is done."""
        state = self.agent.transfer(request)
        while state != "DONE":
            if state == "ERR":
                raise RuntimeError("a transfer failed")
            state = self.agent.check_xfer_state(request)


def target(pipe: Connection, core: int) -> None:
    """Looks after what arrives until it is told to stop."""
    end_with_parent()
    end = End("target", core)
    pipe.send((bytes(end.agent.get_agent_metadata()), end.base))
    end.agent.add_remote_agent(pipe.recv())
    pipe.send("ready")
    while not any(b"stop" in map(bytes, notices) for notices in end.agent.get_new_notifs().values()):
        pass
    pipe.send((int(end.memory[0]), int(end.memory[REGION - 4097])))
    # What it waits for is the other end's last step.
    pipe.poll(5)


def main() -> None:
    program = Program(__doc__)
    here, there = multiprocessing.Pipe()
    other = multiprocessing.Process(target=target, args=(there, program.cores[1]), daemon=True)
    other.start()
    end = End("origin", program.cores[0])
    if not here.poll(20):
        sys.exit("the other end did not start")
    metadata, base = here.recv()
    end.agent.add_remote_agent(metadata)
    here.send(bytes(end.agent.get_agent_metadata()))
    here.recv()
    end.memory[:] = 3

    def seconds(kind: str, size: int, count: int = 1, stride: int = 0) -> float:
        request = end.request("target", base, kind, size, count, stride)
        value = program.seconds(lambda: end.post(request))
        request.release()
        return value

    for kind, test in TESTS.items():
        for size in SIZES:
            program.out(f"{test}_flush", size, seconds(kind, size) * 1e6, "us")
        program.out(f"{test}_b100", 8, seconds(kind, 8, 100, STRIDE) * 1e6, "us")
        for size in LARGE:
            count = slots(size)
            program.out(f"{test}_bw", size, count * size / seconds(kind, size, count, size) / 1e9, "GB/s")
            if count > 1:
                program.out(f"{test}_bw_hot", size, count * size / seconds(kind, size, count, 0) / 1e9, "GB/s")
    end.agent.send_notif("target", b"stop")
    while not here.poll(0.001):
        end.agent.get_new_notifs()
    if here.recv() != (3, 3):
        sys.exit("other bytes arrived")
    here.send("done")
    other.join(5)
    other.kill()
    sys.stdout.flush()
    # Its destructors wait for the other agent.
    os._exit(0)


if __name__ == "__main__":
    main()
