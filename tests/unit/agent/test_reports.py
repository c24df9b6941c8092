"""Events between the agent and the pool service: none lost and none duplicated, whichever process dies."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import msgspec
import pytest
from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from launches import RUN as RUN_THERE
from launches import launch as launch_of
from msgspec.structs import replace
from small_disks import small_disk

from sgpu_magic.agent import run_registry
from sgpu_magic.agent.reports import EventReports, FileRequests
from sgpu_magic.agent.run_registry import RunRegistry
from sgpu_magic.agent.runs import send_files_to_pool
from sgpu_magic.agent.runs.send_files_to_pool import FilesToPool
from sgpu_magic.config import Settings
from sgpu_magic.files.run_directory import EventFile, read_spec
from sgpu_magic.pool.run_log import RunLog
from sgpu_magic.wire.base import FailureKind, Record, RunState
from sgpu_magic.wire.devices import Placement
from sgpu_magic.wire.events import AttemptFailed, EventBody, Noted, RunEnded, Submitted
from sgpu_magic.wire.files import EVENTS, RunFileStored, StoreRunFile
from sgpu_magic.wire.node import DevicesFree, RanksGone, RunEvent
from sgpu_magic.wire.rank_events import CommMessage, CommsMoved, DisplayPublished, Failure, OutputWritten, Sampled
from sgpu_magic.wire.run import CellSource, Owner, RunSpec

if TYPE_CHECKING:
    from sgpu_magic.agent.runs.node_run import NodeRun
    from sgpu_magic.agent.standby_groups import StandbyGroups

RUN = "0123abcd"
SPEC = RunSpec(
    run_id=RUN,
    name="cell",
    cell=CellSource(body="pass"),
    placement=Placement(ranks=2),
    outputs=(),
    owner=Owner(pid=1, host="h", user="u"),
    timeout_s=60.0,
)


class Wire(RuleBasedStateMachine):
    """An agent, and services that read, store and confirm events and may die at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.reports = EventReports(self.send)
        self.reports.begin(RUN, 0)
        self.in_flight: list[Record] = []
        self.kept: list[str] = []
        self.kept_number = 0
        self.sent: list[str] = []
        self.alive = True
        self.is_free = self.is_gone = False
        self.heard_free = self.heard_gone = False

    def send(self, message: Record, frames: Sequence[bytes] = ()) -> None:
        if self.alive:
            self.in_flight.append(message)

    @rule()
    def say(self) -> None:
        self.sent.append(str(len(self.sent)))
        self.reports.report(RUN, Noted(text=self.sent[-1]), ())

    @precondition(lambda self: not self.is_gone)
    @rule()
    def processes_leave(self) -> None:
        self.is_free = True
        self.reports.devices_free(RUN)

    @precondition(lambda self: not self.is_gone)
    @rule()
    def ranks_leave(self) -> None:
        self.is_gone = True
        self.reports.ranks_exited(RUN)

    @precondition(lambda self: self.in_flight)
    @rule(count=st.integers(1, 4))
    def service_reads_and_keeps(self, count: int) -> None:
        for message in self.in_flight[:count]:
            if isinstance(message, RanksGone):
                self.heard_gone = True
            elif isinstance(message, DevicesFree):
                self.heard_free = True
            elif isinstance(message, RunEvent) and message.number > self.kept_number:
                assert isinstance(message.body, Noted)
                assert message.number == self.kept_number + 1
                self.kept.append(message.body.text)
                self.kept_number = message.number
        del self.in_flight[:count]

    @precondition(lambda self: self.alive)
    @rule(behind=st.integers(0, 3))
    def service_confirms(self, behind: int) -> None:
        self.reports.confirmed(RUN, max(0, self.kept_number - behind))

    @precondition(lambda self: self.alive)
    @rule()
    def service_is_killed(self) -> None:
        self.alive = False
        self.in_flight.clear()
        self.reports.service_lost()

    @precondition(lambda self: not self.alive)
    @rule()
    def another_takes_over(self) -> None:
        self.alive = True
        self.reports.adopt(RUN, self.kept_number)

    @invariant()
    def what_is_kept_is_what_was_said(self) -> None:
        assert self.kept == self.sent[: len(self.kept)]

    def teardown(self) -> None:
        if not self.alive:
            self.another_takes_over()
        self.service_reads_and_keeps(len(self.in_flight))
        assert self.kept == self.sent
        assert self.heard_gone or not self.is_gone
        assert self.heard_free or self.heard_gone or not self.is_free
        self.reports.confirmed(RUN, self.kept_number)
        assert self.reports.has_unkept(RUN) is not self.is_gone


