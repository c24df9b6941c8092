"""A run whose packages, code and variables are being prepared on this node, before its ranks start.

launch -> everything is ready -> handed on (the launch of a fresh run, a session or a cell in one)
       -> preparation failed  -> ended(failed) -> gone
       -> asked to end        -> ended(...)    -> gone

Inputs that the notebook has sent are fetched from the pool's store: the payload into memory, code and wheels into
files.
"""

from __future__ import annotations

import asyncio
import functools
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from sgpu_magic.agent import faults
from sgpu_magic.agent.blobs import BlobCache, BlobMissing, Uploaded
from sgpu_magic.agent.faults import call_in_background
from sgpu_magic.agent.node_context import CodeBundles
from sgpu_magic.agent.reports import FileRequests
from sgpu_magic.agent.runs.node_run import Attempt, NodeRun
from sgpu_magic.agent.runs.run_memory import ArrivedPayload, close_payload, lay_out
from sgpu_magic.config import Settings, private_dir
from sgpu_magic.files.atomic_file import appearing
from sgpu_magic.files.content_store import join_blobs, piece_sizes
from sgpu_magic.packages.node.store import Built
from sgpu_magic.wire.attachments import CodeBundle, StoredPayload, Wheel
from sgpu_magic.wire.base import FailureKind, RunKind, RunLimit, RunState
from sgpu_magic.wire.client import ReclaimPayload
from sgpu_magic.wire.codec import Order
from sgpu_magic.wire.events import EnvironmentMoved, RunEnded
from sgpu_magic.wire.node import Launch, PeerFailed
from sgpu_magic.wire.option_text import Text
from sgpu_magic.wire.rank_events import Failure, RankStack

if TYPE_CHECKING:
    from sgpu_magic.agent.launch import RunLauncher


