"""`%sgpu_status` goes on below its cell, and brings a run's view back without waiting for it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import nvml_stub as nvml
import pytest
from kernels import Cell, Home, Kernel, eventually

nvml_stub = nvml.nvml_stub
HOME_VARIABLES = {"SGPU_SIMULATE": "a10:4,h100:2", "SGPU_PRICES": "a10=1.20"}
WAITS = """%%distributed -n 2 --name {name} --detach
import os, time
print('waits', rank, flush=True)
while not os.path.exists({gate!r}): time.sleep(0.02)
print('goes on', rank)
"""

STOP_POOL = """import subprocess, sys
subprocess.run([sys.executable, '-m', 'sgpu_magic.cli', 'pool', 'stop'], check=True, capture_output=True)
"""


@pytest.fixture
def gate(home: Home) -> Path:
    """A file that the ranks of this test's runs wait for."""
    return home.work / f"gate-{time.monotonic_ns()}"


@pytest.fixture
def started(kernel: Kernel, home: Home, gate: Path) -> Callable[[str], str]:
    """Starts a detached run that waits for `gate`; returns its id once its ranks wait."""

    def start(name: str) -> str:
        kernel.check(WAITS.format(name=name, gate=str(gate)))
        run_id = home.run_named(name)
        eventually(lambda: "waits 1" in home.log(run_id, 1), 30, "the ranks")
        # a rank may print before the pool knows of all of them
        eventually(lambda: home.ledger()[run_id].state == "running", 10, "the pool knows of the ranks")
        return run_id

    return start


@pytest.fixture(autouse=True)
def nothing_is_kept_up_to_date(kernel: Kernel) -> None:
    """What a module before this one has shown in the same kernel is kept up to date no more."""
    eventually(lambda: threads(kernel) == [], 15, "the end of the threads of tests before")


def threads(kernel: Kernel) -> list[str]:
    """Names of the notebook's threads that keep an output up to date."""
    names = kernel.value("[t.name for t in __import__('threading').enumerate()]")
    return [name for name in names if name in ("sgpu-status", "sgpu-view")]


def updates(cell: Cell) -> int:
    return cell.reply.messages.count("update_display_data")


# ---------------------------------------------------------------- the pool


def test_status_follows_what_happens_and_then_rests(kernel: Kernel, home: Home, gate: Path, started) -> None:
    run_id = started("followed")
    began = time.monotonic()
    cell = kernel.start("%sgpu_status")
    cell.wait()
    (output,) = cell.reply.outputs
    assert f"{run_id[:4]}   followed" in output.text
    assert "4 A10, 2 H100 (simulated) · " in output.text
    # devices of the run before may not be free yet
    assert re.search(rf"{run_id[:4]} followed on \d, \d", output.text)
    clock = output.text
    cell.until(lambda: output.text != clock, 5, "the clock of the run")
    assert "running" in output.text
    gate.touch()
    cell.until(lambda: "running" not in output.text and "running" not in output.html, 10, "the run's end")
    assert re.search("followed .* succeeded", output.text)
    assert "followed on" not in output.text
    cell.until_shown("updated until")
    seconds = time.monotonic() - began
    assert updates(cell) <= seconds + 1, f"{updates(cell)} messages in {seconds:.1f} s"
    eventually(lambda: threads(kernel) == [], 5, "the end of the thread that looks")


def test_status_of_a_pool_in_which_nothing_happens_is_two_messages(kernel: Kernel) -> None:
    kernel.check("%%distributed -n 1\npass")
    cell = kernel.start("%sgpu_status")
    cell.wait()
    assert threads(kernel) == ["sgpu-status"]
    eventually(lambda: threads(kernel) == [], 10, "the end of the thread that looks")
    # everything that it sent arrives before this cell's end
    kernel.check("pass")
    assert updates(cell) == 1
    assert len(cell.reply.outputs) == 1
    assert re.search(r"\n\nupdated until \d\d:\d\d:\d\d; %sgpu_status shows the present state$", cell.reply.text)


def test_only_the_last_status_is_kept_up_to_date(kernel: Kernel, gate: Path, started) -> None:
    started("twice")
    first = kernel.start("%sgpu_status")
    first.wait()
    second = kernel.start("%sgpu_status")
    second.wait()
    assert "updated until" in first.reply.text
    assert "updated until" not in second.reply.text
    gate.touch()
    second.until(lambda: "running" not in second.reply.text, 10, "the run's end")
    assert "running" in first.reply.text


def test_status_without_anybody_who_looks_is_shown_once(kernel: Kernel, gate: Path, started) -> None:
    started("unseen")
    kernel.client.allow_stdin = False
    try:
        reply = kernel.check("%sgpu_status")
        assert "unseen" in reply.text
        assert threads(kernel) == []
    finally:
        kernel.client.allow_stdin = True
        gate.touch()


def test_unloading_ends_it(new_kernel: Callable[..., Kernel], gate: Path, started) -> None:
    run_id = started("unloaded")
    other = new_kernel()
    other.check("%sgpu_status")
    view = other.start(f"%sgpu_status {run_id[:6]}")
    view.wait()
    view.until_shown("running")
    assert sorted(threads(other)) == ["sgpu-status", "sgpu-view"]
    other.check("%unload_ext sgpu_magic")
    assert threads(other) == []
    assert f"run {run_id[:4]} continues" in view.reply.text
    gate.touch()


