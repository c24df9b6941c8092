"""A pool service apart from its scheduler: refusals, retries, contained faults and adopted runs.

Ledger, event logs and runs are real; the nodes, the scheduler and the clients' connections are lists of what they hear.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import pytest
from launches import placed_launch

from sgpu_magic.config import Settings
from sgpu_magic.errors import UsageError
from sgpu_magic.files.run_directory import EventFile
from sgpu_magic.pool.active_runs import ActiveRuns
from sgpu_magic.pool.adoption import Adoption
from sgpu_magic.pool.billing import Billing
from sgpu_magic.pool.health import Guard
from sgpu_magic.pool.instructions import Instructions, LaunchHandler
from sgpu_magic.pool.inventory import FreshInventory
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.pool.pool_run import GroupState, PoolRun
from sgpu_magic.pool.scheduling import stimuli as sched
from sgpu_magic.pool.scheduling.costs import Tariff
from sgpu_magic.pool.scheduling.end_reason import CostLimitNear
from sgpu_magic.pool.scheduling.wait_reason import DevicesUnknown, QueueStatus
from sgpu_magic.pool.server import ConnectedClient
from sgpu_magic.wire import events as ev
from sgpu_magic.wire.attachments import FilePayload, InlinePayload, SharedPayload, StoredPayload
from sgpu_magic.wire.base import FailureKind, RunState
from sgpu_magic.wire.client import AskStacks, Submit
from sgpu_magic.wire.devices import Device, Inventory, Lease
from sgpu_magic.wire.files import PAYLOAD
from sgpu_magic.wire.node import HeldRun, Launch
from sgpu_magic.wire.rank_events import Failure
from sgpu_magic.wire.run import Owner

WARNING = CostLimitNear(max_cost=1.0, currency="USD", left_s=60.0)
LEASE = Lease(lease_id="l", device_type="cpu", ranks=1, cpu_slots=1)
DIED = Failure(kind=FailureKind.WORKER_DIED, message="rank 0 was killed", rank=0)


Made = TypeVar("Made")


class Service:
    """The parts of a service.

    Attributes:
        received: What the nodes, the clients and the scheduler are told, in order.
        known: Runs that the scheduler has.
        open: Sessions that take cells.
    """

    def __init__(self, folder: Path) -> None:
        self.received: list[Any] = []
        self.known: set[str] = set()
        self.open: set[str] = set()
        self.builds = False
        self.settings = Settings(state_dir=str(folder / "state"), runtime_dir=str(folder / "run"))
        self.settings.runs_path.mkdir(parents=True)
        self._folder = folder
        self.ledger = Ledger(folder / "ledger.sqlite3")
        server: Any = SimpleNamespace(
            send=lambda client, record, frames=(): self.received.append(record),
            refuse=lambda client, request, text, kind="": self.received.append((kind, text)),
        )
        engine = SimpleNamespace(
            launch=lambda launch, frames: self.received.append(launch),
            end_run=lambda run_id, state, why, limit=None: self.received.append((run_id, state, why)),
            builds=lambda interpreter, environment: self.builds,
            adopt=lambda run_id, numbers: self.received.append(f"adopt {run_id}"),
        )
        scheduler = SimpleNamespace(
            run=lambda run_id: run_id if run_id in self.known else None, is_open=self.open.__contains__
        )
        self.active = ActiveRuns(
            ledger=self.ledger,
            runs_path=self.settings.runs_path,
            send=server.send,
            offer=lambda client, event, frames: True,  # type: ignore[arg-type]
            billing=Billing(self.ledger, Tariff()),
            on_end=lambda run, ended: None,
            on_forgotten=lambda run_id: None,
            on_written=lambda run_id: None,
        )
        self.guard = Guard(
            server,
            self.active,
            "its log is pool.log",
            lambda *fault: self.instructions.end_of_fault(*fault),
        )
        self.parts: Any = SimpleNamespace(
            settings=self.settings,
            server=server,
            engine=engine,
            ledger=self.ledger,
            active=self.active,
            scheduler=scheduler,
            stock=FreshInventory(lambda: self.received.append("take")),
            guard=self.guard,
            feed=self.received.append,
        )
        kept: Any = SimpleNamespace(link=lambda *_: None)
        self.launches = self.made(LaunchHandler, kept_environments=kept)
        submissions: Any = SimpleNamespace(unprepare=lambda run: self.received.append("unprepare"))
        tracker: Any = SimpleNamespace(follow=lambda run: self.received.append(f"track {run.run_id}"))
        self.instructions = self.made(Instructions, launches=self.launches, submissions=submissions, tracker=tracker)

    def made(self, kind: Callable[..., Made], **more: Any) -> Made:
        """Construct a part of the service with those of the shared parts that it takes."""
        shared = {name: value for name, value in vars(self.parts).items() if name in inspect.signature(kind).parameters}
        return kind(**shared, **more)

    def launch(self, run_id: str = "000000a1", **spec: Any) -> Launch:
        made = placed_launch(self._folder, is_remote=False)
        owner = Owner(pid=os.getpid(), host=this_host(), user="ann")
        return msgspec.structs.replace(
            made, spec=msgspec.structs.replace(made.spec, run_id=run_id, **{"owner": owner} | spec), lease=LEASE
        )

    def run(self, run_id: str = "000000a1", *, accepted: bool = True, **spec: Any) -> PoolRun:
        launch = self.launch(run_id, **spec)
        submit = Submit(
            request=3,
            spec=launch.spec,
            interpreter=launch.interpreter,
            context=launch.context,
            payload=launch.payload,
        )
        run = PoolRun(submit, (b"frame",), ConnectedClient(b"x", 7))
        self.active.add(run)
        self.known.add(run_id)
        if accepted:
            assert self.active.accept(run) is None
            self.received.clear()
        return run

    def events(self, run_id: str = "000000a1") -> list[ev.EventBody]:
        return [event.body for event, _ in EventFile(self.active.directory(run_id)).new_events()]

    def take(self) -> list[Any]:
        """Return the records since the last call."""
        received = list(self.received)
        self.received.clear()
        return received


def this_host() -> str:
    from sgpu_magic.config import host_name

    return host_name()


def served(folder: Path, story: Callable[[Service], Any]) -> None:
    """Run a scenario with a service's parts, in a loop like theirs."""

    async def play() -> None:
        service = Service(folder)
        try:
            done = story(service)
            if done is not None:
                await done
        finally:
            for run in service.active.going:
                if run.log is not None:
                    run.log.close()
            service.ledger.close()

    asyncio.run(play())


