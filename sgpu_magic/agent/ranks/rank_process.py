"""One rank as the agent sees it: its process, socket, output, files and stack.

The stack is read from a file to which the rank writes (see `wire.codec`), in faulthandler's format; frames of the
notebook's cells are recognized. Nothing here blocks.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import select
import signal
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from sgpu_magic.agent.ranks.rank_output import RankOutput
from sgpu_magic.system import processes
from sgpu_magic.system.message_stream import MessageStream
from sgpu_magic.wire.base import new_id
from sgpu_magic.wire.codec import AREA_BYTES, read_area, sampled_at
from sgpu_magic.wire.rank import FromRank
from sgpu_magic.wire.rank_events import StackFrame
from sgpu_magic.wire.run import CellSource

_CELL_PREFIX = "<ipython-input-"
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
# Python 3.13 adds the thread's name, and 3.14 its state
_THREAD = re.compile(r"^(?P<current>Current thread|Thread) 0x(?P<ident>[0-9a-f]+).*\(most recent call first\):$")
_SINGLE = "Stack (most recent call first):"
_OURS = f"{os.sep}sgpu_magic{os.sep}worker{os.sep}"
_TORCH = f"{os.sep}torch{os.sep}"
_TORCH_DISTRIBUTED = f"{_TORCH}distributed{os.sep}"


class RankProcess:
    """The agent's resources for one rank; they outlive the process."""

    def __init__(self, rank: int, output: RankOutput, stack_file: StackFile) -> None:
        self.rank = rank
        self.output = output
        self.stack_file = stack_file
        self.pid: int | None = None
        self.pidfd: int | None = None
        # reaped before the agent could open a pidfd; the zygote has yet to report its status
        self.is_reaped = False
        # killed as soon as it is forked
        self.is_doomed = False
        # SIGKILL was sent to it
        self.is_killed = False
        self.exit_status: int | None = None
        # it is dead, but its descendants are still being ended
        self.has_descendants = False
        self.peak_bytes = 0
        self.stream: MessageStream[FromRank] | None = None
        # messages received before the zygote reported its pid
        self.early_messages: list[tuple[FromRank, Sequence[bytes]]] = []

    @property
    def alive(self) -> bool:
        return self.pid is not None and self.exit_status is None

    @property
    def has_exited(self) -> bool:
        """Whether it has ended, with all its descendants; true before it is forked."""
        return not self.alive and not self.has_descendants

    def is_dead(self) -> bool:
        """Whether it has ended, even if the zygote has not reported it yet."""
        if self.exit_status is not None or self.pidfd is None:
            return not self.alive
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def is_ending(self) -> bool:
        """Whether it has ended or is ending: a killed process's main thread ends before its pidfd becomes readable."""
        return self.pid is not None and (self.is_dead() or not processes.is_alive(self.pid))

    def close(self) -> None:
        """Free the agent's resources; the process must be gone or exiting."""
        if self.stream is not None:
            self.stream.close()
            self.stream = None
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        self.output.close()
        self.stack_file.close()

    def signal(self, number: int, *, whole_session: bool = False) -> None:
        """Signal the rank, or its whole process group.

        SIGKILL to a rank that is not forked yet is sent after the fork; other signals are dropped. The zygote may reap
        a dead rank before the agent knows; the pidfd guarantees that the pid is still the rank's.

        Args:
            number: The signal.
            whole_session: Whether to signal the rank's process group.
        """
        if self.pid is None:
            self.is_doomed = self.is_doomed or number == signal.SIGKILL
            return
        if self.exit_status is not None:
            return
        self.is_killed = self.is_killed or number == signal.SIGKILL
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if whole_session:
                if self.pidfd is not None:
                    signal.pidfd_send_signal(self.pidfd, 0)
                # just after the fork it has no process group of its own yet
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, number)
                    return
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, number)
            else:
                os.kill(self.pid, number)


# ---------------------------------------------------------------- the store of its group


class GroupStore:
    """The store file for the ranks' rendezvous: a memory file, or a named file on systems without memory files.

    Args:
        scratch: Directory for a named file.
    """

    def __init__(self, scratch: Path) -> None:
        self.path = ""
        self._fd = -1
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create("sgpu-store", os.MFD_CLOEXEC)
        else:
            self.path = str(scratch / f"store-{new_id()}")

    @property
    def descriptors(self) -> list[int]:
        """Descriptors to send to a rank; empty for a named file."""
        return [self._fd] if self._fd >= 0 else []

    def close(self) -> None:
        """Close the agent's descriptor; ranks have their own. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# ---------------------------------------------------------------- its stack


class StackFile:
    """A rank's stack file: a memory file, or an unlinked file on systems without memory files.

    Args:
        scratch: Directory for an unlinked file.
    """

    def __init__(self, scratch: Path) -> None:
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("sgpu-stack", os.MFD_CLOEXEC)
        else:
            self.fd, name = tempfile.mkstemp(prefix="stack-", dir=scratch)
            os.unlink(name)
        self.forget()

    def forget(self) -> None:
        """Drop faulthandler's text. The rank shares the file position, so it writes from there."""
        os.ftruncate(self.fd, AREA_BYTES)
        os.lseek(self.fd, AREA_BYTES, os.SEEK_SET)

    def faulthandler_text(self) -> str:
        """Return what faulthandler has written."""
        size = os.fstat(self.fd).st_size - AREA_BYTES
        return os.pread(self.fd, size, AREA_BYTES).decode("utf-8", "replace") if size > 0 else ""

    def sampled(self) -> str:
        """Return the main thread's frames as the rank last sampled them, "" if it never did."""
        return read_area(os.pread(self.fd, AREA_BYTES, 0))[1]

    def sample_age_s(self) -> float:
        """Return how old the sampled frames are, in seconds; 0 if a crash has written newer ones, or none were sampled.

        The rank takes no sample while C code holds the interpreter.
        """
        at = sampled_at(os.pread(self.fd, AREA_BYTES, 0))
        return max(time.time() - at, 0.0) if at and not self.faulthandler_text() else 0.0

    def last_frames(self) -> tuple[StackFrame, ...]:
        """Return a dead rank's last frames: those of a crash in C code, else the last sample."""
        ident, sampled = read_area(os.pread(self.fd, AREA_BYTES, 0))
        return parse(self.faulthandler_text(), ident) or parse(sampled)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)
        self.fd = -1