TestWire = Wire.TestCase
TestWire.settings = settings(max_examples=examples(150), stateful_step_count=30, deadline=None, database=None)


def test_an_agent_that_takes_a_run_over_from_a_dead_one_goes_on_counting():
    sent: list[Record] = []
    counting = EventReports(lambda message, frames=(): sent.append(message))
    counting.begin(RUN, 41)
    counting.report(RUN, Noted(text="on"), ())
    assert [message.number for message in sent if isinstance(message, RunEvent)] == [42]


def test_a_flood_while_no_service_is_there_is_not_kept_forever():
    sent: list[Record] = []
    flooded = EventReports(lambda message, frames=(): sent.append(message), kept_bytes=10_000)
    flooded.begin(RUN, 0)
    flooded.service_lost()
    line = "x" * 999 + "\n"
    for number in range(50):
        text = OutputWritten(rank=0, stream="stdout", text=line, start=number * 1000, end=(number + 1) * 1000)
        flooded.report(RUN, text, ())
    flooded.adopt(RUN, 0)
    batches = [message.body for message in sent if isinstance(message, RunEvent)]
    assert len(batches) == 50
    whole = [body for body in batches if isinstance(body, OutputWritten) and body.text]
    left_out = [body for body in batches if isinstance(body, OutputWritten) and not body.text]
    assert 0 < sum(len(body.text) for body in whole) <= 10_000
    assert batches[-1] in whole, "the newest are those that are wanted"
    assert {(body.skipped_bytes, body.skipped_lines) for body in left_out} == {(1000, 1)}


def test_figures_and_widgets_while_no_service_is_there_are_not_kept_forever():
    sent: list[tuple[Record, Sequence[bytes]]] = []
    flooded = EventReports(lambda message, frames=(): sent.append((message, frames)), kept_bytes=10_000)
    flooded.begin(RUN, 0)
    flooded.service_lost()
    figure = DisplayPublished(rank=0, bundle=b'{"image/png": "%s"}' % (b"x" * 1000), display_id="plot", update=True)
    update = CommMessage(comm_id="bar", kind="msg", data=b"{}", buffers=1)
    close = CommMessage(comm_id="bar", kind="close")
    for _ in range(50):
        flooded.report(RUN, figure, ())
        flooded.report(RUN, CommsMoved(rank=0, messages=(update, close)), (bytes(1000),))
    flooded.report(RUN, figure, ())
    flooded.adopt(RUN, 0)
    events = [(message, frames) for message, frames in sent if isinstance(message, RunEvent)]
    assert [event.number for event, _ in events] == list(range(1, 102))
    displays = [event.body for event, _ in events if isinstance(event.body, DisplayPublished)]
    whole = [body for body in displays if body == figure]
    assert displays[-1] in whole, "the newest are those that are wanted"
    buffers = sum(len(frame) for _, frames in events for frame in frames)
    assert 0 < sum(len(body.bundle) for body in whole) + buffers <= 10_000
    left_out = [body for body in displays if body != figure]
    assert {(body.display_id, body.update) for body in left_out} == {("plot", True)}
    assert all("was left out" in json.loads(body.bundle)["text/plain"] for body in left_out)
    moved = [(event.body.messages, frames) for event, frames in events if isinstance(event.body, CommsMoved)]
    assert all(frames or messages == (close,) for messages, frames in moved)
    # confirmed events free space
    flooded.confirmed(RUN, 101)
    sent.clear()
    flooded.service_lost()
    flooded.report(RUN, figure, ())
    flooded.adopt(RUN, 101)
    assert [message.body for message, _ in sent if isinstance(message, RunEvent)] == [figure]


