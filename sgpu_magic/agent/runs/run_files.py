"""What a run has on this node: its directory, its payload and its results."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sgpu_magic import __version__
from sgpu_magic.agent.runs.run_memory import RunMemory
from sgpu_magic.config import host_name
from sgpu_magic.files.atomic_file import has_content, link_or_copy, write_whole
from sgpu_magic.system.message_stream import MessageStream
from sgpu_magic.wire.attachments import FilePayload, InlinePayload, Payload, SharedPayload, StoredPayload
from sgpu_magic.wire.base import RunState, check_id
from sgpu_magic.wire.codec import printable
from sgpu_magic.wire.events import EventBody, Noted, PayloadReleased
from sgpu_magic.wire.files import KEY, PAYLOAD
from sgpu_magic.wire.rank import FromRank
from sgpu_magic.wire.run import RUN_RECORD, SETTINGS, UNDER_WAY, RankResult, RunRecord

if TYPE_CHECKING:
    from sgpu_magic.agent.runs.node_run import AgentServices, Attempt

_AIR = b'''"""The run of this directory again, outside the notebook:

    torchrun --nproc-per-node RANKS _air.py

It executes cell.py on as many ranks as the run had, with the variables of payload.bin, as the notebook shipped them.
"""

from pathlib import Path

from sgpu_magic.worker import standalone

if __name__ == "__main__":
    standalone.run(Path(__file__).parent)
'''
# beside the runs' directories, which contain links to it
_SHARED_AIR = ".air.py"
_AIR_NAME = "_air.py"
_SHARED_SETTINGS = ".settings-"


class AttemptFiles:
    """The directory and memory of one attempt of a run. A new attempt reuses the previous attempt's payload.

    Args:
        attempt: The attempt.
        here: What all runs of the agent share.
        say: Reports an event.

    Attributes:
        path: The run's directory.
        memory: The memory files of the payload and the results.
        frames: Raw frames of the launch.
        inline: Whether the payload is the first of `frames`; otherwise it is behind `memory.payload_fd`.

    Raises:
        OSError: The run's directory can't be made.
    """

    def __init__(self, attempt: Attempt, here: AgentServices, say: Callable[[EventBody], None]) -> None:
        self._launch, before = attempt.launch, attempt.predecessor
        launch = self._launch
        check_id(launch.spec.run_id)
        self.path = Path(launch.run_dir)
        self._record = RunRecord(
            spec=launch.spec,
            executable=launch.interpreter.executable,
            cwd=launch.context.cwd,
            lease=launch.lease,
            payload_layout=launch.payload.layout,
            payload_kept=False,
            payload_note=UNDER_WAY,
            state=RunState.STARTING,
            sys_path=launch.context.sys_path,
            installed=launch.context.installed,
            host=host_name(),
            version=__version__,
        )
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._far = here.far if launch.far else None
        self._say = say
        self._not_written = False
        self._released: PayloadReleased | None = None
        if before is not None and before.has_exited and before.files.memory.at_hand:
            # reuse this payload whatever the launch's payload source says
            self.memory, self.frames, self.inline = before.files.memory, before.files.frames, before.files.inline
            self.memory.close_results()
            self.memory.on_released = self._payload_released
        else:
            source = launch.payload.source
            self.frames = attempt.frames
            self.inline = isinstance(source, InlinePayload)
            keep_bytes = here.settings.keep_payload
            self.memory = RunMemory(source, self.path, here.copier, keep_bytes, self._payload_released)

    def take_result(self, result: RankResult, stream: MessageStream[FromRank]) -> Payload | None:
        """Take over a result's memory file from `stream` and return where a notebook finds the result."""
        payload = result.payload
        if payload is None:
            return None
        match payload.source:
            case SharedPayload(size=size):
                (descriptor,) = stream.take_descriptors(1)
            case FilePayload(path=path, size=size) if self._far is not None:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            case _:
                return payload
        status = os.fstat(descriptor)
        if self._far is not None:
            path = self._far.take_result(self._launch.spec.run_id, result.rank, descriptor)
            source = FilePayload(path=path, size=status.st_size)
        else:
            self.memory.hold_result(result.rank, descriptor)
            source = SharedPayload(pid=os.getpid(), fd=descriptor, size=size, inode=status.st_ino)
        return Payload(source=source, layout=payload.layout)

    def not_written(self, text: str) -> None:
        """Report that a file of the run's directory could not be written, once: on a full disk, more will follow."""
        if not self._not_written:
            self._not_written = True
            self._say(Noted(text=text))

    @contextlib.contextmanager
    def _writing(self, what: str) -> Generator[None]:
        """Report that `what` could not be written if the block raises OSError."""
        try:
            yield
        except OSError as error:
            self.not_written(f"{what} could not be written: {error.strerror}")

    def log_path(self, rank: int) -> str:
        return str(self.path / f"rank-{rank}.log")

    def describe(self, state: RunState = RunState.STARTING) -> None:
        """Write the run's directory except the large parts. Every file is complete when it appears."""
        with self._writing(f"the run's directory {self.path}"):
            write_whole(self.path / "cell.py", self._launch.spec.cell.body.encode("utf-8", "surrogateescape"))
            write_whole(self.path / KEY, self._launch.context.key)
            self._link(_SHARED_AIR, _AIR_NAME, _AIR)
            if self._launch.context.settings:
                self._link_settings()
            if self.inline:
                write_whole(self.path / PAYLOAD, self.frames[0])
                self._note(payload_kept=True, payload_note="", state=state)
            else:
                self._note(state=state)

    def ended(self, state: RunState) -> None:
        """Record the run's final state."""
        if self._far is not None or isinstance(self.memory.source, StoredPayload):
            self.memory.close_stored_payload()
        with self._writing("run.json"):
            self._note(state=state)

    def _note(self, **changes: Any) -> None:
        """Update fields of the record and write `run.json`."""
        self._record = msgspec.structs.replace(self._record, **changes)
        # written last: a reader that sees here that the run is over finds all other files final
        text = msgspec.json.format(msgspec.json.encode(printable(self._record)), indent=2)
        write_whole(self.path / RUN_RECORD, text)

    def _link_settings(self) -> None:
        """Link the file with the notebook's settings, which few runs change, and remove those that no run has."""
        data = msgspec.json.format(msgspec.json.encode(self._launch.context.settings, order="sorted"), indent=2)
        if not self._link(f"{_SHARED_SETTINGS}{hashlib.sha256(data).hexdigest()[:16]}", SETTINGS, data):
            # the settings are the same as before
            return
        for other in self.path.parent.glob(f"{_SHARED_SETTINGS}*"):
            with contextlib.suppress(OSError):
                if other.lstat().st_nlink == 1:
                    other.unlink()

    def _link(self, shared_name: str, name: str, data: bytes) -> bool:
        """Link a file that all runs share into the directory; a copy in each would take a sixth of a small run.

        Returns:
            Whether the shared file was written now.
        """
        if self._launch.far:
            # the directory is sent to the pool, and nothing stays here
            write_whole(self.path / name, data)
            return False
        shared = self.path.parent / shared_name
        try:
            if not (is_there := has_content(shared, data)):
                # read-only, since a change in one run's directory would affect all runs
                write_whole(shared, data, 0o400)
            link_or_copy(shared, self.path / name)
            return not is_there
        except FileNotFoundError:
            # another run has removed it meanwhile
            write_whole(self.path / name, data, 0o400)
            return False

    def _payload_released(self, why: str) -> None:
        kept = not why
        try:
            self._note(payload_kept=kept, payload_note=why)
        except OSError as error:
            why = f"run.json could not be written: {error.strerror}"
        self._released = PayloadReleased(kept=kept, reason=why)
        self._say(self._released)

    def repeat_released(self) -> None:
        """Report the payload's release again: the last service may have died while it waited for other nodes."""
        if self._released is not None:
            self._say(self._released)
