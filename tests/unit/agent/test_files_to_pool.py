"""Files that a run leaves on another machine: each one reaches the pool whole, or is named in a note."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from launches import RUN
from launches import launch as launch_of
from msgspec.structs import replace

from sgpu_magic.agent.blobs import BlobCache
from sgpu_magic.agent.reports import EventReports, FileRequests
from sgpu_magic.agent.runs.send_files_to_pool import FilesToPool
from sgpu_magic.config import Settings
from sgpu_magic.files.run_directory import STAGED, contents_below, links_below, list_below
from sgpu_magic.nodes.node_files import NodeFiles
from sgpu_magic.wire.base import Record
from sgpu_magic.wire.events import Noted
from sgpu_magic.wire.files import CHECKPOINTS, NodeFileReply, NodeFileRequest, Store, StoreRunFile
from sgpu_magic.wire.node import NodePart, RanksGone, RunEvent


class TwoMachines:
    """A node with a run's files, and the receiving part of a pool, each with its own directory.

    Args:
        path: Folder for both.
        index: The node's index in the run.
        attempt: The run's attempt.
    """

    def __init__(self, path: Path, index: int = 0, attempt: int = 0) -> None:
        pool = replace(Settings(), state_dir=str(path / "pool"))
        node = replace(Settings(), state_dir=str(path / f"node-{index}"), run_files_bytes=1_000_000)
        self.there = pool.runs_path / RUN
        self.there.mkdir(parents=True, exist_ok=True)
        self.taker = NodeFiles(pool)
        self.sent: list[Record] = []
        # called with each request before the pool gets it; False loses it
        self.before: Callable[[StoreRunFile], bool] = lambda _: True
        self.requests = FileRequests(self.send)
        self.sender = FilesToPool(node, self.requests, EventReports(self.send))
        self.blobs = BlobCache(node, self.requests)
        checkpoints = tuple(contents_below(self.there, CHECKPOINTS).files) if attempt else ()
        part = NodePart(index=index, nodes=3, first_rank=index, ranks=1, address="") if index else None
        launch = msgspec.structs.replace(
            launch_of(), far=True, run_dir=str(self.there), part=part, attempt=attempt, checkpoints=checkpoints
        )
        self.launch = self.sender.prepare_run(launch)
        self.here = Path(self.launch.run_dir)
        self.here.mkdir(parents=True)

    def send(self, message: Record, frames: Sequence[bytes] = ()) -> None:
        self.sent.append(message)
        if isinstance(message, StoreRunFile) and not self.before(message):
            return
        if isinstance(message, NodeFileRequest):
            self.taker.on_request(message, frames, self.answer)

    def answer(self, reply: NodeFileReply, frames: Sequence[bytes]) -> None:
        self.requests.answered(reply, frames)

    async def leave(self) -> None:
        """The run's ranks are gone."""
        self.sender.ranks_exited(RUN)
        async with asyncio.timeout(60):
            while not any(isinstance(message, RanksGone) for message in self.sent):
                await asyncio.sleep(0.005)

    @property
    def notes(self) -> list[str]:
        bodies = [message.body for message in self.sent if isinstance(message, RunEvent)]
        return [body.text for body in bodies if isinstance(body, Noted)]


Machines = Callable[..., TwoMachines]


@pytest.fixture
def machines_at(tmp_path: Path) -> Iterator[Machines]:
    """Makes a `TwoMachines` from the arguments after its path; called in a loop."""
    made: list[TwoMachines] = []

    def make(index: int = 0, attempt: int = 0) -> TwoMachines:
        made.append(TwoMachines(tmp_path, index, attempt))
        return made[-1]

    yield make
    for each in made:
        each.taker.close()


@pytest.mark.slow
def test_more_than_ten_thousand_files_arrive(machines_at: Machines):
    async def scenario() -> None:
        machines = machines_at()
        many = machines.here / "work" / "many"
        many.mkdir(parents=True)
        for number in range(10_050):
            (many / str(number)).touch()
        await machines.leave()
        assert len(os.listdir(machines.there / "work" / "many")) == 10_050
        assert not machines.notes
        assert not machines.here.exists()

    asyncio.run(scenario())