# ---------------------------------------------------------------- runs whose files go to another machine


class FarAgent:
    """The part of an agent that holds such a run, and a pool that accepts its files on demand."""

    def __init__(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(run_registry, "_KEEP_DELAY_S", 0.01)
        monkeypatch.setattr(send_files_to_pool, "_LOGS_EVERY_S", 0.01)
        self.sent: list[Record] = []
        self.takes_files = True
        self._waiting: list[StoreRunFile] = []
        self.reports = EventReports(self.send)
        chosen = replace(Settings(), state_dir=str(state))
        self.requests = FileRequests(self.send)
        self.far = FilesToPool(chosen, self.requests, self.reports)
        nobody = cast("StandbyGroups", None)
        self.runs = RunRegistry(nobody, self.reports, lambda: True, lambda _: None, self.far, None)
        launch = self.far.prepare_run(msgspec.structs.replace(launch_of(), far=True))
        self.directory = Path(launch.run_dir)
        self.directory.mkdir(parents=True)
        memory = SimpleNamespace(keep=lambda: None, in_use=False, close=lambda: None)
        files = SimpleNamespace(memory=memory)
        self.run = cast("NodeRun", SimpleNamespace(run_id=RUN_THERE, launch=launch, files=files))
        self.reports.begin(RUN_THERE, 0)
        self.runs.add(self.run)

    def send(self, message: Record, frames: Sequence[bytes] = ()) -> None:
        self.sent.append(message)
        if isinstance(message, RunEvent):
            # the pool writes it to disk immediately
            asyncio.get_running_loop().call_soon(self.reports.confirmed, RUN_THERE, message.number)
        elif isinstance(message, StoreRunFile) and self.takes_files:
            stored = RunFileStored(request=message.request)
            asyncio.get_running_loop().call_soon(self.requests.answered, stored, ())
        elif isinstance(message, StoreRunFile):
            self._waiting.append(message)

    def take_files(self) -> None:
        """The network is back."""
        self.takes_files = True
        for message in self._waiting:
            self.requests.answered(RunFileStored(request=message.request), ())

    def end(self) -> None:
        """Its ranks have ended and are gone."""
        self.runs.on_event(RUN_THERE, RunEnded(state=RunState.SUCCEEDED), ())
        self.runs.run_exited(self.run)

    async def until(self, done: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not done():
                await asyncio.sleep(0.005)

    @property
    def reported(self) -> list[str]:
        """What the pool received about the run, other than files: event numbers and record kinds."""
        reported = [message for message in self.sent if not isinstance(message, StoreRunFile)]
        return [
            f"{one.number} {type(one.body).__name__}" if isinstance(one, RunEvent) else type(one).__name__
            for one in reported
        ]


def test_devices_are_told_free_before_files_are_there_and_the_run_is_kept_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def scenario() -> None:
        agent = FarAgent(tmp_path, monkeypatch)
        agent.runs.on_event(RUN_THERE, Noted(text="begun"), ())
        (agent.directory / "rank-0.log").write_text("printed")
        agent.takes_files = False
        agent.end()
        assert agent.reported == ["1 Noted", "DevicesFree"]
        # much longer than the run would be kept if it had no files to send
        await asyncio.sleep(0.2)
        assert agent.runs.get(RUN_THERE) is agent.run
        agent.take_files()
        await agent.until(lambda: agent.runs.get(RUN_THERE) is None)
        assert agent.reported == ["1 Noted", "DevicesFree", "2 RunEnded", "RanksGone"]
        assert not agent.directory.exists()

    asyncio.run(scenario())


IO_ERROR = OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        # not an error of the disk: nothing expects it
        (FileRequests, "ask", RuntimeError("a fault")),
        (send_files_to_pool, "contents_below", IO_ERROR),
        (send_files_to_pool, "open_below", IO_ERROR),
    ],
    ids=["ask", "contents_below", "open_below"],
)
def test_a_fault_while_files_are_sent_costs_files_and_not_the_runs_end(
    owner: object, name: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object, **__: object) -> None:
        raise error

    async def scenario() -> None:
        agent = FarAgent(tmp_path, monkeypatch)
        for file in ("rank-0.log", "out"):
            (agent.directory / file).write_text("written")
        monkeypatch.setattr(owner, name, refuse)
        agent.end()
        await agent.until(lambda: agent.runs.get(RUN_THERE) is None)
        assert agent.reported[0] == "DevicesFree"
        assert "1 RunEnded" in agent.reported
        assert agent.reported[-1] == "RanksGone"
        notes = [said.body.text for said in agent.sent if isinstance(said, RunEvent) and isinstance(said.body, Noted)]
        if error is IO_ERROR:
            (note,) = notes
            named = "its directory" if name == "contents_below" else "rank-0.log"
            assert note.startswith("files of the run were not transferred to the pool and are lost: ")
            assert f"{named} (Input/output error)" in note

    asyncio.run(scenario())


