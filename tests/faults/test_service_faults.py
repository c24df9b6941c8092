"""A fault of the pool service costs at most the run or answer that it belongs to; else the next service takes over."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from homes import Home
from planted_faults import Callback, at
from pool_client import FollowedRun, PoolClient
from pool_faults import Plants
from served_pools import ServedPool
from waiting import eventually

from sgpu_magic.errors import InternalError, PoolError
from sgpu_magic.nodes.engine import Engine
from sgpu_magic.pool.active_runs import ActiveRuns
from sgpu_magic.pool.billing import Billing
from sgpu_magic.pool.instructions import LaunchHandler
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.reports import Reports
from sgpu_magic.pool.requests import Requests
from sgpu_magic.pool.scheduling.scheduler import Scheduler
from sgpu_magic.pool.scheduling.stimuli import RunSubmitted
from sgpu_magic.pool.status import StatusReports
from sgpu_magic.pool.submissions import Submissions
from sgpu_magic.pool.tracker import Tracker
from sgpu_magic.wire.base import FailureKind, RunState
from sgpu_magic.wire.client import AskStacks, AskStatus, Attach, Cancel, Detach
from sgpu_magic.wire.events import RanksStarted, RunEnded
from sgpu_magic.wire.rank_events import OutputWritten

# ends when its file exists, and prints a line when another one does
WAITS = """
import os, time
print('here', flush=True)
while not os.path.exists({go!r}):
    time.sleep(0.01)
    if os.path.exists({go!r} + '.say'):
        os.remove({go!r} + '.say')
        print('goes on', flush=True)
print('done')
"""
PRINTED = re.compile(r"here\n(goes on\n)*done\n")
# a service that sends a malformed order to start a run of this name
DAMAGES = """
import importlib.abc, importlib.util, sys


