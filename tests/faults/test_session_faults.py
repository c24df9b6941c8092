"""Sessions under the faults that runs survive: who is killed, what goes on, what is said, and that nothing is left."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from kernels import Cell, Home, Kernel, eventually
from strikes import all_gone, command, kill, pid_of, ranks_of

HOME_VARIABLES = {"SGPU_ADOPT_TIMEOUT_S": "8", "SGPU_GRACE_S": "1"}
RANKS = 2
_SOON_S = 15.0
_numbers = itertools.count(1)
TRAINING = """%%distributed
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(2, 1))
kept = rank + 1"""
PROOF = """%%distributed
model(torch.ones(1, 2)).sum().backward()
print("kept", kept)"""
WAITS = """%%distributed --name {name}
import pathlib, time
print("in", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.02)
print("out")"""


class Connected:
    """A notebook with a session in which something was done.

    Args:
        kernel: The notebook's.
        home: Its home.
        work: What was done.
    """

    def __init__(self, kernel: Kernel, home: Home, work: str = "%%distributed\nkept = rank + 1") -> None:
        self.kernel = kernel
        self.home = home
        (home.work / "go").unlink(missing_ok=True)
        self.name = f"work-{next(_numbers)}"
        kernel.check(f"%sgpu_connect --gpus {RANKS} --name {self.name} --ui none")
        kernel.check(work)
        self.run_id = home.run_named(self.name)
        self.ranks = ranks_of(home, self.run_id)
        assert len(self.ranks) == RANKS

    def start_waiting(self) -> tuple[Cell, str]:
        """Start a cell that waits until it may go on; return it and its run when both ranks are in it."""
        name = f"waits-{next(_numbers)}"
        cell = self.kernel.start(WAITS.format(name=name))
        run_id = eventually(lambda: self.home.run_named(name), _SOON_S, "the cell's run")
        for rank in range(RANKS):
            eventually(lambda: "in" in self.home.log(run_id, rank), _SOON_S, "the cell's first line")  # noqa: B023
        return cell, run_id

    def continues(self) -> None:
        """Its ranks are the same processes and have what they had in `TRAINING`."""
        reply = self.kernel.check(PROOF)
        assert [reply.lines(rank) for rank in range(RANKS)] == [["kept 1"], ["kept 2"]], reply.story

    def is_lost(self) -> None:
        """The next cell says so in one paragraph, and the one after it runs on ranks of its own."""
        all_gone(self.ranks, _SOON_S)
        reply = self.kernel.run("%%distributed\nprint(rank)")
        if reply.ename in ("NodeLost", "WorkerDied"):
            # the cell was on its way to the ranks when they were lost
            reply = self.kernel.run("%%distributed\nprint(rank)")
        assert (reply.status, reply.ename) == ("error", "SessionError"), reply.story
        assert self.name in reply.evalue, reply.story
        assert "%sgpu_connect" in reply.evalue, reply.story
        own = self.kernel.check(f"%%distributed -n {RANKS}\nprint('own', rank)")
        assert own.lines(1) == ["own 1"], own.story

    def disconnect(self) -> None:
        self.kernel.check("%sgpu_disconnect")
        all_gone(self.ranks, _SOON_S)


@pytest.fixture
def connected(kernel: Kernel, home: Home) -> Iterator[Connected]:
    """A session of the home's kernel."""
    yield Connected(kernel, home)
    (home.work / "go").touch()


@pytest.fixture
def trained(kernel: Kernel, home: Home) -> Iterator[Connected]:
    """One in which a model lies in its ranks' group."""
    yield Connected(kernel, home, TRAINING)
    (home.work / "go").touch()


@pytest.fixture
def mortal(new_kernel: Callable[..., Kernel], home: Home) -> Iterator[Connected]:
    """One of a kernel that may end."""
    yield Connected(new_kernel(), home)
    (home.work / "go").touch()


@pytest.mark.slow
def test_a_killed_pool_service_costs_a_session_nothing(trained: Connected):
    kill(pid_of(trained.home, "pool"))
    trained.continues()
    trained.disconnect()


def test_a_cell_goes_on_while_the_pool_service_is_killed(trained: Connected):
    cell, _ = trained.start_waiting()
    before = pid_of(trained.home, "pool")
    kill(before)
    eventually(lambda: trained.home.pool_pid() not in (None, before), _SOON_S, "the next pool service")
    (trained.home.work / "go").touch()
    reply = cell.wait(_SOON_S)
    assert reply.status == "ok", reply.story
    assert reply.lines(0) == ["in", "out"]
    trained.continues()
    trained.disconnect()


@pytest.mark.slow
@pytest.mark.parametrize("role", ["agent", "zygote"])
def test_who_holds_the_ranks_takes_the_session_along_and_the_next_cell_says_so(connected: Connected, role: str):
    kill(pid_of(connected.home, role))
    connected.is_lost()


@pytest.mark.slow
def test_pool_service_and_agent_killed_together_end_the_session(connected: Connected):
    kill(pid_of(connected.home, "pool"), pid_of(connected.home, "agent"))
    connected.is_lost()


@pytest.mark.slow
def test_a_killed_agent_ends_the_cell_that_runs(connected: Connected):
    cell, _ = connected.start_waiting()
    kill(pid_of(connected.home, "agent"))
    reply = cell.wait(_SOON_S)
    assert (reply.status, reply.ename) == ("error", "NodeLost"), reply.story
    connected.is_lost()


@pytest.mark.parametrize(
    "busy", [pytest.param(False, id="idle", marks=pytest.mark.slow), pytest.param(True, id="in a cell")]
)
def test_a_killed_kernel_leaves_no_rank_and_no_lease(mortal: Connected, busy: bool):
    if busy:
        mortal.start_waiting()
    mortal.kernel.kill()
    all_gone(mortal.ranks, _SOON_S)
    eventually(
        lambda: mortal.home.ledger()[mortal.run_id].state == "cancelled",
        _SOON_S,
        lambda: str(mortal.home.ledger()[mortal.run_id]),
    )


def test_a_restarted_kernel_ends_its_session(mortal: Connected):
    mortal.kernel.restart()
    all_gone(mortal.ranks, _SOON_S)
    assert mortal.home.ledger()[mortal.run_id].state == "cancelled"


@pytest.mark.slow
def test_kernel_and_pool_service_killed_together_leave_nothing(mortal: Connected):
    pool = pid_of(mortal.home, "pool")
    mortal.kernel.kill()
    kill(pool)
    # no client is left for the session, so the agent ends with it
    all_gone(mortal.ranks, _SOON_S)
    eventually(lambda: not mortal.home.agent_pids(), _SOON_S, "the agent's end")


@pytest.mark.slow
def test_the_pool_that_is_stopped_by_force_ends_the_session(connected: Connected):
    command(connected.home, "pool", "stop", "--force")
    connected.is_lost()