# ---------------------------------------------------------------- the run's event log


def append(log: RunLog, body: EventBody, at: float, number: int) -> None:
    """As an agent's event comes."""
    log.append(body, at, report=RunEvent(run_id=RUN, number=number, at=at, body=body))


def log_with(directory: Path, count: int) -> RunLog:
    log = RunLog(directory, RUN)
    log.append(Submitted(spec=SPEC), 1.0)
    for number in range(1, count + 1):
        append(log, Noted(text=f"{number}"), 2.0, number)
    return log


def texts(directory: Path) -> list[str]:
    return [event.body.text for event, _ in EventFile(directory).new_events() if isinstance(event.body, Noted)]


@pytest.mark.parametrize("cut", [0, 1, 3, 20])
def test_a_log_goes_on_where_a_killed_service_stopped(tmp_path: Path, cut: int):
    log_with(tmp_path, 5).close()
    path = tmp_path / EVENTS
    os.truncate(path, path.stat().st_size - cut)
    log = RunLog(tmp_path, RUN)
    kept = 5 if cut == 0 else 4
    assert (log.seq, log.number) == (kept + 1, kept)
    append(log, Noted(text="on"), 3.0, log.number + 1)
    log.close()
    assert texts(tmp_path) == [str(number) for number in range(1, kept + 1)] + ["on"]
    assert [event.seq for event, _ in EventFile(tmp_path).new_events()] == list(range(1, kept + 3))
    assert read_spec(tmp_path) == SPEC


def test_a_log_says_how_far_its_run_had_come(tmp_path: Path):
    log = log_with(tmp_path, 1)
    failure = Failure(kind=FailureKind.WORKER_DIED, message="killed")
    append(log, AttemptFailed(attempt=1, attempts=3, failure=failure), 3.0, 2)
    log.close()
    again = RunLog(tmp_path, RUN)
    assert again.failed_attempt is not None
    assert again.failed_attempt.attempt == 1
    assert again.ended is None
    append(again, RunEnded(state=RunState.FAILED, failure=failure), 4.0, 3)
    again.close()
    ended = RunLog(tmp_path, RUN)
    ended.close()
    assert ended.ended is not None
    assert ended.ended.state is RunState.FAILED
    assert ended.failed_attempt is None, "an ended run is not started again"