# ---------------------------------------------------------------- instructions


def test_a_run_is_recorded_with_its_first_instruction_and_ends_with_its_last(tmp_path: Path):
    def story(service: Service) -> None:
        run = service.run(accepted=False)
        execute = service.instructions.execute
        service.instructions.publish_status(run.run_id, QueueStatus(2, DevicesUnknown()))
        execute(sched.PublishWarning(run.run_id, WARNING))
        execute(sched.MoveRun(run.run_id, RunState.QUEUED, ""))
        execute(sched.StopRun(run.run_id, RunState.CANCELLED, "asked"))
        received = service.take()
        assert [type(each).__name__ for each in received] == ["Accepted", "str", "tuple"]
        assert received[1:] == ["track 000000a1", (run.run_id, RunState.CANCELLED, "asked")]
        execute(sched.EndUnstartedRun(run.run_id, RunState.TIMED_OUT, "no device within 5 s"))
        assert service.take() == ["unprepare"]
        assert service.active.get(run.run_id) is None
        kinds = [type(body).__name__ for body in service.events()]
        assert kinds == ["Submitted", "QueueMoved", "Noted", "StateChanged", "RunEnded"]
        ended = service.events()[-1]
        assert isinstance(ended, ev.RunEnded)
        assert ended.failure is not None
        assert (ended.failure.kind, ended.failure.message) == (FailureKind.TIMEOUT, "no device within 5 s")
        # nothing is published for a run that is over
        execute(sched.PublishWarning(run.run_id, WARNING))
        assert len(service.events()) == 5

    served(tmp_path, story)


