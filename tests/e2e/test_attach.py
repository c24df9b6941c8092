"""Runs that go on without their notebook, and notebooks that come back to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nvml_stub as nvml
import pytest
from kernels import Cell, Home, Kernel, eventually, is_alive, wait_gone
from pool_client import FollowedRun, PoolClient
from process_table import memory_files
from time_limits import GRACE_S

from sgpu_magic.client.run import ClientRun
from sgpu_magic.errors import RunUnknown
from sgpu_magic.wire.base import RunState, new_id
from sgpu_magic.wire.events import RanksStarted, RunEnded, Submitted

nvml_stub = nvml.nvml_stub

# prints until the test creates the file
UNTIL_TOLD = (
    "import os, time\n"
    "print('first', rank, flush=True)\n"
    "step = 0\n"
    "while not os.path.exists({name!r}):\n"
    "    step += 1\n"
    "    time.sleep(0.02)\n"
    "print('last', rank)\n"
)


class Word:
    """A file that a run waits for."""

    def __init__(self, home: Home, name: str) -> None:
        self._path: Path = home.work / name
        self.body = UNTIL_TOLD.format(name=name)

    def give(self) -> None:
        self._path.touch()


@pytest.fixture
def word(home: Home, request: pytest.FixtureRequest) -> Word:
    return Word(home, f"word-{request.node.name[:40]}")


def submit_detached(kernel: Kernel, body: str, options: str = "") -> str:
    """Run a cell with `--detach` and return the run's id."""
    reply = kernel.check(f"%%distributed -n 2 --detach {options}\n{body}")
    assert "continues without this notebook" in reply.text, reply.story
    run_id = kernel.home.runs[-1]
    assert reply.text.rpartition("%sgpu_attach ")[2][:4] == run_id[:4]
    return run_id


def started(kernel: Kernel, body: str, options: str = "") -> tuple[Cell, str]:
    """Start a run, wait until both ranks have printed, and return its cell and id."""
    before = set(kernel.home.runs)
    cell = kernel.start(f"%%distributed -n 2 {options}\n{body}")
    cell.until_shown("[0] first 0")
    cell.until_shown("[1] first 1")
    (run_id,) = set(kernel.home.runs) - before
    return cell, run_id


# ------------------------------------------------------------ come back