class Damage(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "sgpu_magic.nodes.local":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def damage(module):
            execute(module)
            send = module.LocalAgent.send

            def damaged(self, message, *rest):
                if getattr(getattr(message, "spec", None), "name", "") == "unreadable":
                    message = module.msgspec.structs.replace(message, attempt="first")
                send(self, message, *rest)

            module.LocalAgent.send = damaged

        spec.loader.exec_module = damage
        return spec


sys.meta_path.insert(0, Damage())
"""
SAYS = "an internal error in the pool service (RuntimeError: planted)"


@dataclass
class Scene:
    """A pool with a run that goes on beside the one that is struck.

    Attributes:
        bystander: It ends when `release` is called.
        victim: The run that was begun for the fault, None where none is.
    """

    home: Home
    client: PoolClient
    plants: Plants
    bystander: FollowedRun
    victim: FollowedRun | None = None

    def begin(self, name: str) -> FollowedRun:
        run = self.client.begin(WAITS.format(go=str(self.home.work / name)), ranks=1)
        run.wait_for(OutputWritten)
        return run

    def release(self, name: str) -> None:
        (self.home.work / name).touch()


def let_speak(home: Home, name: str) -> None:
    """Make a run print something, so that the service receives it at once."""
    (home.work / f"{name}.say").touch()


# ---------------------------------------------------------------- faults and their effects


def running(scene: Scene, callback: Callback) -> None:
    """A fault in handling a running run's message ends that run."""
    scene.victim = scene.begin("victim")
    scene.plants.arm(callback, scene.victim.run_id)
    scene.release("victim")
    _ended_of_it(scene.victim)


def over(scene: Scene, callback: Callback) -> None:
    """The run has ended; only its devices are still to be given back."""
    scene.victim = scene.begin("victim")
    scene.plants.arm(callback, scene.victim.run_id)
    scene.release("victim")
    assert scene.victim.ended().state is RunState.SUCCEEDED


def starting(scene: Scene, callback: Callback) -> None:
    """The run is refused, or ends at once."""
    scene.plants.arm(callback)
    text = ""
    try:
        scene.victim = scene.client.begin("print(1)", ranks=1)
    except InternalError as error:
        text = error.message
    if scene.victim is not None:
        _ended_of_it(scene.victim)
    else:
        assert SAYS in text


def harmless(scene: Scene, callback: Callback) -> None:
    """What fails is no run's."""
    scene.plants.arm(callback)
    scene.victim = scene.client.begin("print(1)", ranks=1)
    assert scene.victim.ended().state is RunState.SUCCEEDED


def asked(scene: Scene, callback: Callback) -> None:
    """The client that sent the request gets the error."""
    run_id = scene.bystander.run_id
    ask: dict[type | None, Callable[[], object]] = {
        Attach: lambda: scene.client.pool.attach(run_id),
        Cancel: lambda: scene.client.pool.cancel(run_id, "test"),
        Detach: lambda: scene.client.pool.detach(run_id),
        AskStacks: lambda: scene.client.pool.stacks(run_id),
        AskStatus: scene.client.pool.status,
    }
    scene.plants.arm(callback)
    with pytest.raises(InternalError, match="planted"):
        ask[callback.message]()


def unasked(scene: Scene, callback: Callback) -> None:
    """Another client sends something or disconnects: no error is shown."""
    other = PoolClient(scene.home)
    other.pool.status()
    scene.plants.arm(callback)
    other.close()


def _is_not_new(client: PoolClient) -> None:
    """Wait until the service is so old that a fault lets it be followed by another one without a fault."""
    eventually(lambda: time.time() - client.pool.status().started_at > 6, 10)


def leaves(scene: Scene, callback: Callback) -> None:
    """It belongs to no run: the next service takes all of them over."""
    old = scene.home.pool_pid()
    _is_not_new(scene.client)
    scene.plants.arm(callback)
    session = scene.client.connect(1) if callback == at(Ledger.write) else None
    if session is not None:
        session.begin("1 + 1")
    let_speak(scene.home, "bystander")
    scene.plants.struck(callback)
    for run in [scene.bystander, *([] if session is None else [session.run])]:
        scene.client.find_again(run.run)
    eventually(lambda: scene.home.pool_pid() not in (None, old), 20, "no other service came")
    assert scene.client.begin("print(1)", ranks=1).ended().state is RunState.SUCCEEDED
    if session is not None:
        session.end()


PLANTS: list[tuple[Callback, Callable[[Scene, Callback], None]]] = [
    (at(Reports.on_run_event), running),
    (at(ActiveRuns.publish), running),
    (at(Billing.ended), running),
    (at(Reports.ranks_exited), over),
    (at(ActiveRuns.ranks_exited), over),
    (at(Submissions.submit), starting),
    (at(Scheduler.handle, RunSubmitted), starting),
    (at(ActiveRuns.accept), starting),
    (at(ActiveRuns.record_placed), starting),
    (at(ActiveRuns.move), starting),
    (at(LaunchHandler.order), starting),
    (at(LaunchHandler.launched), starting),
    (at(Tracker.follow), starting),
    (at(Requests.on_message, Attach), asked),
    (at(Requests.on_message, Cancel), asked),
    (at(Requests.on_message, Detach), asked),
    (at(Requests.on_message, AskStacks), asked),
    (at(StatusReports.answer, AskStatus), asked),
    (at(Requests.on_client_disconnect), unasked),
    (at(Engine.events_kept), leaves),
    (at(Ledger.write), leaves),
]
_IN_SHORT = {
    at(Reports.on_run_event),
    at(LaunchHandler.order),
    at(Engine.events_kept),
}


def _ended_of_it(run: FollowedRun) -> None:
    ended = run.ended()
    assert (ended.state, ended.failure and ended.failure.kind) == (RunState.FAILED, FailureKind.INTERNAL)
    assert ended.failure is not None
    assert SAYS in ended.failure.message
    assert "its log is" in ended.failure.message


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Home, PoolClient, Plants]]:
    plants = Plants(Path(tmp_path_factory.mktemp("plants")), [callback for callback, _ in PLANTS])
    home = Home({"PYTHONPATH": str(plants.folder), "SGPU_CPU_SLOTS": "8"})
    client = PoolClient(home)
    yield home, client, plants
    client.close()
    log = home.state / "pool.log"
    # the planted faults are expected
    log.write_text(log.read_text().replace("Traceback (most recent call last)", "a planted fault"))
    home.close()