class PreparingRun(NodeRun):
    """Holds a launch until its ranks can be started.

    Args:
        attempt: The launch and its payload.
        launches: Builds its packages, fetches the notebook's code and files, and starts the ranks.

    Raises:
        OSError: The run's directory can't be made.
    """

    def __init__(self, attempt: Attempt, launches: RunLauncher) -> None:
        super().__init__(attempt, launches.here)
        self.frames = attempt.frames
        self._launches = launches
        self._environments, self._inputs = launches.environments, launches.inputs
        self._arriving: asyncio.Task[None] | None = None
        # the prepared environment and code, until the payload has arrived too
        self._ready: tuple[Built | None, EnvironmentMoved | None, Mapping[str, str]] | None = None

    def start(self) -> None:
        if needs_blobs(self.launch):
            self._arriving = faults.in_background(self._arrive())
        else:
            self._begin()

    def _begin(self) -> None:
        """Prepare the environment and the code; archives and wheels are on this node."""
        stored = isinstance(self.launch.payload.source, StoredPayload)
        if self.launch.spec.kind is not RunKind.SESSION and not stored:
            try:
                # preparation may take minutes, and a detached run's notebook may exit meanwhile
                self.files.memory.open_payload()
            except OSError as error:
                self.fail_whole(FailureKind.INTERNAL, f"the run could not be started on {self._host}: {error}.")
                return
        self.files.describe(RunState.PREPARING)
        environment = self.launch.environment
        if environment is not None and self._environments.needed(self.launch):
            self._environments.wait(self.run_id, environment, self)
        else:
            self._unpack_code(None)

    # ------------------------------------------------------------ from the environments

    def environment_moved(self, moved: EnvironmentMoved) -> None:
        with faults.guarded(self.faulted):
            if not self.ended:
                self._say(moved)

    def environment_ready(self, built: Built, moved: EnvironmentMoved) -> None:
        with faults.guarded(self.faulted):
            if not self.ended:
                self._unpack_code(built, moved)

    def environment_failed(self, message: Text) -> None:
        with faults.guarded(self.faulted):
            self.fail_whole(FailureKind.ENVIRONMENT, message)

    # ------------------------------------------------------------ internals

    async def _arrive(self) -> None:
        source = self.launch.payload.source
        try:
            self.launch = await self._inputs.fetch(self.launch)
            self._begin()
            if isinstance(source, StoredPayload) and self.files.memory.payload_fd < 0:
                # the payload arrives while the packages are being built
                self.files.memory.take_payload(*await self._inputs.payload(self.launch, source))
        except (BlobMissing, OSError, ValueError) as error:
            text = f"the run's variables can't be transferred to {self._host}: {error}."
            self.fail_whole(FailureKind.INTERNAL, text)
            return
        self._arriving = None
        if self._ready is not None and not self.ended:
            self._hand_on(*self._ready)

    def _unpack_code(self, built: Built | None, moved: EnvironmentMoved | None = None) -> None:
        if self.launch.spec.in_session or not self.launch.code:
            # a session's cell gets its code when it is launched in the session
            self._hand_on(built, moved, {})
            return
        unpack = functools.partial(self._inputs.code.unpack, self.run_id, self.launch.code)
        unpacked = call_in_background(unpack, "sgpu-code")

        def done() -> None:
            error = unpacked.exception()
            if self.ended:
                return
            if error is None:
                self._hand_on(built, moved, unpacked.result())
            else:
                self.fail_whole(FailureKind.ENVIRONMENT, str(error))

        unpacked.add_done_callback(lambda future: done())

    def _hand_on(self, built: Built | None, moved: EnvironmentMoved | None, code: Mapping[str, str]) -> None:
        if self._arriving is not None:
            self._ready = built, moved, code
            return
        if self._waits_for_session():
            return
        if moved is not None:
            self._say(moved)
        # the run that starts the ranks takes over the payload
        self.ended = self.has_exited = True
        self._environments.release(self.run_id)
        self._launches.prepared(self, built, code)
        self._inputs.remove_launch_files(self.run_id)

    def _waits_for_session(self) -> bool:
        """Whether the session executes a cell that came over its line; the run is handed on when that has ended."""

        def line_is_free() -> None:
            with faults.guarded(self.faulted):
                if not self.ended:
                    self._hand_on(None, None, {})

        session = self._launches.runs.session(self.launch.spec.session) if self.launch.spec.in_session else None
        return session is not None and session.when_line_is_free(line_is_free)

    def fail_whole(self, kind: FailureKind, message: Text) -> None:
        """Fail the run and stop the preparation."""
        if not self.ended:
            self._end(RunState.FAILED, "", self._failure_now(kind, message))

    def _end(self, state: RunState, reason: Text, failure: Failure | None = None) -> None:
        self.ended = True
        self._final_state = state
        if self._arriving is not None:
            self._arriving.cancel()
        self._inputs.remove_launch_files(self.run_id)
        self._environments.release(self.run_id)
        self._say(RunEnded(state=state, reason=str(reason), limit=self._limit, failure=failure, starting_s=self.age_s))
        self._finish()

    # ------------------------------------------------------------ the agent's interface (NodeRun)

    def end_as(self, state: RunState, reason: Text, limit: RunLimit | None = None) -> None:
        """End at once, since there are no ranks."""
        if not self.ended:
            self._limit = limit
            self._end(state, reason)

    @property
    def state(self) -> RunState:
        return self._final_state if self.ended else RunState.PREPARING

    def on_order(self, message: Order, frames: Sequence[bytes]) -> None:
        match message:
            case ReclaimPayload() if self.has_exited:
                self.files.memory.give_payload_up()
            case PeerFailed() if not self.ended:
                self._end(RunState.FAILED, "")
            case _:
                super().on_order(message, frames)

    def take_stacks(self, done: Callable[[tuple[RankStack, ...]], None]) -> None:
        problem = "it has not started yet: the run's packages are being prepared"
        done(tuple(RankStack(rank=rank, problem=problem) for rank in self.launch.spec.rank_numbers))


# ---------------------------------------------------------------- inputs from the notebook