def test_a_run_that_can_not_be_recorded_is_refused_and_started_nowhere(tmp_path: Path):
    async def story(service: Service) -> None:
        service.settings.runs_path.rmdir()
        service.settings.runs_path.touch()
        for order in (
            lambda: service.instructions.execute(sched.LaunchRun("000000a1", LEASE)),
            lambda: service.instructions.publish_status("000000a1", QueueStatus(1, DevicesUnknown())),
        ):
            run = service.run(accepted=False)
            order()
            unprepared, (kind, text) = service.take()
            assert (unprepared, kind) == ("unprepare", "PoolError")
            assert text.startswith(f"the pool can't record the run in {service.settings.runs_path}: ")
            await asyncio.sleep(0)
            (over,) = service.take()
            assert isinstance(over, sched.RanksReaped)
            assert (over.run_id, over.state) == (run.run_id, RunState.FAILED)

    served(tmp_path, story)


def test_the_ranks_are_ordered_first_and_recorded_once_they_have_their_devices(tmp_path: Path):
    def story(service: Service) -> None:
        run = service.run()
        service.parts.stock.receive(
            Inventory(host="ml-1", devices=(Device(uuid="GPU-a", index=2, type="a10"),), cpu_slots=4)
        )
        lease = Lease(lease_id="l", device_type="a10", ranks=2, uuids=("GPU-a", "GPU-b"))
        service.instructions.execute(sched.LaunchRun(run.run_id, lease))
        _, launch = service.take()
        assert (launch.spec.run_id, launch.lease, launch.attempt) == (run.run_id, lease, 0)
        assert run.placed_at is None
        service.launches.granted(run.run_id, lease)
        granted, moved = service.take()
        assert isinstance(granted, sched.LeaseGranted)
        assert (moved.run_id, moved.state) == (run.run_id, RunState.STARTING)
        placed = service.events()[-1]
        assert isinstance(placed, ev.Placed)
        assert (placed.host, placed.labels) == ("ml-1", ("A10 · 2", "GPU-b"))
        # the payload's frames are dropped, since there is no second launch
        assert run.frames == ()
        service.launches.granted(run.run_id, lease)
        service.launches.granted("000000ff", lease)
        assert service.take() == []

    served(tmp_path, story)


def test_a_group_of_ranks_takes_only_declared_steps(tmp_path: Path):
    def story(service: Service) -> None:
        run = service.run(retries=1)
        with pytest.raises(RuntimeError, match="from ABSENT to LAUNCHED"):
            run.launch_group(1.0)
        run.exit_group()
        assert (run.group, run.has_group, run.placed_at) == (GroupState.ABSENT, False, None)
        run.order_group()
        run.launch_group(1.0)
        with pytest.raises(RuntimeError, match="from LAUNCHED to ABSENT"):
            run.requeue()
        run.exit_group()
        # a report may be repeated
        run.exit_group()
        assert run.group is GroupState.EXITED
        run.order_group()
        assert run.group is GroupState.LAUNCHED, "restarted on the devices that it has"
        run.exit_group()
        run.requeue()
        assert (run.group, run.placed_at) == (GroupState.ABSENT, None)

    served(tmp_path, story)


# ---------------------------------------------------------------- starting again


def failed(service: Service, run: PoolRun, failure: Failure = DIED) -> ev.AttemptFailed | None:
    return service.launches.instead_of(run, ev.RunEnded(state=RunState.FAILED, failure=failure))


def test_a_group_that_died_is_started_again_as_often_as_was_asked(tmp_path: Path):
    def story(service: Service) -> None:
        run = service.run(retries=1)
        run.scheduled.lease = LEASE
        users = msgspec.structs.replace(DIED, kind=FailureKind.USER_CODE)
        assert failed(service, run, users) is None
        again = failed(service, run)
        assert again is not None
        assert (again.attempt, again.attempts, again.failure) == (1, 2, DIED)
        assert service.launches.restart(run)
        launch, moved = service.take()
        assert (launch.attempt, launch.lease) == (1, LEASE)
        assert moved.state is RunState.STARTING
        assert not service.launches.restart(run)
        assert failed(service, run) is None
        run.scheduled.spec = msgspec.structs.replace(run.spec, retries=3, retry_on_any=True)
        assert failed(service, run, users) is not None
        run.scheduled.state = RunState.CANCELLING
        assert failed(service, run) is None

    served(tmp_path, story)


