"""Runs whose packages their node has to make first: on the way, while waiting, stopped, failed, after deaths."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from builds import environment_of
from homes import Home
from pool_client import PATIENCE_S, FollowedRun, PoolClient
from process_table import stop_process
from small_index import SmallIndex
from waiting import eventually

from sgpu_magic.client.run import Attachments
from sgpu_magic.client.this_machine import this_owner
from sgpu_magic.packages.node.store import BuiltEnvironments
from sgpu_magic.pool.scheduling import stimuli as sched
from sgpu_magic.pool.scheduling.run import ScheduledRun
from sgpu_magic.pool.scheduling.scheduler import Scheduler
from sgpu_magic.wire.attachments import Environment
from sgpu_magic.wire.base import FailureKind, RunKind, RunState
from sgpu_magic.wire.devices import Inventory, Placement
from sgpu_magic.wire.events import EnvironmentMoved, Placed, QueueMoved, RanksStarted, RunEnded, StateChanged
from sgpu_magic.wire.run import CellSource, RunSpec

pytestmark = pytest.mark.slow

SHOW = """
import sys, tinyone
print(tinyone.__version__, sys.prefix, flush=True)
"""


@pytest.fixture(scope="module")
def index() -> Iterator[SmallIndex]:
    made = SmallIndex()
    for version in range(1, 20):
        made.add("tinyone", f"{version}.0")
    yield made
    made.close()


@pytest.fixture(scope="module")
def home(index: SmallIndex) -> Iterator[Home]:
    """A pool that builds whatever it is asked for, from the test's own index."""
    made = Home({"SGPU_ENVIRONMENTS": "built", "SGPU_INDEX_URL": index.url, "SGPU_CPU_SLOTS": "4"})
    made.environ |= {"UV_CACHE_DIR": str(made.path / "uv-cache"), "UV_HTTP_RETRIES": "0"}
    yield made
    index.open.set()
    made.close()


@pytest.fixture(scope="module")
def client(home: Home) -> Iterator[PoolClient]:
    made = PoolClient(home)
    # start as many zygotes as are allowed, so that the agent's level does not grow in later tests
    for run in [begin(made, tiny(version)) for version in (18, 19, 1)]:
        run.ended()
    begin(made, tiny(1)).ended()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def index_is_open(index: SmallIndex) -> Iterator[None]:
    yield
    index.open.set()


def tiny(version: int, **fields: Any) -> Environment:
    return environment_of(f"tinyone=={version}.0", **fields)


def begin(client: PoolClient, environment: Environment, body: str = SHOW, **fields: Any) -> FollowedRun:
    return client.begin(body, along=Attachments(environment=environment), **fields)


def states(run: FollowedRun) -> list[RunState]:
    return [event.state for event in run.events if isinstance(event, StateChanged)]


def moves(run: FollowedRun) -> list[EnvironmentMoved]:
    return [event for event in run.events if isinstance(event, EnvironmentMoved)]


def builders(home: Home) -> list[int]:
    """Processes that build, and those that they have started."""
    marks = ("sgpu_magic.packages.node ", "/bin/uv ", "compileall")
    return [pid for pid, process in home.processes().items() if any(mark in process.command for mark in marks)]


def wait_for_build(home: Home, index: SmallIndex, asked: int) -> None:
    """Until uv waits for the index."""
    eventually(lambda: len(index.asked) > asked, 30, "uv's first question")
    assert builders(home)


def nothing_is_begun(home: Home) -> None:
    """No builder is left, and no folder is half built."""
    eventually(lambda: not builders(home), 10, lambda: f"builders go on: {builders(home)}")
    root = home.state / "environments"
    left = [entry.name for entry in root.iterdir() if entry.name.startswith(".")]
    assert left == []


@pytest.mark.slow
def test_packages_are_made_once_and_then_there(client: PoolClient, home: Home):
    run = begin(client, tiny(2))
    assert run.ended().state is RunState.SUCCEEDED
    version, prefix = run.printed[0].split()
    assert version == "2.0"
    assert prefix.startswith(str(home.state / "environments"))
    assert states(run) == [RunState.PREPARING, RunState.STARTING, RunState.RUNNING]
    *steps, ready = moves(run)
    assert {move.step for move in steps} <= {"resolving", "downloading", "installing"}
    assert (ready.ready, ready.built, ready.packages) == (True, True, 1)
    again = begin(client, tiny(2))
    assert again.ended().state is RunState.SUCCEEDED
    (there,) = moves(again)
    assert (there.ready, there.built) == (True, False)
    assert states(again) == [RunState.PREPARING, RunState.STARTING, RunState.RUNNING]


def test_a_run_finds_its_packages_in_a_fraction_of_its_launch(client: PoolClient, home: Home):
    fractions: list[float] = []
    for _ in range(5):
        run = begin(client, tiny(1))
        run.ended()
        at = {type(event.body): event.at for event in events_of(home, run.run_id)}
        fractions.append((at[EnvironmentMoved] - at[Placed]) / (at[RanksStarted] - at[Placed]))
    assert min(fractions) < 0.5, fractions