def needs_blobs(launch: Launch) -> bool:
    """Whether the launch needs anything from the pool's store before it can start."""
    wheels = launch.environment.wheels if launch.environment is not None else ()
    if any(upload.manifest for upload in launch.uploads) or launch.checkpoints:
        return True
    return isinstance(launch.payload.source, StoredPayload) or any(each.blobs for each in (*launch.code, *wheels))


Item = TypeVar("Item", CodeBundle, Wheel)


class LaunchInputs:
    """Fetches the notebook's code and files that launches need.

    Args:
        settings: The pool's settings.
        requests: Requests parts of files from the pool.

    Attributes:
        blobs: Fetches blobs.
        uploaded: Assembles uploaded folders and files.
        code: Unpacks local code.
    """

    def __init__(self, settings: Settings, requests: FileRequests) -> None:
        self._folder = settings.state_path / "arrivals"
        self.blobs = BlobCache(settings, requests)
        self.uploaded = Uploaded(settings, self.blobs)
        self.code = CodeBundles(settings)

    async def fetch(self, launch: Launch) -> Launch:
        """Fetch code, wheels, checkpoints and uploads; return the launch with their paths on this node.

        Code archives and wheels stay until `over`, uploads until `release`.

        Raises:
            BlobMissing: A blob can't be fetched.
            OSError: A file can't be written.
        """
        code = [await self._on_disk(launch, bundle, f"code-{at}") for at, bundle in enumerate(launch.code)]
        launch = msgspec.structs.replace(launch, code=tuple(code))
        environment = launch.environment
        if environment is not None and environment.wheels:
            wheels = [await self._on_disk(launch, wheel, f"wheel-{at}") for at, wheel in enumerate(environment.wheels)]
            environment = msgspec.structs.replace(environment, wheels=tuple(wheels))
            launch = msgspec.structs.replace(launch, environment=environment)
        for file in launch.checkpoints:
            await self.blobs.run_file(launch, file)
        return await self.uploaded.arrive(launch) if launch.uploads else launch

    async def payload(self, launch: Launch, source: StoredPayload) -> ArrivedPayload:
        """Fetch the payload's parts.

        Returns:
            What `RunMemory.take_payload` takes.

        Raises:
            BlobMissing: A part can't be fetched.
            OSError: There is not enough space.
        """
        paths = await asyncio.gather(*(self.blobs.path(launch, part.digest, part.size) for part in source.parts))
        arriving = call_in_background(lambda: lay_out(launch.run_dir, source, paths), "sgpu-arrival")
        try:
            return await asyncio.shield(arriving)
        except asyncio.CancelledError:
            arriving.add_done_callback(_discard)
            raise

    def remove_launch_files(self, run_id: str) -> None:
        """Remove the launch's archives and wheels: its ranks start, or it has ended."""
        self.blobs.release(run_id)
        shutil.rmtree(self._folder / run_id, ignore_errors=True)

    def release(self, run_id: str) -> None:
        """Release the run's code and uploads: its ranks are gone."""
        self.code.release(run_id)
        self.uploaded.release(run_id)

    # ------------------------------------------------------------ internals

    async def _on_disk(self, launch: Launch, each: Item, name: str) -> Item:
        if not each.blobs:
            return each
        blobs = zip(each.blobs, piece_sizes(each.size), strict=True)
        paths = [await self.blobs.path(launch, digest, size) for digest, size in blobs]
        if len(paths) == 1:
            return msgspec.structs.replace(each, path=str(paths[0]))
        target = private_dir(self._folder / launch.spec.run_id) / name
        await call_in_background(lambda: _join(paths, target), "sgpu-arrival")
        return msgspec.structs.replace(each, path=str(target))


def _discard(arriving: asyncio.Future[ArrivedPayload]) -> None:
    """Close a payload whose run was cancelled."""
    if arriving.exception() is None:
        close_payload(*arriving.result())


def _join(paths: Sequence[Path], target: Path) -> None:
    with appearing(target) as file:
        join_blobs(file.fileno(), [(path, path.stat().st_size) for path in paths])
