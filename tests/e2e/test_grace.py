"""Checkpoints: a rank that handles SIGTERM has its grace, and what a rank has started ends with it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels import Kernel, eventually, is_alive, wait_gone
from process_table import stop_process
from time_limits import GRACE_S

SAVING = (
    "import os, signal, sys, time, torch, torch.distributed as dist\n"
    "terms = 0\n"
    "def save(*_):\n"
    "    global terms\n"
    "    terms += 1\n"
    "    end = time.monotonic() + {seconds}\n"
    "    while time.monotonic() < end: time.sleep(0.05)\n"
    "    dist.barrier()\n"
    "    open(f'saved-{{rank}}', 'w').write(str(terms))\n"
    "    print('saved', flush=True)\n"
    "    sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, save)\n"
    "print('up', os.getpid(), flush=True)\n"
)
IDLE = "while True: time.sleep(0.05)"


@pytest.fixture(autouse=True)
def no_files(kernel: Kernel) -> Iterator[None]:
    yield
    for path in kernel.home.work.glob("saved-*"):
        path.unlink()


def saved(kernel: Kernel) -> list[str]:
    return sorted(path.name for path in kernel.home.work.glob("saved-*"))


def up(kernel: Kernel, code: str):
    cell = kernel.start(code)
    for rank in (0, 1):
        cell.until(lambda rank=rank: cell.reply.lines(rank), 20, f"rank {rank} is up")
    return cell


def pids_of(cell) -> list[int]:
    return [int(cell.reply.lines(rank)[0].split()[1]) for rank in (0, 1)]


# ---------------------------------------------------------------- cancelled


def test_handler_finishes_its_checkpoint_and_the_run_ends_at_once(kernel: Kernel):
    cell = up(kernel, "%%distributed -n 2 --grace 60s\n" + SAVING.format(seconds=1.5) + IDLE)
    pressed = time.monotonic()
    kernel.interrupt()
    reply = cell.wait(20)
    assert 1.5 < time.monotonic() - pressed < 30
    assert "cancelled" in reply.text + reply.evalue
    # output during the grace is shown, and neither rank was interrupted or released
    for rank in (0, 1):
        assert reply.lines(rank)[1:] == ["saved"], reply.story
    assert [(kernel.home.work / name).read_text() for name in saved(kernel)] == ["1", "1"]
    assert kernel.check("%%distributed -n 2\nprint('next')").lines(1) == ["next"]


@pytest.mark.slow
def test_a_pool_that_is_asked_to_end_lets_handlers_finish_their_checkpoints(kernel: Kernel):
    cell = up(kernel, "%%distributed -n 2 --grace 60s\n" + SAVING.format(seconds=1.5) + IDLE)
    stop_process(kernel.home.pool_pid() or 0, signal.SIGTERM, 20)
    assert "the pool was stopped" in cell.wait(20).evalue
    assert [(kernel.home.work / name).read_text() for name in saved(kernel)] == ["1", "1"]
    # leave a working pool for the next tests
    kernel.check("%%distributed -n 2\nprint('next')")


def test_grace_that_is_over_kills(kernel: Kernel):
    cell = up(kernel, "%%distributed -n 2 --grace 0.2s\n" + SAVING.format(seconds=60) + IDLE)
    pids = pids_of(cell)
    pressed = time.monotonic()
    kernel.interrupt()
    cell.wait(20)
    for pid in pids:
        wait_gone(pid, 5)
    assert time.monotonic() - pressed < GRACE_S
    assert saved(kernel) == []


def test_further_requests_do_not_shorten_the_grace(kernel: Kernel):
    cell = up(kernel, "%%distributed -n 2 --grace 60s\n" + SAVING.format(seconds=1.0) + IDLE)
    pids = pids_of(cell)
    kernel.interrupt()
    kernel.interrupt()
    cell.wait(20)
    for pid in pids:
        wait_gone(pid, 10)
    assert [(kernel.home.work / name).read_text() for name in saved(kernel)] == ["1", "1"]


def test_one_rank_with_a_handler_can_tell_the_others_in_a_collective(kernel: Kernel):
    cell = up(
        kernel,
        "%%distributed -n 2 --grace 60s\n"
        "import os, signal, time, torch, torch.distributed as dist\n"
        "stop = torch.zeros(1)\n"
        "if rank == 0: signal.signal(signal.SIGTERM, lambda *_: stop.fill_(1))\n"
        "print('up', flush=True)\n"
        "while True:\n"
        "    told = stop.clone()\n"
        "    dist.all_reduce(told)\n"
        "    if told.item(): break\n"
        "    time.sleep(0.02)\n"
        "open(f'saved-{rank}', 'w').write('x')\n"
        "print('stopped', flush=True)",
    )
    kernel.interrupt()
    reply = cell.wait(20)
    assert [reply.lines(rank)[1:] for rank in (0, 1)] == [["stopped"], ["stopped"]], reply.story
    assert saved(kernel) == ["saved-0", "saved-1"]


# ---------------------------------------------------------------- the time is over, a peer fails


@pytest.mark.slow
def test_time_out_gives_the_grace_too(kernel: Kernel):
    reply = kernel.run("%%distributed -n 2 --timeout 0.5s --grace 60s\n" + SAVING.format(seconds=0.5) + IDLE)
    assert reply.ename == "RunTimeout"
    assert saved(kernel) == ["saved-0", "saved-1"]
    assert [reply.lines(rank)[1:] for rank in (0, 1)] == [["saved"], ["saved"]]


SURVIVOR = SAVING.replace("    dist.barrier()\n", "").format(seconds=1.0) + (
    "if rank == 1:\n    time.sleep(0.3)\n    raise ValueError('NaN in batch 118')\n" + IDLE
)


def test_survivor_of_a_failure_saves_behind_it_where_a_grace_was_given(kernel: Kernel):
    cell = up(kernel, "%%distributed -n 2 --grace 60s\n" + SURVIVOR)
    survivor, _ = pids_of(cell)
    reply = cell.wait(20)
    assert (reply.ename, reply.evalue) == ("ValueError", "NaN in batch 118")
    # the error did not wait for the checkpoint
    assert saved(kernel) == []
    assert is_alive(survivor)
    eventually(lambda: saved(kernel) == ["saved-0"], 5, "the survivor has saved")
    wait_gone(survivor, 2)


def test_survivor_of_a_failure_has_no_grace_by_default(kernel: Kernel):
    cell = up(kernel, "%%distributed -n 2\n" + SURVIVOR)
    survivor, _ = pids_of(cell)
    assert cell.wait(20).ename == "ValueError"
    wait_gone(survivor, 0.9)
    assert saved(kernel) == []


# ---------------------------------------------------------------- what a rank has started


@pytest.mark.slow
def test_grandchildren_end_with_their_rank_and_strangers_do_not(kernel: Kernel):
    with subprocess.Popen(["sleep", "301"], start_new_session=True, env={"PATH": os.environ["PATH"]}) as stranger:
        try:
            cell = up(
                kernel,
                "%%distributed -n 2\n"
                "import multiprocessing, os, subprocess, sys, time, torch\n"
                "class Slow(torch.utils.data.Dataset):\n"
                "    def __len__(self): return 100\n"
                "    def __getitem__(self, index): time.sleep(600)\n"
                "loader = iter(torch.utils.data.DataLoader(Slow(), num_workers=2))\n"
                "asleep = subprocess.Popen(['sleep', '302'])\n"
                "left = subprocess.Popen(['sleep', '303'], start_new_session=True)\n"
                "background = subprocess.Popen(['sh', '-c', 'sleep 304 & exec sleep 305'])\n"
                "workers = [worker.pid for worker in loader._workers]\n"
                "print(*workers, asleep.pid, left.pid, background.pid, flush=True)\n"
                "time.sleep(600)",
            )
            pids = [int(pid) for rank in (0, 1) for pid in cell.reply.lines(rank)[0].split()]
            assert len(pids) == 10
            assert all(map(is_alive, pids))
            os.kill(kernel.home.rank_pids()[0], signal.SIGKILL)
            assert cell.wait(20).ename == "WorkerDied"
            # exit handlers of the surviving rank, which wait for its workers, have 5 s
            for pid in pids:
                wait_gone(pid, 8)
            assert stranger.poll() is None
        finally:
            stranger.kill()


@pytest.mark.slow
def test_killed_zygote_is_the_death_of_its_ranks(kernel: Kernel):
    cell = up(kernel, "%%distributed -n 2\nimport time\nprint('up', flush=True)\ntime.sleep(600)")
    ranks = kernel.home.rank_pids()
    os.kill(next(pid for pid in kernel.home.zygote_pids() if pid in parents(ranks)), signal.SIGKILL)
    reply = cell.wait(20)
    assert reply.ename == "WorkerDied", reply.story
    assert re.search("the process that forks ranks ended unexpectedly, and its ranks with it", reply.evalue), (
        reply.story
    )
    for pid in ranks:
        wait_gone(pid, 5)
    assert kernel.check("%%distributed -n 2\nprint('next')").lines(1) == ["next"]


def parents(pids: list[int]) -> set[int]:
    return {int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1]) for pid in pids}
