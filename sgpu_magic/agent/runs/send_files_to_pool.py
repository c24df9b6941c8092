"""Sends run files to a pool on another machine and removes them from this node.

    logs        as they grow, a few times a second
    results     as soon as a rank returns them; `RunEnded` waits for them
    the rest    when the ranks are gone. `DevicesFree` is reported before, `RanksGone` afterwards. These files appear at
                the pool together, when the last one has arrived; a note names those that could not be sent

Each chunk is kept until the pool has confirmed it, since another pool service may take over meanwhile.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sgpu_magic.agent import faults
from sgpu_magic.agent.blobs import UPLOADS_HERE
from sgpu_magic.agent.faults import call_in_background
from sgpu_magic.agent.reports import EventReports, FileAnswer, FileRequests
from sgpu_magic.config import Settings
from sgpu_magic.files.run_directory import contents_below, open_below
from sgpu_magic.wire.events import EventBody, Noted, RunEnded
from sgpu_magic.wire.files import (
    CHECKPOINTS,
    CHUNK_BYTES,
    EVENTS,
    TRACKING,
    WINDOW,
    WORK,
    RunFile,
    Store,
    StoreRunFile,
    work_folders,
)
from sgpu_magic.wire.node import Launch

_LOG = re.compile(r"rank-\d+\.log")
_RESULT = re.compile(r"result-\d+\.bin")
_LOGS_EVERY_S = 0.25
# the pool writes these itself
_POOLS_OWN = frozenset({EVENTS, TRACKING})
# for a multi-node run, only the first node sends these
_OF_FIRST_PART = frozenset({"run.json", "cell.py", "_air.py", "key", "payload.bin"})
_NAMED = 20
# attempts to send a file that changes meanwhile
_TRIES = 3
# files sent at once: most are small, and each waits for the pool's answer
_AT_ONCE = 8
# made for every run
_OWN_FOLDERS = frozenset({WORK, CHECKPOINTS})
# precision with which file systems store modification times
_SAME_TIME_S = 1e-3
# links to the code on this node
_CODE = "code/"


class _FarRun(msgspec.Struct, eq=False):
    """A run whose directory is on another machine.

    Args:
        launch: The launch as the pool sent it.
        directory: The run's directory on this node.
        source: A random id of this node's copy of the run's files.
    """

    launch: Launch
    directory: Path
    source: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))
    sent_bytes: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    results: list[asyncio.Task[str | None]] = msgspec.field(default_factory=list[asyncio.Task[str | None]])
    # `RunEnded` and later events, while `RunEnded` waits for files
    held: deque[Callable[[], None]] | None = None
    logs: asyncio.Task[None] | None = None
    ending: asyncio.Task[None] | None = None
    leaving: asyncio.Task[None] | None = None
    # why files could not be sent to the pool, by name
    left: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    lock: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)

    def part_of(self, name: str) -> StoreRunFile:
        """Return the request that sends the beginning of a growing file."""
        return StoreRunFile(request=0, run_id=self.launch.spec.run_id, name=name, offset=0, source=self.source)


class FilesToPool:
    """Sends the files of runs to a pool on another machine. Used in the loop's thread.

    Args:
        settings: The pool's settings.
        requests: Sends parts of files to the pool.
        reports: Reports events to the pool service.
    """

    def __init__(self, settings: Settings, requests: FileRequests, reports: EventReports) -> None:
        self._reports = reports
        self._runs_path = settings.runs_path
        self._most_bytes = settings.run_files_bytes
        # a rank's working directory has links to them; the notebook has the files themselves
        self._uploads = f"{settings.state_path / UPLOADS_HERE}/"
        self._requests = requests
        self._turns = asyncio.Semaphore(WINDOW)
        self._runs: dict[str, _FarRun] = {}

    def prepare_run(self, launch: Launch) -> Launch:
        """Return the launch with a directory on this node, and start to send its logs."""
        if not launch.far:
            return launch
        directory = self._runs_path / launch.spec.run_id
        run = self._runs[launch.spec.run_id] = _FarRun(launch, directory)
        run.logs = faults.in_background(self._follow_logs(run))
        return msgspec.structs.replace(launch, run_dir=str(directory))

    def as_ordered(self, launch: Launch) -> Launch:
        """Return the launch with the run's directory at the pool."""
        run = self._runs.get(launch.spec.run_id)
        return launch if run is None else msgspec.structs.replace(launch, run_dir=run.launch.run_dir)

    def take_result(self, run_id: str, rank: int, descriptor: int) -> str:
        """Send a rank's result to the pool and return its path there.

        Args:
            run_id: The run.
            rank: The rank.
            descriptor: The result's descriptor, owned by this object from now on.
        """
        run, name = self._runs[run_id], f"result-{rank}.bin"
        run.results.append(asyncio.ensure_future(self._send_whole(run.part_of(name), descriptor)))
        return os.path.join(run.launch.run_dir, name)

    def report(self, run_id: str, body: EventBody, frames: Sequence[bytes]) -> None:
        """Report an event. `RunEnded` and all events after it wait until the run's logs and results are at the pool."""
        run = self._runs.get(run_id)
        say = functools.partial(self._reports.report, run_id, body, frames)
        if run is None:
            say()
        elif run.held is not None:
            run.held.append(say)
        elif isinstance(body, RunEnded):
            run.held = deque([say])
            if run.launch.part is not None:
                self._reports.part_ended(run_id)
            run.ending = faults.in_background(self._end(run))
        else:
            say()

    def ranks_exited(self, run_id: str) -> None:
        """Report that the run's devices are free, and that it is gone once its files are at the pool."""
        run = self._runs.get(run_id)
        if run is None:
            self._reports.ranks_exited(run_id)
            return
        if not run.launch.spec.session:
            self._reports.devices_free(run_id)
        run.leaving = faults.in_background(self._finish(run))

    def close(self) -> None:
        """Cancel all transfers and remove the runs' directories on this node."""
        for run in self._runs.values():
            for task in (run.logs, run.ending, run.leaving, *run.results):
                if task is not None:
                    task.cancel()
            shutil.rmtree(run.directory, ignore_errors=True)

    # ------------------------------------------------------------ internals

    async def _follow_logs(self, run: _FarRun) -> None:
        while True:
            await asyncio.sleep(_LOGS_EVERY_S)
            await self._send_logs(run)

    async def _send_logs(self, run: _FarRun) -> None:
        """Send new bytes of the logs."""
        async with run.lock:
            try:
                names = [name for name in os.listdir(run.directory) if _LOG.fullmatch(name)]
            except OSError:
                # not created yet, or unreadable: then `_leave` reports it at the end
                return
            for name in names:
                run.left.pop(name, None)
                try:
                    problem = await self._send_log(run, name)
                except OSError as error:
                    problem = error.strerror or str(error)
                if problem:
                    run.left[name] = problem

    async def _send_log(self, run: _FarRun, name: str) -> str | None:
        descriptor = open_below(run.directory, name)
        try:
            begin, end = run.sent_bytes.get(name, 0), os.fstat(descriptor).st_size
            problem = await self._send_part(run.part_of(name), descriptor, begin, end)
            if not problem:
                run.sent_bytes[name] = end
            return problem
        finally:
            os.close(descriptor)

    async def _end(self, run: _FarRun) -> None:
        try:
            await self._send_logs(run)
            problems = [str(each) for each in await asyncio.gather(*run.results, return_exceptions=True) if each]
            if problems:
                self._note(run, f"the results of the ranks could not be transferred to the pool: {problems[0]}")
        finally:
            # `RunEnded` is reported even if files were lost
            held, run.held = run.held, None
            for each in held or ():
                each()

    async def _finish(self, run: _FarRun) -> None:
        try:
            if run.logs is not None:
                run.logs.cancel()
            if run.ending is not None:
                await asyncio.wait([run.ending])
            await self._send_logs(run)
            await self._send_all(run)
            await call_in_background(lambda: shutil.rmtree(run.directory, ignore_errors=True), "sgpu-remove")
        finally:
            if run.left:
                named = ", ".join(f"{name} ({problem})" for name, problem in [*run.left.items()][:_NAMED])
                more = f" and {len(run.left) - _NAMED} more" if len(run.left) > _NAMED else ""
                self._note(run, f"files of the run were not transferred to the pool and are lost: {named}{more}")
            if self._runs.get(run.launch.spec.run_id) is run:
                del self._runs[run.launch.spec.run_id]
            self._reports.ranks_exited(run.launch.spec.run_id)

    async def _send_all(self, run: _FarRun) -> None:
        """Stage all files at the pool, then let it move them into place, so that no partial state is visible."""
        files = await self._files(run)
        if not files:
            return
        missing = {file.name: "the transfer was interrupted" for file in files}
        following = iter(files)

        async def send() -> None:
            for file in following:
                if problem := await self._send_file(run, file):
                    run.left[file.name] = missing[file.name] = problem
                else:
                    run.left.pop(file.name, None)

        try:
            async with asyncio.TaskGroup() as senders:
                for _ in range(_AT_ONCE):
                    senders.create_task(send())
            publish = msgspec.structs.replace(run.part_of(""), action=Store.PUBLISH)
            problem, _ = await self._requests.ask(publish, (b"",))
            missing = dict.fromkeys(missing, problem) if problem else {}
        finally:
            # report the files that have not arrived, even after an error
            run.left |= missing

    def _note(self, run: _FarRun, text: str) -> None:
        self._reports.report(run.launch.spec.run_id, Noted(text=text), ())

    async def _files(self, run: _FarRun) -> list[RunFile]:
        found: list[RunFile] = []
        try:
            contents = await call_in_background(lambda: contents_below(run.directory), "sgpu-list")
            found = contents.files
            run.left |= {name: why for name, why in contents.unreadable.items() if not name.startswith(_CODE)}
            run.left |= {
                name: f"a link to {target}, outside of the run's directory"
                for name, target in contents.outward_links.items()
                if not name.startswith(_CODE) and not target.startswith(self._uploads)
            }
        except FileNotFoundError:
            pass
        except OSError as error:
            run.left["its directory"] = error.strerror or str(error)
        part = run.launch.part
        # nodes that did not change a fetched checkpoint must not overwrite one that another node has changed
        unchanged = {file.name: file for file in run.launch.checkpoints}
        others = _POOLS_OWN if part is None or part.index == 0 else _POOLS_OWN | _OF_FIRST_PART
        return [
            file
            for file in found
            if file.name not in others
            and not (file.folder and file.name in _OWN_FOLDERS)
            and not _LOG.fullmatch(file.name)
            and not _RESULT.fullmatch(file.name)
            and not file.name.startswith(_CODE)
            and not _is_as_fetched(file, unchanged.get(file.name))
        ]

    async def _send_file(self, run: _FarRun, file: RunFile) -> str | None:
        """Send a file; return why it did not arrive, None for success."""
        if file.size > self._most_bytes:
            return f"its size is {file.size / 1e9:,.1f} GB, more than the setting run_files_bytes allows"
        staged = run.part_of(_name_at_pool(run.launch, file.name))
        if file.folder or file.target:
            action = Store.FOLDER if file.folder else Store.LINK
            target = _target_at_pool(run.launch, file)
            return (await self._requests.ask(msgspec.structs.replace(staged, action=action, target=target), (b"",)))[0]
        part = msgspec.structs.replace(staged, action=Store.STAGED, executable=file.executable)
        problem: str | None = None
        for _ in range(_TRIES):
            try:
                descriptor = open_below(run.directory, file.name)
                before = os.fstat(descriptor)
                problem = await self._send_whole(part, descriptor)
                unchanged = _version(os.lstat(run.directory / file.name)) == _version(before)
            except OSError as error:
                problem, unchanged = error.strerror or str(error), True
            if unchanged and problem is None:
                return None
            # a partial file must not replace an earlier complete one
            await self._requests.ask(msgspec.structs.replace(staged, action=Store.DROP), (b"",))
            if unchanged:
                return problem
        return problem or "it changed while it was being sent"

    async def _send_whole(self, part: StoreRunFile, descriptor: int) -> str | None:
        """Send a file and close its descriptor; return why the pool refused it, None for success."""
        try:
            size = os.fstat(descriptor).st_size
            part = msgspec.structs.replace(part, size=size)
            problem = await self._send_part(part, descriptor, 0, size)
            return problem or (await self._requests.ask(msgspec.structs.replace(part, offset=size), (b"",)))[0]
        finally:
            os.close(descriptor)

    async def _send_part(self, part: StoreRunFile, descriptor: int, begin: int, end: int) -> str | None:
        """Send bytes of a file and return why the pool refused them, None for success."""
        waiting: deque[asyncio.Future[FileAnswer]] = deque()
        for at in range(begin, end, CHUNK_BYTES):
            data = os.pread(descriptor, min(CHUNK_BYTES, end - at), at)
            await self._turns.acquire()
            answer = self._requests.ask(msgspec.structs.replace(part, offset=at), (data,))
            answer.add_done_callback(lambda _: self._turns.release())
            waiting.append(answer)
            while waiting and waiting[0].done():
                if problem := waiting.popleft().result()[0]:
                    return problem
        return next((problem for problem, _ in await asyncio.gather(*waiting) if problem), None)


def _version(status: os.stat_result) -> tuple[int, int, int]:
    """Return what differs if a file was written or replaced meanwhile."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def _target_at_pool(launch: Launch, file: RunFile) -> str:
    """Return a link's target at the pool, where names may differ."""
    if not file.target:
        return ""
    end = os.path.normpath(os.path.join(os.path.dirname(file.name), file.target))
    folder = os.path.dirname(_name_at_pool(launch, file.name))
    return os.path.relpath(f"/{_name_at_pool(launch, end)}", f"/{folder}")


def _is_as_fetched(file: RunFile, fetched: RunFile | None) -> bool:
    if fetched is None or (file.size, file.target, file.folder) != (fetched.size, fetched.target, fetched.folder):
        return False
    if file.target or file.folder:
        return True
    return abs(file.changed_at - fetched.changed_at) < _SAME_TIME_S


def _name_at_pool(launch: Launch, name: str) -> str:
    """Return a file's name at the pool, where each node has its own working directory."""
    if launch.part is None or (name != WORK and not name.startswith(f"{WORK}/")):
        return name
    if name == WORK:
        return work_folders(launch.part.index)[0]
    return f"{work_folders(launch.part.index)[0]}/{name.removeprefix(f'{WORK}/')}"