def test_a_run_of_a_lost_node_goes_back_to_the_queue(tmp_path: Path):
    async def story(service: Service) -> None:
        run = service.run(retries=1)
        run.order_group()
        run.launch_group(1.0)
        run.exit_group()
        run.lost_node = "node b was lost"
        assert failed(service, run) is not None
        assert service.launches.restart(run)
        assert (run.placed_at, run.group, run.lost_node) == (None, GroupState.ABSENT, None)
        await asyncio.sleep(0)
        (queued,) = service.take()
        assert isinstance(queued, sched.RunRequeued)
        assert queued.why == "node b was lost"

    served(tmp_path, story)


@pytest.mark.parametrize(
    ("why", "spoil"),
    [
        ("its devices were released", lambda service, run: service.known.clear()),
        ("its session has ended", lambda service, run: setattr(run.scheduled, "spec", in_session(run))),
        (
            "its variables were in the memory of processes that have ended",
            lambda service, run: setattr(run, "frames", ()),
        ),
    ],
)
def test_what_can_not_be_started_again_ends_with_both_reasons(
    tmp_path: Path, why: str, spoil: Callable[[Service, PoolRun], None]
):
    def story(service: Service) -> None:
        run = service.run(retries=1)
        run.scheduled.lease = LEASE
        assert failed(service, run) is not None
        spoil(service, run)
        assert not service.launches.restart(run)
        ended = service.events()[-1]
        assert isinstance(ended, ev.RunEnded)
        assert ended.failure is not None
        assert ended.failure.message == f"rank 0 was killed\nIt was not started again: {why}."
        assert service.take() == []

    served(tmp_path, story)


def in_session(run: PoolRun) -> Any:
    return msgspec.structs.replace(run.spec, session="000000a0")


def test_a_run_that_was_stopped_between_two_attempts_is_not_started_again(tmp_path: Path):
    def story(service: Service) -> None:
        run = service.run(retries=1)
        run.scheduled.lease = LEASE
        assert failed(service, run) is not None
        run.scheduled.stopping_as = RunState.CANCELLED
        assert not service.launches.restart(run)
        ended = service.events()[-1]
        assert isinstance(ended, ev.RunEnded)
        assert (ended.state, ended.reason, ended.failure) == (
            RunState.CANCELLED,
            "it was stopped between two attempts",
            None,
        )

    served(tmp_path, story)


def test_another_attempt_finds_the_variables_where_they_are_by_then(tmp_path: Path):
    def story(service: Service) -> None:
        run = service.run(retries=9)
        run.scheduled.lease = LEASE
        file = tmp_path / "payload"
        file.write_bytes(b"x")
        own = os.open(file, os.O_RDONLY)
        try:
            for source in (
                InlinePayload(),
                SharedPayload(pid=os.getpid(), fd=own, size=1),
                FilePayload(path=str(file), size=1),
                StoredPayload(parts=(), size=1),
            ):
                run.submit = with_payload(run, source)
                assert failed(service, run) is not None
                assert service.launches.restart(run), source
                assert service.take()[0].payload.source == source
        finally:
            os.close(own)
        # its notebook is gone, but the run's directory has a copy
        kept = service.active.directory(run.run_id) / PAYLOAD
        kept.write_bytes(b"12345")
        run.submit = with_payload(run, SharedPayload(pid=os.getpid(), fd=own, size=1))
        assert failed(service, run) is not None
        assert service.launches.restart(run)
        assert service.take()[0].payload.source == FilePayload(path=str(kept), size=5)

    served(tmp_path, story)


def with_payload(run: PoolRun, source: Any) -> Submit:
    return msgspec.structs.replace(run.submit, payload=msgspec.structs.replace(run.submit.payload, source=source))


# ---------------------------------------------------------------- faults


def fault() -> None:
    raise RuntimeError("planted")


WORDS = "an internal error in the pool service (RuntimeError: planted); its log is pool.log"