@pytest.mark.parametrize("index", [0, 1])
def test_links_empty_folders_and_modes_arrive(index: int, machines_at: Machines):
    async def scenario() -> None:
        machines = machines_at(index)
        work, checkpoints = machines.here / "work", machines.here / "checkpoints"
        for folder in (work / "deep" / "empty", checkpoints / "step-2"):
            folder.mkdir(parents=True)
        (work / "tool").write_text("run")
        (work / "tool").chmod(0o700)
        (checkpoints / "step-2" / "model").write_bytes(b"2" * 600_000)
        links = {
            work / "deep" / "up": "../tool",
            work / "absolute": str(work / "tool"),
            work / "dangling": "nowhere",
            work / "checkpoint": "../checkpoints/step-2",
            checkpoints / "latest": "step-2",
            checkpoints / "tool": "../work/tool",
        }
        for link, target in links.items():
            link.symlink_to(target)
        await machines.leave()
        assert not machines.notes
        there = machines.there
        its_work = there / ("work" if not index else f"node-{index}/work")
        assert (its_work / "deep" / "empty").is_dir()
        for link in (its_work / "deep" / "up", its_work / "absolute", there / "checkpoints" / "tool"):
            assert link.is_symlink()
            assert link.read_text() == "run"
            assert not os.readlink(link).startswith("/")
        assert os.readlink(its_work / "dangling") == "nowhere"
        assert (its_work / "tool").stat().st_mode & 0o777 == 0o700
        assert (there / "checkpoints" / "latest" / "model").read_bytes() == b"2" * 600_000
        assert (its_work / "checkpoint" / "model").exists()
        assert not machines.here.exists()
        assert not [name for name in os.listdir(there) if name.startswith(STAGED)]

    asyncio.run(scenario())


def test_what_can_not_be_sent_is_named(machines_at: Machines, tmp_path: Path):
    async def scenario() -> None:
        machines = machines_at()
        work = machines.here / "work"
        (work / "inner").mkdir(parents=True)
        (work / "large").write_bytes(bytes(1_000_001))
        (work / "out").symlink_to(tmp_path)
        (work / "inner" / "root").symlink_to("../..")
        # behind another link, `..` leads to a different folder than its text suggests
        (work / "twisted").symlink_to("inner/root/../x")
        os.close(os.open(os.fsencode(work) + b"/\xff", os.O_CREAT | os.O_WRONLY))
        (work / "upload").symlink_to(tmp_path / "node-0" / "uploads-here" / "0123")
        os.mkfifo(work / "pipe")
        (work / "fine").write_text("fine")
        await machines.leave()
        (note,) = machines.notes
        assert note.startswith("files of the run were not transferred to the pool and are lost: ")
        for name in ("work/large (its size", f"work/out (a link to {tmp_path}", "work/twisted", "work/\\udcff"):
            assert name in note
        # the notebook already has the uploads, and a pipe has no contents
        assert "upload" not in note.replace("uploads", "")
        assert "pipe" not in note
        assert (machines.there / "work" / "fine").read_text() == "fine"
        assert os.readlink(machines.there / "work" / "inner" / "root") == "../.."
        assert sorted(os.listdir(machines.there / "work")) == ["fine", "inner"]

    asyncio.run(scenario())


def test_a_node_that_is_lost_meanwhile_leaves_no_half(machines_at: Machines):
    async def scenario() -> None:
        machines = machines_at()
        (machines.there / "checkpoints").mkdir()
        (machines.there / "checkpoints" / "0").write_text("earlier")
        (machines.here / "checkpoints").mkdir()
        for number in range(20):
            (machines.here / "checkpoints" / str(number)).write_text("later")
        (machines.here / "checkpoints" / "!latest").symlink_to("1")
        passed = 0

        def lose(message: StoreRunFile) -> bool:
            nonlocal passed
            passed += message.action is Store.STAGED
            return passed < 30

        machines.before = lose
        machines.sender.ranks_exited(RUN)
        async with asyncio.timeout(30):
            while passed < 30:
                await asyncio.sleep(0.005)
        machines.sender.close()
        # a request in flight still arrives
        await asyncio.sleep(0)
        machines.taker.close()
        assert [file.name for file in list_below(machines.there)[0]] == ["checkpoints/0"]
        assert [file.name for file in contents_below(machines.there).files] == ["checkpoints/0"]
        assert not links_below(machines.there)
        assert (machines.there / "checkpoints" / "0").read_text() == "earlier"

    asyncio.run(scenario())


@pytest.mark.parametrize("times", [1, 100])
def test_a_file_that_changes_while_it_is_sent_is_sent_again_or_named(times: int, machines_at: Machines):
    async def scenario() -> None:
        machines = machines_at()
        (machines.there / "checkpoints").mkdir()
        (machines.there / "checkpoints" / "model").write_text("earlier and longer")
        model = machines.here / "checkpoints" / "model"
        model.parent.mkdir()
        model.write_text("first")
        left = times

        def write(message: StoreRunFile) -> bool:
            nonlocal left
            if message.action is Store.STAGED and not message.offset and left:
                left -= 1
                # shorter, or longer
                model.write_text("now" if times == 1 else "x" * (200 - left))
            return True

        machines.before = write
        await machines.leave()
        there = (machines.there / "checkpoints" / "model").read_text()
        if times == 1:
            assert there == "now"
            assert not machines.notes
        else:
            assert there == "earlier and longer"
            assert "checkpoints/model (it changed while it was being sent)" in machines.notes[0]

    asyncio.run(scenario())


