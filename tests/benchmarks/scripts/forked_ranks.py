"""Four ranks by plain fork that wait for work: the floor under what a launcher can do with a payload.

    forked_ranks.py cloudpickle REPEATS   1 GiB tensor through one cloudpickle file, touched by every rank
    forked_ranks.py shared REPEATS        256 MiB tensor of each rank back, one shared-memory file each
    forked_ranks.py fresh-memory REPEATS  1 GiB of fresh memory written by one process

Prints `{"seconds": [...]}`. "Touched" means that one number of every page is read.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable

import torch

RANKS = 4
FLOATS_PER_PAGE = 1024
GIB_FLOATS = 2**28
QUARTER_GIB_FLOATS = 2**26


def fork_ranks(work: Callable[[int, int], None]) -> tuple[list[tuple[int, int]], int, list[int]]:
    """Fork ranks that call `work(rank, round)` once for each byte they are sent.

    Returns:
        Each rank's pid and the descriptor that wakes it, the descriptor on which all say done, and the pids.
    """
    done_read, done_write = os.pipe()
    ranks: list[tuple[int, int]] = []
    for rank in range(RANKS):
        wake_read, wake_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for _, other in ranks:
                    os.close(other)
                os.close(wake_write)
                torch.set_num_threads(1)
                count = 0
                while os.read(wake_read, 1):
                    work(rank, count)
                    count += 1
                    os.write(done_write, b"d")
                status = 0
            finally:
                os._exit(status)
        os.close(wake_read)
        ranks.append((pid, wake_write))
    os.close(done_write)
    return ranks, done_read, [pid for pid, _ in ranks]


def run_round(ranks: list[tuple[int, int]], done: int) -> None:
    for _, wake in ranks:
        os.write(wake, b"g")
    for _ in ranks:
        if not os.read(done, 1):
            raise SystemExit("a rank died")


def cloudpickle_file(repeats: int) -> list[float]:
    import cloudpickle

    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.NamedTemporaryFile(dir=folder) as file:

        def work(rank: int, count: int) -> None:
            with open(file.name, "rb") as source:
                tensor = cloudpickle.load(source)
            if float(tensor[::FLOATS_PER_PAGE].sum()) != (count + 1) * GIB_FLOATS / FLOATS_PER_PAGE:
                raise SystemExit("wrong content")

        ranks, done, pids = fork_ranks(work)
        tensor = torch.zeros(GIB_FLOATS)
        seconds: list[float] = []
        for _ in range(repeats):
            tensor.add_(1)
            started = time.perf_counter()
            with open(file.name, "wb") as target:
                cloudpickle.dump(tensor, target)
            run_round(ranks, done)
            seconds.append(time.perf_counter() - started)
        end(ranks, pids)
    return seconds


def shared_files(repeats: int) -> list[float]:
    files = [[os.memfd_create(f"bench{rank}") for rank in range(RANKS)] for _ in range(repeats)]
    size = QUARTER_GIB_FLOATS * 4

    def work(rank: int, count: int) -> None:
        tensor = torch.full((QUARTER_GIB_FLOATS,), float(rank + 1))
        os.ftruncate(files[count][rank], size)
        with mmap.mmap(files[count][rank], size) as shared:
            target = torch.frombuffer(shared, dtype=torch.float32)
            target.copy_(tensor)
            del target

    ranks, done, pids = fork_ranks(work)
    seconds: list[float] = []
    for count in range(repeats):
        started = time.perf_counter()
        run_round(ranks, done)
        for rank in range(RANKS):
            with mmap.mmap(files[count][rank], size) as shared:
                tensor = torch.frombuffer(shared, dtype=torch.float32)
                if float(tensor[::FLOATS_PER_PAGE].sum()) != (rank + 1) * QUARTER_GIB_FLOATS / FLOATS_PER_PAGE:
                    raise SystemExit("wrong content")
                del tensor
        seconds.append(time.perf_counter() - started)
        for rank in range(RANKS):
            os.ftruncate(files[count][rank], 0)
    end(ranks, pids)
    return seconds


def fresh_memory(repeats: int) -> list[float]:
    seconds: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        written = b"x" * (FLOATS_PER_PAGE * 2**20)
        seconds.append(time.perf_counter() - started)
        del written
    return seconds


def end(ranks: list[tuple[int, int]], pids: list[int]) -> None:
    for _, wake in ranks:
        os.close(wake)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    works = {"cloudpickle": cloudpickle_file, "shared": shared_files, "fresh-memory": fresh_memory}
    measure = works[sys.argv[1]]
    print("BENCH-RESULT " + json.dumps({"seconds": measure(int(sys.argv[2]))}), flush=True)