def test_a_detached_run_outlives_its_kernel_and_is_picked_up_whole(
    home: Home, neighbour: Kernel, new_kernel: Callable[..., Kernel], word: Word
):
    first = new_kernel()
    # large enough to lie in the kernel's memory
    first.check("import numpy as np\ntable = np.arange(200_000)")
    begun = time.monotonic()
    run = submit_detached(first, f"{word.body}total = int(table.sum()) + rank\nmine = rank", "--out total,mine:all")
    assert time.monotonic() - begun < 5
    first.kill()
    cell = neighbour.start("result = %sgpu_attach")
    cell.until_shown("[0] first 0")
    cell.until_shown("[1] first 1")
    word.give()
    reply = cell.wait()
    assert reply.status == "ok", reply.story
    assert reply.lines(0) == ["first 0", "last 0"]
    assert reply.lines(1) == ["first 1", "last 1"]
    assert "succeeded" in reply.text
    assert neighbour.value("[total, mine, result.run_id]") == [200_000 * 199_999 // 2, [0, 1], run]


def test_a_run_that_has_ended_is_shown_whole_and_brings_its_results(kernel: Kernel, home: Home):
    kernel.check("%%distributed -n 2 --out answer\nprint('once', rank)\nanswer = 42\nanswer + rank")
    run = home.runs[-1]
    kernel.check("del answer")
    reply = kernel.check(f"%sgpu_attach {run}")
    assert [reply.lines(rank) for rank in (0, 1)] == [["once 0"], ["once 1"]]
    assert reply.result == f"run {run[:4]}: [42, 43]"
    assert kernel.value("answer") == 42
    # once more: attaching uses nothing up
    assert kernel.check(f"%sgpu_attach {run} --ui none").result == f"run {run[:4]}: [42, 43]"


def test_a_large_result_is_there_for_everybody_who_comes(kernel: Kernel, neighbour: Kernel, home: Home):
    run = submit_detached(kernel, "import numpy as np\nbig = np.full(300_000, rank + 1)", "--out big:all")
    for where in (kernel, neighbour, kernel):
        where.check(f"%sgpu_attach {run}")
        assert where.value("[int(each.sum()) for each in big]") == [300_000, 600_000]
    # their memory is freed, and they can be fetched again
    home.check_leaks()
    kernel.check("big = None")
    kernel.check(f"%sgpu_attach {run}")
    assert kernel.value("[int(each.sum()) for each in big]") == [300_000, 600_000]


@pytest.mark.slow
def test_results_that_a_notebook_has_had_are_there_for_the_next_one(
    kernel: Kernel, new_kernel: Callable[..., Kernel], home: Home
):
    before = set(home.runs)
    first = new_kernel()
    first.check("%%distributed -n 2 --out big:all\nimport numpy as np\nbig = np.full(300_000, rank + 1)")
    (run_id,) = set(home.runs) - before
    first.kill()
    kernel.check(f"%sgpu_attach {run_id}")
    assert kernel.value("[int(each.sum()) for each in big]") == [300_000, 600_000]
    kernel.check("big = None")


@pytest.mark.slow
def test_results_that_lie_nowhere_any_more_are_an_error_that_says_so(new_home: Callable[..., Home]):
    home = new_home({"SGPU_KEEP_RESULTS": "100000"})
    kernel = Kernel(home)
    try:
        kernel.check("%%distributed -n 1 --out gone\nimport numpy as np\nprint('said')\ngone = np.ones(300_000)")
        run = home.runs[-1]
        # the agent learns from the pool that the notebook has the results
        eventually(lambda: not any(map(memory_files, home.agent_pids())), 10, "the agent lets go of the results")
        reply = kernel.run(f"%sgpu_attach {run}")
        assert reply.ename == "SerializationError"
        assert f"the result of rank 0 of run {run[:4]} is no longer available" in reply.evalue
        assert "keep_results" in reply.evalue
        assert "[0] said" in reply.text
    finally:
        kernel.close()


def test_a_notebook_short_of_memory_fetches_its_results_later(kernel: Kernel, home: Home):
    kernel.check(
        "import re, resource\nlimits = resource.getrlimit(resource.RLIMIT_AS)\n"
        "used = int(re.search(r'VmSize:\\s+(\\d+)', open('/proc/self/status').read())[1]) * 1024\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 60_000_000, limits[1]))"
    )
    try:
        reply = kernel.run("%%distributed -n 2 --out large:all\nimport numpy as np\nlarge = np.full(25_000_000, rank)")
        assert reply.ename == "SerializationError", reply.story
        run = home.runs[-1]
        assert f"can't take the results of run {run[:4]}, 400.0 MB from 2 ranks" in reply.evalue, reply.story
        assert "The run itself succeeded" in reply.evalue
    finally:
        kernel.check("resource.setrlimit(resource.RLIMIT_AS, limits)")
    kernel.check(f"%sgpu_attach {run[:4]}")
    assert kernel.value("[int(each.sum()) for each in large]") == [0, 25_000_000]
    kernel.check("large = None")


def test_a_failed_run_raises_what_it_raised(kernel: Kernel, home: Home):
    kernel.run("%%distributed -n 2\nprint('before')\nif rank == 1: {}['missing']")
    run = home.runs[-1]
    reply = kernel.run(f"%sgpu_attach {run}")
    assert reply.ename == "KeyError"
    assert "rank 1 of 2" in reply.traceback
    assert "if rank == 1: {}['missing']" in reply.text
    assert "[0] before" in reply.text
    caught = kernel.check(
        f"try:\n    get_ipython().run_line_magic('sgpu_attach', '{run}')\n"
        "except KeyError as error:\n    print('caught', error.args, error.rank, error.run_id)"
    )
    assert f"caught ('missing',) 1 {run}" in caught.text


def test_a_cancelled_run_is_cancelled_here_too(kernel: Kernel, home: Home, word: Word):
    cell, run_id = started(kernel, word.body)
    kernel.interrupt()
    assert cell.wait(10).status == "error"
    reply = kernel.run(f"%sgpu_attach {run_id}")
    assert reply.ename == "RunCancelled"
    assert "interrupted" in reply.evalue


def test_without_a_run_the_one_that_goes_on_is_shown_although_a_newer_one_has_ended(
    kernel: Kernel, home: Home, word: Word
):
    submit_detached(kernel, word.body)
    kernel.check("%%distributed -n 1\npass")
    cell = kernel.start("%sgpu_attach")
    cell.until_shown("[0] first 0")
    word.give()
    assert cell.wait().lines(1) == ["first 1", "last 1"]


def test_two_kernels_follow_one_run_live(kernel: Kernel, neighbour: Kernel, word: Word):
    run = submit_detached(kernel, f"{word.body}value = 7", "--out value")
    cells = [where.start(f"%sgpu_attach {run}") for where in (kernel, neighbour)]
    for cell in cells:
        cell.until_shown("[1] first 1")
    word.give()
    for cell, where in zip(cells, (kernel, neighbour), strict=True):
        reply = cell.wait()
        assert reply.status == "ok", reply.story
        assert reply.lines(0) == ["first 0", "last 0"]
        assert where.value("value") == 7


def test_another_kernel_follows_a_cell_that_blocks_its_own(kernel: Kernel, neighbour: Kernel, word: Word):
    cell, run_id = started(kernel, f"{word.body}value = 8", "--out value")
    watching = neighbour.start(f"%sgpu_attach {run_id[:6]}")
    watching.until_shown("[1] first 1")
    word.give()
    assert cell.wait().lines(0) == ["first 0", "last 0"]
    assert watching.wait().lines(0) == ["first 0", "last 0"]
    assert [kernel.value("value"), neighbour.value("value")] == [8, 8]


def test_an_interrupt_only_stops_the_watching(kernel: Kernel, home: Home, word: Word):
    run = submit_detached(kernel, word.body)
    cell = kernel.start(f"%sgpu_attach {run}")
    later = kernel.start("later = True")
    cell.until_shown("[1] first 1")
    pids = home.rank_pids()
    pressed = time.monotonic()
    kernel.interrupt()
    reply = cell.wait(10)
    assert time.monotonic() - pressed < GRACE_S
    assert reply.status == "ok"
    assert f"stopped watching; run {run[:4]} continues" in reply.text
    assert later.wait().status == "ok"
    assert all(is_alive(pid) for pid in pids)
    word.give()
    assert kernel.check(f"%sgpu_attach {run}").lines(1) == ["first 1", "last 1"]


def test_what_can_not_be_attached_to(kernel: Kernel):
    # four digits can be the first ones of a run that another test has made
    reply = kernel.run("%sgpu_attach ffffffff")
    assert reply.ename == "RunUnknown", reply.story
    assert "ffffffff" in reply.evalue
    assert kernel.run("%sgpu_attach nonsense").ename == "UsageError"
    assert "unrecognized arguments" in kernel.run("%sgpu_attach 7f3a and more").evalue
    assert kernel.run("%sgpu_detach ffffffff").ename == "RunUnknown"


@pytest.mark.slow
def test_a_run_of_an_earlier_pool_is_still_there(new_home: Callable[..., Home]):
    home = new_home()
    kernel = Kernel(home)
    try:
        kernel.check("%%distributed -n 2 --out kept\nprint('old', rank)\nkept = [1, 2]")
        run = home.runs[-1]
        before = home.pool_pid()
        assert before is not None
        os.kill(before, signal.SIGTERM)
        wait_gone(before)
        kernel.check("del kept")
        assert kernel.check(f"%sgpu_attach {run}").lines(1) == ["old 1"]
        assert kernel.value("kept") == [1, 2]
        assert home.pool_pid() != before
    finally:
        kernel.close()


# ------------------------------------------------------------ let go


@pytest.mark.slow
def test_a_run_that_was_detached_later_outlives_its_kernel_and_its_pool_together(
    new_home: Callable[..., Home],
):
    home = new_home()
    first, other = Kernel(home), Kernel(home)
    try:
        word = Word(home, "word")
        _, run_id = started(first, word.body)
        other.check(f"%sgpu_detach {run_id}")
        pool = home.pool_pid()
        assert pool is not None
        os.kill(pool, signal.SIGKILL)
        first.kill()
        wait_gone(pool)
        cell = other.start(f"%sgpu_attach {run_id}")
        cell.until_shown("[1] first 1")
        word.give()
        assert cell.wait().lines(1) == ["first 1", "last 1"]
    finally:
        first.close()
        other.close()


@pytest.mark.slow
def test_detaching_from_another_kernel_frees_the_cell(kernel: Kernel, neighbour: Kernel, home: Home, word: Word):
    cell, run_id = started(kernel, f"{word.body}value = 9", "--out value")
    pids = home.rank_pids()
    asked = time.monotonic()
    assert f"run {run_id[:4]} continues without a notebook" in neighbour.check(f"%sgpu_detach {run_id}").text
    reply = cell.wait(10)
    assert time.monotonic() - asked < GRACE_S
    assert reply.status == "ok"
    assert f"%sgpu_attach {run_id[:4]} shows it and brings value" in reply.text
    assert kernel.check("print('free')").text == "free"
    assert all(is_alive(pid) for pid in pids)
    word.give()
    # the old Detached event in its history does not end the output
    assert kernel.check(f"%sgpu_attach {run_id}").lines(0) == ["first 0", "last 0"]
    assert kernel.value("value") == 9


@pytest.mark.slow
def test_a_detached_runs_memory_is_not_written_again(kernel: Kernel, neighbour: Kernel, home: Home, word: Word):
    """The ranks map what the notebook shipped: the next cell's variables must not appear in it."""
    kernel.check("import numpy as np\ndata = np.zeros(500_000)")
    cell, run_id = started(kernel, f"{word.body}total = float(data.sum())", "--out total")
    neighbour.check(f"%sgpu_detach {run_id}")
    assert cell.wait(10).status == "ok"
    kernel.check("data = np.ones(500_000)")
    kernel.check("%%distributed -n 2 --ui none --out mine\nmine = float(data.sum())")
    assert kernel.value("mine") == 500_000
    word.give()
    kernel.check(f"%sgpu_attach {run_id}")
    assert kernel.value("total") == 0


@pytest.mark.slow
def test_a_run_of_a_blocked_notebook_is_kept_when_it_was_detached_and_the_kernel_dies(
    home: Home, kernel: Kernel, new_kernel: Callable[..., Kernel], word: Word
):
    first = new_kernel()
    cell, run_id = started(first, word.body)
    kernel.check(f"%sgpu_detach {run_id}")
    assert cell.wait(10).status == "ok"
    first.kill()
    word.give()
    assert kernel.check(f"%sgpu_attach {run_id}").lines(1) == ["first 1", "last 1"]


# ------------------------------------------------------------ restart


@pytest.fixture(scope="module")
def detaching(home: Home) -> Iterator[Kernel]:
    """A kernel whose runs go on when it is restarted."""
    made = Kernel(home, variables={"SGPU_DETACH_ON_RESTART": "1"})
    yield made
    made.close()


@pytest.mark.slow
def test_runs_go_on_when_the_kernel_is_restarted_and_the_setting_says_so(
    home: Home, kernel: Kernel, detaching: Kernel, word: Word
):
    first = detaching
    started(first, f"{word.body}value = 10", "--out value")
    pids = home.rank_pids()
    first.restart()
    assert all(is_alive(pid) for pid in pids)
    first.check("%load_ext sgpu_magic")
    cell = first.start("%sgpu_attach")
    cell.until_shown("[1] first 1")
    word.give()
    reply = cell.wait()
    assert reply.lines(0) == ["first 0", "last 0"], reply.story
    assert first.value("value") == 10


@pytest.mark.slow
def test_runs_end_when_the_kernel_is_restarted_without_it(
    home: Home, kernel: Kernel, new_kernel: Callable[..., Kernel], word: Word
):
    first = new_kernel()
    started(first, word.body)
    pids = home.rank_pids()
    first.restart()
    eventually(lambda: not any(is_alive(pid) for pid in pids), 8, "the ranks are gone")


def test_an_interrupt_is_still_one_when_restarts_detach(home: Home, detaching: Kernel, word: Word):
    cell, _ = started(detaching, word.body)
    pressed = time.monotonic()
    detaching.interrupt()
    assert cell.wait(10).ename == "RunCancelled"
    assert time.monotonic() - pressed < GRACE_S
    detaching.check("%unload_ext sgpu_magic\n%load_ext sgpu_magic")


# ------------------------------------------------------------ the pool dies


def kill_pool(home: Home) -> int:
    pid = home.pool_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.mark.slow
def test_a_queued_cell_goes_on_when_its_pool_is_killed(new_home: Callable[..., Home]):
    home = new_home({"SGPU_CPU_SLOTS": "2"})
    holder, kernel = Kernel(home), Kernel(home)
    try:
        word = Word(home, "word")
        kernel.check("import numpy as np\ndata = np.ones(300_000)")
        holding, _ = started(holder, word.body)
        cell = kernel.start(
            "%%distributed -n 2 --out value\nprint('at last', rank, flush=True)\nvalue = float(data.sum())"
        )
        cell.until_shown("position 1")
        killed = kill_pool(home)
        cell.until(lambda: home.pool_pid() not in (None, killed), 20, "there is another pool")
        word.give()
        assert holding.wait().lines(0) == ["first 0", "last 0"]
        reply = cell.wait()
        assert reply.status == "ok", reply.story
        assert reply.lines(1) == ["at last 1"]
        assert kernel.value("value") == 300_000
    finally:
        holder.close()
        kernel.close()


@pytest.mark.slow
def test_an_interrupt_frees_a_cell_whose_pool_was_killed(new_home: Callable[..., Home]):
    home = new_home()
    kernel = Kernel(home)
    try:
        cell, _ = started(kernel, Word(home, "never").body)
        pids = home.rank_pids()
        kill_pool(home)
        pressed = time.monotonic()
        kernel.interrupt()
        reply = cell.wait(10)
        assert time.monotonic() - pressed < GRACE_S
        assert reply.ename == "RunCancelled", reply.story
        eventually(lambda: not any(is_alive(pid) for pid in pids), 15, "the ranks are gone")
    finally:
        kernel.close()


# ------------------------------------------------------------ notices


@pytest.mark.slow
def test_a_detached_run_outlives_its_kernel_and_its_pool_together(new_home: Callable[..., Home]):
    """No client is left to start the next pool service: the agent does."""
    home = new_home()
    kernel = Kernel(home)
    word = Word(home, "both")
    before = set(home.runs)
    submit_detached(kernel, f"{word.body}\nx = rank + 41", "--out x")
    (run_id,) = set(home.runs) - before
    eventually(lambda: "first" in _log(home, run_id), 20, "the run's first line")
    ranks = set(home.rank_pids())
    kernel.kill()
    first = kill_pool(home)
    second = eventually(lambda: home.pool_pid() not in (None, first) and home.pool_pid(), 10, "the next pool")
    assert set(home.rank_pids()) == ranks
    agents = home.agent_pids()
    another = Kernel(home)
    try:
        cell = another.start("%sgpu_attach")
        cell.until_shown("[0] first 0")
        word.give()
        assert cell.wait(20).status == "ok", cell.reply.story
        assert (cell.reply.lines(1), another.value("x")) == (["first 1", "last 1"], 41)
        assert home.pool_pid() == second
        # the new service is not the agent's child; the agent ends with it
        another.check(f"!{sys.executable} -m sgpu_magic.cli pool stop --force")
        eventually(lambda: not any(map(is_alive, [second, *agents])), 10, "pool and agent end")
    finally:
        another.close()
        kernel.close()


def _log(home: Home, run_id: str) -> str:
    path = home.run_dir(run_id) / "rank-0.log"
    return path.read_text() if path.exists() else ""


@pytest.mark.slow
def test_a_notice_of_the_pool_is_shown_and_taken_back(new_home: Callable[..., Home]):
    home = new_home({"SGPU_POOL_IDLE_S": "8"})
    kernel = Kernel(home)
    try:
        kernel.check("%%distributed -n 1 --ui none\npass")
        cell = kernel.start("import time; time.sleep(600)")
        cell.until_shown("ends its processes in")
        # a client uses the pool
        subprocess.run([sys.executable, "-m", "sgpu_magic.cli", "pool", "status"], env=home.environ, check=True)
        cell.until(lambda: "ends its processes" not in cell.reply.text + cell.reply.html, 10, "it is taken back")
        kernel.interrupt()
        cell.wait(10)
        assert "idle: ends its processes in" in kernel.check("%sgpu_status").text
    finally:
        kernel.close()


@pytest.mark.slow
def test_a_run_that_is_not_accepted_yet_is_followed_from_its_beginning(
    new_home: Callable[..., Home], nvml_stub: Callable[..., dict[str, str]]
):
    """It is accepted when its node has said which GPUs are free; until then it has no log that could be read."""
    home = new_home(nvml_stub(devices=nvml.a10s(1)))
    client, other = PoolClient(home), PoolClient(home)
    begun: list[FollowedRun] = []
    try:
        client.begin("pass", ranks=1, device_type="cpu").ended()
        bystander = client.begin(UNTIL_TOLD.format(name=str(home.work / "word")), ranks=1, device_type="cpu")
        bystander.wait_for(RanksStarted)
        pool, (agent,) = home.pool_pid(), home.agent_pids()
        # let the cached GPU readings expire
        ended_at = time.monotonic()
        eventually(lambda: time.monotonic() - ended_at > 2.5, 10)
        run_id = new_id()
        submit = threading.Thread(
            target=lambda: begun.append(client.begin("print('whole')", ranks=1, device_type="cpu", run_id=run_id))
        )
        os.kill(agent, signal.SIGSTOP)
        try:
            submit.start()

            def attached() -> tuple[ClientRun, RunState] | None:
                try:
                    return other.pool.attach(run_id)
                except RunUnknown:
                    return None

            found, state = eventually(attached, 10, "the pool does not know the run")
            assert state is RunState.QUEUED
            assert not (home.state / "runs" / run_id).exists()
            assert begun == []
        finally:
            os.kill(agent, signal.SIGCONT)
        follower = FollowedRun(other, found)
        for run in (follower, *(submit.join(30) or begun)):
            assert run.ended(60).state is RunState.SUCCEEDED
            assert run.printed == {0: "whole\n"}
            kinds = [type(event) for event in run.events]
            assert (kinds[0], kinds[-1], kinds.count(Submitted)) == (Submitted, RunEnded, 1)
        assert [type(event) for event in follower.events] == [type(event) for event in begun[0].events]
        (home.work / "word").touch()
        assert bystander.ended().state is RunState.SUCCEEDED
        assert home.pool_pid() == pool
        assert f"the events of run {run_id} can't be read" not in (home.state / "pool.log").read_text()
    finally:
        other.close()
        client.close()