@pytest.mark.parametrize(
    ("callback", "cost"),
    [
        pytest.param(callback, cost, id=str(callback), marks=[] if callback in _IN_SHORT else [pytest.mark.slow])
        for callback, cost in PLANTS
    ],
)
def test_a_fault_costs_at_most_what_it_belongs_to(
    scene: tuple[Home, PoolClient, Plants], callback: Callback, cost: Callable[[Scene, Callback], None]
):
    home, client, plants = scene
    for name in ("victim", "bystander"):
        (home.work / name).unlink(missing_ok=True)
    bystander = client.begin(WAITS.format(go=str(home.work / "bystander")), ranks=1)
    bystander.wait_for(OutputWritten)
    pool, agents = home.pool_pid(), home.agent_pids()
    stage = Scene(home, client, plants, bystander)
    cost(stage, callback)
    plants.struck(callback)
    if cost is not leaves:
        assert home.pool_pid() == pool
    assert home.agent_pids() == agents
    stage.release("bystander")
    ended = bystander.ended()
    assert ended.state is RunState.SUCCEEDED
    assert PRINTED.fullmatch(bystander.printed[0])
    assert len([event for event in bystander.events if isinstance(event, RanksStarted | RunEnded)]) == 2
    # its devices are free again
    eventually(lambda: client.pool.status().cpu_slots_free == 8, 10, lambda: str(client.pool.status()))
    after = client.begin("print('after')", ranks=8)
    assert after.ended().state is RunState.SUCCEEDED
    eventually(lambda: client.pool.status().cpu_slots_free == 8, 10, lambda: str(client.pool.status()))


# the pool service of a home can start no process while the file exists
NO_PROCESS = """
import os, subprocess, sys
if "sgpu_magic.pool" in sys.orig_argv:
    start = subprocess.Popen.__init__

    def refused(self, *args, **named):
        if os.path.exists({gate!r}):
            raise FileNotFoundError(2, "No such file or directory", sys.executable)
        start(self, *args, **named)

    subprocess.Popen.__init__ = refused
"""


def _meant(home: Home) -> None:
    log = home.state / "pool.log"
    log.write_text(log.read_text().replace("Traceback (most recent call last)", "a planted fault"))


@pytest.mark.slow
def test_a_service_that_fails_soon_after_its_start_is_followed_by_one_that_only_finishes_runs(
    tmp_path: Path, new_home: Callable[..., Home]
):
    callback = at(Engine.events_kept)
    plants = Plants(tmp_path, [callback])
    home = new_home({"PYTHONPATH": str(tmp_path), "SGPU_CPU_SLOTS": "8"})
    client = PoolClient(home)
    try:
        runs = [client.begin(WAITS.format(go=str(home.work / name)), ranks=1) for name in ("first", "second")]
        for run in runs:
            run.wait_for(OutputWritten)
        # each successor meets the same fault, until one fails right after its start
        for _ in range(5):
            old = home.pool_pid()
            plants.arm(callback)
            let_speak(home, "first")
            plants.struck(callback)
            eventually(lambda old=old: home.pool_pid() not in (None, old), 20, "no other service came")
            for run in runs:
                client.find_again(run.run)
            if problem := client.pool.status().problem:
                break
        assert "RuntimeError: planted" in problem
        with pytest.raises(PoolError, match="starts no new runs: its service failed right after its start"):
            client.begin("print(1)", ranks=1)
        pid = home.pool_pid()
        # a further fault does not end it
        plants.arm(callback)
        let_speak(home, "second")
        plants.struck(callback)
        runs[1].run.cancel("enough")
        assert runs[1].ended().state is RunState.CANCELLED
        (home.work / "first").touch()
        assert runs[0].ended().state is RunState.SUCCEEDED
        assert PRINTED.fullmatch(runs[0].printed[0])
        assert home.pool_pid() == pid
    finally:
        client.close()
        _meant(home)