@pytest.mark.slow
def test_status_tells_that_the_pool_is_gone_and_follows_the_next_one(new_home: Callable[..., Home]) -> None:
    home = new_home({"SGPU_STATUS_IDLE_S": "60"})
    kernel = Kernel(home)
    try:
        cell = kernel.start("%sgpu_status")
        cell.wait()
        kernel.check(STOP_POOL)
        cell.until_shown("local · the pool has ended; the next run starts it again")
        assert "--jp-warn" not in cell.reply.html, "nobody has to do anything"
        kernel.check("%%distributed -n 1 --name afterwards\npass")
        cell.until(lambda: re.search("afterwards .* succeeded", cell.reply.text), 10, "the next pool's run")
        assert "the pool has ended" not in cell.reply.text
        assert threads(kernel) == ["sgpu-status"]
    finally:
        kernel.close()


@pytest.mark.slow
def test_what_devices_do_is_shown_as_it_changes(
    new_home: Callable[..., Home], nvml_stub: Callable[..., dict[str, str]]
) -> None:
    machine = nvml_stub(devices=nvml.a10s(2))
    kernel = Kernel(new_home(machine | {"SGPU_STATUS_IDLE_S": "60"}))
    try:
        cell = kernel.start("%sgpu_status")
        cell.wait()
        assert re.search(r"A10 +2 +2 +0 +24 GB +0\.\d of 48 GB +0 %", cell.reply.text), cell.reply.text
        busy = nvml.StubGpu(uuid=nvml.gpu_uuid(1), bus=2, utilization_pct=94, used_bytes=18_200_000_000)
        nvml.change(machine, [*nvml.a10s(1), busy])
        cell.until(lambda: re.search(r"1[89]\.\d of 48 GB +0-94 %", cell.reply.text), 10, "the device's use")
        assert "0-94 %" in cell.reply.html
    finally:
        kernel.close()


# ---------------------------------------------------------------- a run


def test_a_run_is_shown_without_waiting_for_it(kernel: Kernel, home: Home, gate: Path, started) -> None:
    run_id = started("reopened")
    cell = kernel.start(f"%sgpu_status {run_id[:6]}")
    assert cell.wait(10).status == "ok"
    cell.until_shown("[1] waits 1")
    assert kernel.value("1 + 1") == 2
    assert "running" in cell.reply.text
    gate.touch()
    cell.until_shown("succeeded in")
    assert [cell.reply.lines(rank) for rank in (0, 1)] == [["waits 0", "goes on 0"], ["waits 1", "goes on 1"]]
    assert "✓ succeeded" in cell.reply.html
    eventually(lambda: threads(kernel) == [], 5, "the end of the view's thread")


def test_a_run_can_be_shown_twice_at_once(kernel: Kernel, gate: Path, started) -> None:
    run_id = started("shown-twice")
    view = kernel.start(f"%sgpu_status {run_id[:6]}")
    view.wait()
    view.until_shown("[0] waits 0")
    attached = kernel.start(f"%sgpu_attach {run_id[:6]}")
    attached.until_shown("[0] waits 0")
    gate.touch()
    assert attached.wait().status == "ok", attached.reply.story
    view.until_shown("succeeded in")
    for cell in (attached, view):
        assert cell.reply.lines(0) == ["waits 0", "goes on 0"]


def test_a_run_that_has_ended_is_shown_as_it_was_and_raises_nothing(kernel: Kernel, home: Home) -> None:
    failed = kernel.run("%%distributed -n 2 --name broken\nprint('step', rank)\nif rank == 1: raise ValueError('bad')")
    assert failed.status == "error"
    reply = kernel.check(f"%sgpu_status {home.run_named('broken')}")
    assert "✕ failed" in reply.html
    for words in ("[0] step 0", "rank 1 of 2", "ValueError: bad", "----> 3"):
        assert words in reply.text, reply.text
    assert threads(kernel) == []


def test_a_run_that_goes_on_is_shown_once_where_nobody_looks(kernel: Kernel, gate: Path, started) -> None:
    run_id = started("glimpsed")
    kernel.client.allow_stdin = False
    try:
        reply = kernel.check(f"%sgpu_status {run_id[:6]}")
    finally:
        kernel.client.allow_stdin = True
        gate.touch()
    assert "[1] waits 1" in reply.text
    assert f"run {run_id[:4]} continues; %sgpu_status {run_id[:4]}" in reply.text
    assert threads(kernel) == []


def test_a_run_that_does_not_exist_is_said_so(kernel: Kernel) -> None:
    reply = kernel.run("%sgpu_status ffffffff")
    assert reply.ename == "RunUnknown"
    assert kernel.run("%sgpu_status what").ename == "UsageError"


def test_runs_are_completed(kernel: Kernel, home: Home) -> None:
    kernel.check("%%distributed -n 1 --name listed\npass")
    run = home.run_named("listed")[:4]
    for magic in ("%sgpu_status", "%sgpu_attach", "sgpu_stacks"):
        assert run in kernel.complete(f"{magic} "), magic
        assert run in kernel.complete(f"{magic} {run[:2]}"), magic


def test_a_run_that_is_shown_again_has_one_thread(kernel: Kernel, started: Callable[[str], str], gate: Path):
    run = started("seen")
    for _ in range(4):
        kernel.check(f"%sgpu_status {run}")
    threads = "[t.name for t in __import__('threading').enumerate()].count('sgpu-view')"
    assert kernel.value(threads) == 1
    gate.touch()
    eventually(lambda: kernel.value(threads) == 0)