def events_of(home: Home, run_id: str) -> list[Any]:
    from sgpu_magic.files.run_directory import EventFile

    return [event for event, _ in EventFile(home.run_dir(run_id)).new_events()]


def test_what_travels_goes_over_the_kernels_own_place(client: PoolClient):
    body = "import os, sys; print(os.environ['VIRTUAL_ENV'] == sys.prefix, os.environ['PATH'].split(':')[0])"
    run = begin(client, tiny(1), body + "\nprint([p for p in sys.path if 'site-packages' in p], sys.executable)")
    run.ended()
    first, second = run.printed[0].splitlines()
    inside, programs = first.split()
    assert inside == "True"
    assert programs.endswith("/venv/bin")
    assert second.startswith(f"['{programs.removesuffix('/bin')}/lib/")
    assert second.count("site-packages") == 1
    assert second.endswith(f"{programs}/python")


def test_packages_are_made_while_the_run_waits(client: PoolClient, home: Home):
    holder = client.begin(along=Attachments(environment=tiny(1)), body="import time; time.sleep(60)", ranks=3)
    holder.wait_for(RanksStarted)
    store = BuiltEnvironments(home.state / "environments")
    before = len(store.names())
    run = begin(client, tiny(3))
    run.wait_for(QueueMoved)
    eventually(lambda: len(store.names()) > before, 20, "an environment, built in the queue")
    assert states(run) == []
    holder.run.cancel("interrupted")
    assert run.ended().state is RunState.SUCCEEDED
    (there,) = moves(run)
    assert there.built is False
    assert run.printed[0].startswith("3.0 ")


@pytest.mark.slow
def test_a_run_that_leaves_the_queue_leaves_no_build(client: PoolClient, home: Home, index: SmallIndex):
    holder = client.begin(along=Attachments(environment=tiny(1)), body="import time; time.sleep(60)", ranks=3)
    holder.wait_for(RanksStarted)
    index.hold()
    asked = len(index.asked)
    run = begin(client, tiny(4))
    run.wait_for(QueueMoved)
    wait_for_build(home, index, asked)
    run.run.cancel("interrupted")
    assert run.ended().state is RunState.CANCELLED
    nothing_is_begun(home)
    holder.run.cancel("interrupted")
    holder.ended()


@pytest.mark.slow
def test_a_run_is_cancelled_while_its_packages_are_made(client: PoolClient, home: Home, index: SmallIndex):
    index.hold()
    asked = len(index.asked)
    run = begin(client, tiny(5))
    other = begin(client, tiny(5))
    wait_for_build(home, index, asked)
    run.wait_for(EnvironmentMoved)
    run.run.cancel("interrupted")
    ended = run.ended()
    assert (ended.state, ended.reason) == (RunState.CANCELLED, "interrupted")
    # another run still waits for the environment
    assert builders(home)
    other.run.cancel("interrupted")
    assert other.ended().state is RunState.CANCELLED
    nothing_is_begun(home)
    index.open.set()
    again = begin(client, tiny(5))
    assert again.ended().state is RunState.SUCCEEDED
    assert again.printed[0].startswith("5.0 ")


def test_the_time_limit_counts_from_the_start():
    spec = RunSpec(
        run_id="0" * 8,
        name="cell",
        cell=CellSource(body=""),
        placement=Placement(ranks=1),
        outputs=(),
        owner=this_owner(),
        timeout_s=10.0,
    )
    scheduler = Scheduler(Inventory(host="here", cpu_slots=2))
    assert any(
        isinstance(one, sched.LaunchRun) for one in scheduler.handle(sched.RunSubmitted(ScheduledRun(spec)), 0.0)
    )
    scheduler.handle(sched.RunMoved(spec.run_id, RunState.PREPARING), 0.0)
    assert not any(isinstance(one, sched.StopRun) for one in scheduler.handle(sched.TimePassed(), 1000.0))
    scheduler.handle(sched.RunMoved(spec.run_id, RunState.STARTING), 1000.0)
    assert scheduler.next_deadline() == 1010.0
    assert any(isinstance(one, sched.StopRun) for one in scheduler.handle(sched.TimePassed(), 1010.0))


def test_packages_that_can_not_be_had_are_an_environment_failure(client: PoolClient, home: Home):
    run = begin(client, environment_of("tinyone==99.0"))
    ended = run.ended()
    assert ended.state is RunState.FAILED
    assert ended.failure is not None
    assert ended.failure.kind is FailureKind.ENVIRONMENT
    assert "there is no version of tinyone==99.0" in ended.failure.message
    assert ended.failure.host
    nothing_is_begun(home)