def test_a_fault_ends_one_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    async def story(service: Service) -> None:
        queued, ordered, gone = (service.run(f"000000a{number}") for number in (1, 2, 3))
        early = service.run("000000a4", accepted=False)
        ordered.order_group()
        gone.order_group()
        service.guard.for_run("000000ff", fault)
        service.guard.for_nobody(fault)
        assert service.take() == []
        service.guard.for_run(queued.run_id, fault)
        assert service.take() == ["unprepare"]
        service.guard.for_run(ordered.run_id, fault)
        assert service.take() == [(ordered.run_id, RunState.FAILED, WORDS)]
        service.guard.for_run(gone.run_id, fault, have_ranks_exited=True)
        assert service.take() == []
        service.guard.for_run(early.run_id, fault)
        assert ("InternalError", WORDS) in service.take()
        await asyncio.sleep(0)
        reported = {type(each).__name__: [] for each in service.received}
        for each in service.take():
            reported[type(each).__name__].append(each.run_id)
        # the run with ordered ranks is over only when they are gone
        assert reported == {"RanksReaped": ["000000a1", "000000a3", "000000a4"], "RunMoved": ["000000a2"]}
        assert [run.run_id for run in service.active.going] == ["000000a2"]
        ended = service.events("000000a2")[-1]
        assert isinstance(ended, ev.RunEnded)
        assert ended.failure is not None
        assert (ended.failure.kind, ended.failure.message) == (FailureKind.INTERNAL, WORDS)

    served(tmp_path, story)
    log = capfd.readouterr().err
    assert "run 000000a1 ends because of it" in log
    assert "a node's reply was dropped" in log
    assert "RuntimeError: planted" in log


def test_a_fault_of_a_clients_message_is_its_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    def story(service: Service) -> None:
        client = ConnectedClient(b"y", 7)
        question = AskStacks(request=5, run="000000a1")

        def wrong() -> None:
            raise UsageError("there is no such run.")

        service.guard.for_client(client, question, wrong)
        service.guard.for_client(client, question, fault)
        assert service.take() == [("UsageError", "there is no such run."), ("InternalError", WORDS)]
        # a fault in a message that submits a run refuses the run
        run = service.run(accepted=False)
        assert run.owner is not None
        service.guard.for_client(run.owner, run.submit, fault)
        assert ("InternalError", WORDS) in service.take()
        assert service.active.get(run.run_id) is None

    served(tmp_path, story)
    assert "a message of process 7 was dropped (AskStacks)" in capfd.readouterr().err


def test_an_old_inventory_is_taken_anew_before_real_devices_are_given():
    taken: list[int] = []
    stock, called = FreshInventory(lambda: taken.append(1)), list[int]()
    real = Inventory(host="ml-1", devices=(Device(uuid="GPU-a", type="a10"),), cpu_slots=4)
    assert stock.inventory.host == ""
    stock.when_fresh(lambda: called.append(1))
    assert (called, taken) == ([], [])
    for call in stock.receive(real):
        call()
    assert (called, stock.inventory.host) == ([1], "ml-1")
    stock.when_fresh(lambda: called.append(2))
    assert (called, taken) == ([1, 2], [])
    for number in (3, 4):
        stock.when_fresh(lambda number=number: called.append(number), fresh_s=0.0)
    assert (called, taken) == ([1, 2], [1])
    for call in stock.receive(msgspec.structs.replace(real)):
        call()
    assert called == [1, 2, 3, 4]
    # an unchanged inventory stays the same object
    assert stock.inventory is real


# ---------------------------------------------------------------- runs of an earlier service