def parse(text: str, main_ident: int = 0) -> tuple[StackFrame, ...]:
    """Parse faulthandler's text.

    Args:
        text: Frames with or without headings. Of several threads, the crashed one is used, else the main thread, else
            the last one, since a process's first thread is listed last.
        main_ident: The main thread's ident; 0 when unknown.

    Returns:
        The frames, innermost first.
    """
    sections: dict[str, list[StackFrame]] = {}
    current: list[StackFrame] | None = sections.setdefault("plain", [])
    for line in text.splitlines():
        heading = _THREAD.match(line)
        if heading:
            is_current = heading["current"] == "Current thread"
            name = "current" if is_current else f"{int(heading['ident'], 16):x}"
            current = sections.setdefault(name, [])
        elif line == _SINGLE:
            # keep only the newest of several dumps
            current = sections["plain"] = []
        elif current is not None and (frame := _FRAME.match(line)):
            number = int(frame["line"]) if frame["line"].isdigit() else 0
            current.append(StackFrame(frame["file"], number, frame["function"]))
        elif not line.startswith("  "):
            # such as the list of extension modules
            current = None
    names = ("current", f"{main_ident:x}", *reversed(sections))
    return tuple(next((sections[name] for name in names if sections.get(name)), ()))


class NotebookFrames:
    """Recognizes frames of the notebook's cells.

    Args:
        cell: The run's cell, with the other cells whose functions it uses.
    """

    def __init__(self, cell: CellSource) -> None:
        inner_magic = cell.body.lstrip().startswith("%%")
        above = [] if inner_magic or not cell.magic_line else [cell.magic_line]
        self._own = [*above, *cell.body.splitlines()]
        self._number = cell.execution_count
        self._others = {name: (source.splitlines(), count) for name, source, count in cell.linecache}
        self._script = cell.file or None

    def has(self, frame: StackFrame) -> bool:
        """Whether the frame belongs to a cell."""
        return frame.file in (self._script, *self._others) or frame.file.startswith(_CELL_PREFIX)

    def upwards(self, frames: Sequence[StackFrame]) -> tuple[StackFrame, ...]:
        """Return the frames from the innermost to the cell's outermost, without IPython and this package below it.

        If the rank is outside its cell, return the frames inside the innermost one of this package.
        """
        outermost = max((index for index, frame in enumerate(frames) if self.has(frame)), default=None)
        if outermost is not None:
            return tuple(frames[: outermost + 1])
        ours = next((index for index, frame in enumerate(frames) if _OURS in frame.file), len(frames))
        return tuple(frames[:ours])

    def innermost(self, frames: Iterable[StackFrame]) -> StackFrame | None:
        """Return the innermost frame of a cell, or None."""
        return next((frame for frame in frames if self.has(frame)), None)

    def collective(self, frames: Iterable[StackFrame]) -> str:
        """Return the function of torch.distributed that the cell is in, "" if it is in none."""
        found = ""
        for frame in frames:
            if self.has(frame):
                break
            if _TORCH_DISTRIBUTED in frame.file and frame.function != "wrapper":
                found = frame.function.strip("_")
        return found

    def in_torch(self, frames: Iterable[StackFrame]) -> bool:
        """Return whether the cell's innermost line has called torch."""
        return any(_TORCH in frame.file for frame in itertools.takewhile(lambda frame: not self.has(frame), frames))

    def describe(self, frame: StackFrame) -> str:
        """Return `Cell In[9], line 6, in build: cache[key] = x.clone()`."""
        where = f"{self._location(frame)}, line {frame.line}"
        if not frame.function.startswith("<"):
            where += f", in {frame.function}"
        text = self.source(frame)
        return f"{where}: {text}" if text else where

    def _location(self, frame: StackFrame) -> str:
        if not self.has(frame) or frame.file == self._script:
            return frame.file
        number = self._others[frame.file][1] if frame.file in self._others else self._number
        return "the cell" if number is None else f"Cell In[{number}]"

    def source(self, frame: StackFrame) -> str:
        """Return the source line of a cell's frame, "" for other frames."""
        if not self.has(frame):
            return ""
        lines = self._others[frame.file][0] if frame.file in self._others else self._own
        return lines[frame.line - 1].strip() if 0 < frame.line <= len(lines) else ""