def test_the_next_attempt_fetches_all_and_sends_back_only_what_it_changed(machines_at: Machines):
    async def scenario() -> None:
        first = machines_at(1)
        step = first.here / "checkpoints" / "step-1"
        (step / "none").mkdir(parents=True)
        (step / "model").write_text("1")
        (step.parent / "latest").symlink_to("step-1")
        await first.leave()
        second = machines_at(2, attempt=1)
        assert len(second.launch.checkpoints) == 3
        for file in second.launch.checkpoints:
            await second.blobs.run_file(second.launch, file)
        checkpoints = second.here / "checkpoints"
        assert os.readlink(checkpoints / "latest") == "step-1"
        assert (checkpoints / "latest" / "model").read_text() == "1"
        assert (checkpoints / "step-1" / "none").is_dir()
        (checkpoints / "step-2").mkdir()
        (checkpoints / "latest").unlink()
        (checkpoints / "latest").symlink_to("step-2")
        await second.leave()
        stored = [message for message in second.sent if isinstance(message, StoreRunFile)]
        assert [(message.action, message.name) for message in stored] == [
            (Store.LINK, "checkpoints/latest"),
            (Store.FOLDER, "checkpoints/step-2"),
            (Store.PUBLISH, ""),
        ]
        assert os.readlink(second.there / "checkpoints" / "latest") == "step-2"
        assert (second.there / "checkpoints" / "step-1" / "model").read_text() == "1"

    asyncio.run(scenario())


def test_what_the_pool_refuses_is_named(machines_at: Machines):
    async def scenario() -> None:
        machines = machines_at()
        (machines.here / "out").write_text("x")
        # a file occupies the path of the folder for incoming files

        def refuse(message: StoreRunFile) -> bool:
            (machines.there / f"{STAGED}{message.source}").touch()
            return True

        machines.before = refuse
        await machines.leave()
        assert "out (" in machines.notes[0]

    asyncio.run(scenario())


# ---------------------------------------------------------------- the pool's side, and what a node may not do

SOURCE = "0123456789abcdef"


async def stored(taker: NodeFiles, message: StoreRunFile, data: bytes = b"") -> str:
    """Return why the pool refused it."""
    answers: list[NodeFileReply] = []
    taker.on_request(message, (data,), lambda reply, _: answers.append(reply))
    async with asyncio.timeout(30):
        while not answers:
            await asyncio.sleep(0.001)
    return answers[0].problem


def request(name: str, action: Store, target: str = "", size: int | None = None, source: str = SOURCE) -> StoreRunFile:
    return StoreRunFile(
        request=1, run_id=RUN, name=name, offset=0, source=source, action=action, target=target, size=size
    )


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("a", "/etc/passwd"),
        ("a", ".."),
        ("a", "../x"),
        ("a/b", "../../x"),
        ("a/b", "./../../x"),
        ("a/b", "c/../../x"),
        ("a/b", "c/.."),
        ("a", ""),
        ("a", "x\0y"),
        ("../a", "b"),
        ("/a", "b"),
        ("", "b"),
    ],
)
def test_the_pool_makes_no_link_that_leads_out(name: str, target: str, machines_at: Machines):
    async def scenario() -> None:
        machines = machines_at()
        assert await stored(machines.taker, request(name, Store.LINK, target))
        assert not [path for path in machines.there.rglob("*") if path.is_symlink()]

    asyncio.run(scenario())


def test_the_pool_writes_through_no_link(machines_at: Machines, tmp_path: Path):
    async def scenario() -> None:
        machines = machines_at()
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "file").write_text("safe")
        for name in ("folder", "file"):
            (machines.there / name).symlink_to(outside if name == "folder" else outside / "file")
        for name in ("folder/file", "folder/deep/file", "file"):
            assert not await stored(machines.taker, request(name, Store.STAGED, size=2), b"no")
        assert not await stored(machines.taker, request("", Store.PUBLISH))
        assert os.listdir(outside) == ["file"]
        assert (outside / "file").read_text() == "safe"
        # the files replaced the links
        for name in ("folder/file", "folder/deep/file", "file"):
            assert (machines.there / name).read_text() == "no"
        # nor through a staged link
        assert not await stored(machines.taker, request("folder", Store.LINK, "file"))
        assert await stored(machines.taker, request("folder/x", Store.STAGED, size=1), b"x")
        assert not await stored(machines.taker, request("", Store.PUBLISH))
        assert os.readlink(machines.there / "folder") == "file"

    asyncio.run(scenario())


@pytest.mark.parametrize("source", ["", "..", "x/../..", "0/1", "A" * 16, "0" * 33])
@pytest.mark.parametrize("action", [action for action in Store if action is not Store.PART])
def test_the_pool_stages_only_below_a_valid_id(action: Store, source: str, machines_at: Machines):
    async def scenario() -> None:
        machines = machines_at()
        assert await stored(machines.taker, request("a", action, "b", source=source))
        assert not os.listdir(machines.there)

    asyncio.run(scenario())