def test_a_new_service_takes_over_what_its_nodes_hold(tmp_path: Path):
    def story(service: Service) -> None:
        for run_id in ("000000a1", "000000a2"):
            service.run(run_id, retries=2)
            service.active.directory(run_id).mkdir(exist_ok=True)
        for run in service.active.going:
            if run.run_id == "000000a2":
                service.active.publish(run, ev.AttemptFailed(attempt=1, attempts=3, failure=DIED), 1.0)
            assert run.log is not None
            run.log.close()
            service.active.forget(run.run_id)
        service.take()
        adoption = service.made(Adoption, run_lost=lambda spec, ended: pytest.fail(f"{spec.run_id} is not lost"))
        # the third is a session's cell without any recorded event
        held = [
            HeldRun(launch=service.launch("000000a3", session="000000a1"), state=RunState.RUNNING, started_s=5.0),
            HeldRun(launch=service.launch("000000a1", retries=2), state=RunState.RUNNING, started_s=5.0),
            HeldRun(
                launch=service.launch("000000a2", retries=2),
                state=RunState.FAILED,
                started_s=5.0,
                have_ranks_exited=True,
            ),
        ]
        adoption.adopt_all(held)
        received = service.take()
        assert [each for each in received if isinstance(each, str)] == [
            "adopt 000000a1",
            "adopt 000000a2",
            "adopt 000000a3",
        ]
        adopted = {each.run.run_id: each for each in received if isinstance(each, sched.RunAdopted)}
        assert adopted.keys() == {"000000a1", "000000a2", "000000a3"}
        # its next attempt is due, on the devices that it still holds
        assert not adopted["000000a2"].freed
        again = service.active.get("000000a2")
        assert again is not None
        assert (again.attempt, again.restart_after) == (1, DIED)
        kinds = [type(body).__name__ for body in service.events("000000a3")]
        assert kinds == ["Submitted", "Placed", "Noted"]
        noted = service.events("000000a3")[-1]
        assert isinstance(noted, ev.Noted)
        assert noted.text.startswith("the pool service ended unexpectedly; a new one was started")

    served(tmp_path, story)


def test_what_no_node_holds_is_submitted_again_or_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def story(service: Service) -> None:
        dead = Owner(pid=2**22 + 1, host=this_host(), user="ann")
        queued, left, started, ended = (
            service.run("000000b1"),
            service.run("000000b2", owner=dead),
            service.run("000000b3"),
            service.run("000000b4"),
        )
        service.ledger.update(started.run_id, state=RunState.RUNNING)
        service.active.publish(ended, ev.RunEnded(state=RunState.SUCCEEDED), time.time())
        service.ledger.update(ended.run_id, state=RunState.RUNNING)
        for run in service.active.going:
            assert run.log is not None
            run.log.close()
            service.active.forget(run.run_id)
        service.take()
        lost: list[str] = []
        adoption = service.made(Adoption, run_lost=lambda spec, ended: lost.append(spec.run_id))
        adoption.adopt_all([])
        assert list(service.active.resubmittable) == ["000000b1"]
        found = {run_id: service.events(run_id)[-1] for run_id in ("000000b2", "000000b3", "000000b4")}
        words = {run_id: body.failure and body.failure.message for run_id, body in found.items()}  # type: ignore[union-attr]
        assert words == {
            "000000b2": "the pool service ended while the run waited in its queue, and its notebook did not submit it "
            "again",
            "000000b3": "the pool service and the agent of its ranks ended unexpectedly",
            # the run had ended, but the ledger did not record it
            "000000b4": None,
        }
        # the end of 000000b4 was told by the service that published it
        assert sorted(lost) == ["000000b2", "000000b3"]
        states = {run_id: row.state for run_id in (*found, "000000b1") if (row := service.ledger.summary(run_id))}
        assert states == {
            "000000b1": RunState.QUEUED,
            "000000b2": RunState.FAILED,
            "000000b3": RunState.FAILED,
            "000000b4": RunState.SUCCEEDED,
        }
        assert (queued.run_id, left.run_id) == ("000000b1", "000000b2")

    served(tmp_path, story)


def test_notebooks_have_so_long_to_come_back(tmp_path: Path):
    async def story(service: Service) -> None:
        service.parts.settings = msgspec.structs.replace(service.settings, adopt_timeout_s=-1.0)
        queued = service.run("000000b1")
        assert queued.log is not None
        queued.log.close()
        service.active.forget(queued.run_id)
        service.take()
        lost: list[str] = []
        adoption = service.made(Adoption, run_lost=lambda spec, ended: lost.append(spec.run_id))
        adoption.adopt_all(
            [
                HeldRun(launch=service.launch("000000a1"), state=RunState.RUNNING, started_s=5.0),
                HeldRun(launch=service.launch("000000a2", detach=True), state=RunState.RUNNING, started_s=5.0),
            ]
        )
        cancelled = [each.run_id for each in service.take() if isinstance(each, sched.CancelRequested)]
        assert cancelled == ["000000a1"]
        assert service.active.resubmittable == {}
        assert isinstance(service.events("000000b1")[-1], ev.RunEnded)
        assert lost == ["000000b1"]

    served(tmp_path, story)