@pytest.mark.slow
def test_a_session_has_its_packages_and_fresh_runs_beside_it_too(client: PoolClient):
    session = client.connect(along=Attachments(environment=tiny(7)))
    try:
        prepared = [event.state for event in session.run.events if isinstance(event, StateChanged)]
        assert prepared[:2] == [RunState.PREPARING, RunState.STARTING]
        first = session.do(SHOW + "kept = 5")
        assert first.printed[0].startswith("7.0 ")
        assert moves(first) == []
        second = session.do("import os; print(kept, tinyone.__version__, os.environ['VIRTUAL_ENV'] == sys.prefix)")
        assert second.printed[0].split() == ["5", "7.0", "True"]
        fresh = session.do(SHOW, fresh=True, along=Attachments(environment=tiny(7)))
        assert fresh.printed[0].startswith("7.0 ")
    finally:
        session.end()


@pytest.mark.slow
def test_a_session_is_ended_while_its_packages_are_made(client: PoolClient, home: Home, index: SmallIndex):
    index.hold()
    asked = len(index.asked)
    session = client.begin(ranks=2, kind=RunKind.SESSION, name="work", along=Attachments(environment=tiny(8)))
    wait_for_build(home, index, asked)
    session.run.cancel("%sgpu_disconnect")
    assert session.ended().state is RunState.CANCELLED
    nothing_is_begun(home)


@pytest.mark.slow
@pytest.mark.parametrize("mark", ["sgpu_magic.packages.node ", "/bin/uv "])
def test_a_build_that_is_killed(client: PoolClient, home: Home, index: SmallIndex, mark: str):
    version = 9 if mark == "/bin/uv " else 10
    index.hold()
    asked = len(index.asked)
    run = begin(client, tiny(version))
    wait_for_build(home, index, asked)
    (pid,) = [pid for pid, process in home.processes().items() if mark in process.command]
    os.kill(pid, signal.SIGKILL)
    if mark == "/bin/uv ":
        ended = run.ended()
        assert ended.failure is not None
        assert "killed by signal 9" in ended.failure.message
    else:
        # killed by a user or the system: another builder replaces it
        eventually(lambda: [p for p in builders(home) if p != pid], 20, "another builder")
        index.open.set()
        assert run.ended().state is RunState.SUCCEEDED
    index.open.set()
    nothing_is_begun(home)


@pytest.mark.slow
def test_a_run_goes_on_when_the_pool_is_killed_while_its_packages_are_made(
    client: PoolClient, home: Home, index: SmallIndex
):
    index.hold()
    asked = len(index.asked)
    run = begin(client, tiny(12), detach=True)
    wait_for_build(home, index, asked)
    run.wait_for(EnvironmentMoved)
    pool = home.pool_pid()
    assert pool is not None
    stop_process(pool, signal.SIGKILL, 10)
    eventually(lambda: client_again(client, run), PATIENCE_S, "the pool's successor")
    index.open.set()
    assert run.ended().state is RunState.SUCCEEDED
    assert run.printed[0].startswith("12.0 ")
    eventually(lambda: home.ledger()[run.run_id].state == "succeeded", 10, "the ledger's word")


def client_again(client: PoolClient, run: FollowedRun) -> bool:
    client.find_again(run.run)
    return True


@pytest.mark.slow
def test_a_group_that_is_started_again_has_its_packages(client: PoolClient):
    body = "import os, tinyone\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os._exit(3)\n" + SHOW
    run = begin(client, tiny(13), body, retries=1)
    assert run.ended().state is RunState.SUCCEEDED
    # gloo may have reported on the first attempt that its peer has gone
    assert run.printed[0].splitlines()[-1].startswith("13.0 ")


@pytest.mark.slow
def test_the_agent_dies_while_it_builds(client: PoolClient, home: Home, index: SmallIndex):
    index.hold()
    asked = len(index.asked)
    run = begin(client, tiny(11))
    wait_for_build(home, index, asked)
    began = builders(home)
    (agent,) = home.agent_pids()
    os.kill(agent, signal.SIGKILL)
    ended = run.ended()
    assert ended.failure is not None
    assert ended.failure.kind is FailureKind.NODE_LOST
    eventually(lambda: not set(began) & set(builders(home)), 10, "builders without their agent")
    index.open.set()
    again = begin(client, tiny(11))
    assert again.ended().state is RunState.SUCCEEDED
    nothing_is_begun(home)


@pytest.mark.slow
def test_a_node_with_the_kernels_own_environment_does_nothing(new_home: Callable[..., Home]):
    home = new_home()
    client = PoolClient(home)
    try:
        run = client.begin("import sys; print(sys.executable)", along=Attachments(environment=tiny(1)))
        run.ended()
        assert moves(run) == []
        assert RunState.PREPARING not in states(run)
        assert not (home.state / "environments").exists()
        # other packages than its own are built even there
        other = client.begin("pass", along=Attachments(environment=environment_of("x", own=False, conda=("mkl",))))
        assert other.ended().failure is not None
        assert isinstance(other.ended(), RunEnded)
    finally:
        client.close()