@pytest.mark.slow
def test_a_fault_while_no_process_can_be_started_ends_no_run(tmp_path: Path, new_home: Callable[..., Home]):
    callback, gate = at(Engine.events_kept), tmp_path / "gate"
    plants = Plants(tmp_path, [callback])
    with open(tmp_path / "sitecustomize.py", "a") as site:
        site.write(NO_PROCESS.format(gate=str(gate)))
    home = new_home({"PYTHONPATH": str(tmp_path), "SGPU_CPU_SLOTS": "8"})
    client = PoolClient(home)
    try:
        run = client.begin(WAITS.format(go=str(home.work / "go")), ranks=1)
        run.wait_for(OutputWritten)
        old, agents = home.pool_pid(), home.agent_pids()
        gate.touch()
        plants.arm(callback)
        let_speak(home, "go")
        plants.struck(callback)
        eventually(lambda: home.pool_pid() != old, 20, "it does not end")
        gate.unlink()
        client.find_again(run.run)
        (home.work / "go").touch()
        assert run.ended().state is RunState.SUCCEEDED
        assert PRINTED.fullmatch(run.printed[0])
        assert home.agent_pids() == agents
    finally:
        client.close()
        _meant(home)


@pytest.mark.slow
def test_a_served_pool_takes_its_own_place(tmp_path: Path):
    callback = at(Engine.events_kept)
    plants = Plants(tmp_path, [callback])
    served = ServedPool({"PYTHONPATH": str(tmp_path)})
    try:
        ann = served.user("ann")
        go = served.home.work / "go"
        run = ann.client.begin(WAITS.format(go=str(go)), ranks=1)
        run.wait_for(OutputWritten)
        began = time.monotonic()
        # a service that fails right after its start would not be restarted
        eventually(lambda: time.monotonic() - began > 6, 10)
        pid = served.pid
        plants.arm(callback)
        plants.struck(callback)
        go.touch()
        assert run.ended().state is RunState.SUCCEEDED
        assert run.printed[0] == "here\ndone\n"
        assert (served.pid, served.process and served.process.poll()) == (pid, None)
        log = served.home.path / "served.log"
        log.write_text(log.read_text().replace("Traceback (most recent call last)", "a planted fault"))
    finally:
        served.close()


def test_an_order_that_the_agent_can_not_read_fails_its_run_and_nothing_else(
    tmp_path: Path, new_home: Callable[..., Home]
):
    (tmp_path / "sitecustomize.py").write_text(DAMAGES)
    home = new_home({"PYTHONPATH": str(tmp_path), "SGPU_CPU_SLOTS": "4"})
    client = PoolClient(home)
    try:
        session = client.connect(2)
        assert session.do("kept = rank").ended().state is RunState.SUCCEEDED
        pool, agents = home.pool_pid(), home.agent_pids()
        for run in (client.begin("1", ranks=1, name="unreadable"), session.begin("1", name="unreadable")):
            ended = run.ended(10)
            assert (ended.state, ended.failure and ended.failure.kind) == (RunState.FAILED, FailureKind.INTERNAL)
            assert ended.failure is not None
            assert "can't read the pool's order to start this run" in ended.failure.message
        assert session.do("kept").values == [0, 1]
        assert client.begin("rank", ranks=2).ended().state is RunState.SUCCEEDED
        session.end()
        eventually(lambda: client.pool.status().cpu_slots_free == 4, 10, lambda: str(client.pool.status()))
        assert (home.pool_pid(), home.agent_pids()) == (pool, agents)
    finally:
        client.close()