@pytest.mark.needs_root
def test_a_log_keeps_what_a_full_disk_does_not_take_and_writes_it_later(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    with small_disk(tmp_path / "disk", "tmpfs", megabytes=1) as disk:
        log = log_with(disk.path / "run", 1)
        disk.fill()
        # events that fit into the last page are written whole, never in part
        for number in range(2, 102):
            append(log, Noted(text=f"{number} {'x' * 100}"), 3.0, number)
        assert log.problem == "No space left on device"
        assert len(log.unwritten) > 50
        assert log.number == 101
        assert log.written[0] == 101 - len(log.unwritten)
        assert len(texts(log.directory)) == log.written[0], "half an event is in the file"
        log.close()
        disk.make_room()
        assert log.write()
        assert (log.problem, log.written) == ("", {0: 101})
        assert [event.seq for event, _ in EventFile(log.directory).new_events()] == list(range(1, 103))
        descriptors = os.listdir("/proc/self/fd")
        assert not any(os.path.realpath(f"/proc/self/fd/{fd}") == str(log.directory / EVENTS) for fd in descriptors)


def test_what_a_log_keeps_in_memory_is_bounded(tmp_path: Path):
    (tmp_path / "run").touch()
    log = RunLog(tmp_path / "run", RUN)
    assert log.problem == "File exists"
    log.append(Submitted(spec=SPEC), 1.0)
    text = "x" * 99_999 + "\n"
    for number in range(1, 401):
        body = OutputWritten(rank=0, stream="stdout", text=text, start=(number - 1) * 100_000, end=number * 100_000)
        append(log, body, 2.0, number)
    bodies = [event.body for event, _ in log.unwritten]
    outputs = [body for body in bodies if isinstance(body, OutputWritten)]
    assert len(outputs) == 400
    assert sum(len(body.text) for body in outputs) < 17_000_000
    assert outputs[-1].text == text, "the newest are whole"
    assert {(body.skipped_bytes, body.skipped_lines) for body in outputs if not body.text} == {(100_000, 1)}
    number, body = 400, Sampled(seconds=1.0, samples=())
    while log.takes(body):
        assert number < 20_000
        number += 1
        append(log, body, 3.0, number)
    assert log.takes(Noted(text="what becomes of the run")), "only bulk is left out"
    (tmp_path / "run").unlink()
    assert log.write(), "the directory is made as soon as it can be"
    assert read_spec(tmp_path / "run") == SPEC
    log.close()


def test_a_damaged_log_is_cut_off_at_its_last_whole_event(tmp_path: Path):
    log_with(tmp_path, 3).close()
    path = tmp_path / EVENTS
    whole = path.read_bytes()
    for garbage in (whole[-20:] * 30, b"\x00" * 500, b"\xff" * 500, whole[:12] + b"\xc1" * 400):
        path.write_bytes(whole + garbage)
        log = RunLog(tmp_path, RUN)
        assert (log.seq, log.number, path.read_bytes()) == (4, 3, whole)
        append(log, Noted(text="on"), 3.0, 4)
        assert (log.problem, texts(tmp_path)) == ("", ["1", "2", "3", "on"])
        log.close()


def test_a_log_knows_where_an_event_lies(tmp_path: Path):
    log = log_with(tmp_path, 1)
    for number in range(2, 60):
        append(log, Noted(text="x" * 50_000), 2.0, number)
    again = RunLog(tmp_path, RUN)
    for known in (log, again):
        assert known.offset_before(0) == 0
        assert 0 < known.offset_before(59) <= (tmp_path / EVENTS).stat().st_size
        for after in (10, 40, 60):
            events = EventFile(tmp_path, known.offset_before(after)).new_events()
            assert after - 8 < next(events)[0].seq <= after + 1
        known.close()


def test_a_log_that_is_none_has_no_spec(tmp_path: Path):
    assert read_spec(tmp_path) is None
    (tmp_path / EVENTS).write_bytes(b"nonsense that is long enough to be a header")
    assert read_spec(tmp_path) is None
