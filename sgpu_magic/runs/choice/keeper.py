"""The choice in a notebook's metadata: whether there is one, and whether it is in effect."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from sgpu_magic.options import notebook_job
from sgpu_magic.runs.choice.known_notebooks import KnownNotebooks
from sgpu_magic.runs.choice.schema import CHOICE_VERSION, Choice, KeptChoice, Read, normal, read_kept
from sgpu_magic.runs.notebook import notebook_path
from sgpu_magic.wire.decoding import JsonDecoder, decode_json

MAX_FILE_BYTES = 20_000_000

_NOTHING = Choice()


class CurrentChoice(msgspec.Struct, frozen=True):
    """The current choice of a notebook.

    Args:
        choice: The choice; None if there is none.
        confirmed: Whether it is in effect: this user made it in this notebook, or it is empty.
        problem: A sentence about metadata that can't be read; "" if there is no problem.
        other_notebook: Another notebook in which this user made it; "" if the user has never made it on this machine.
    """

    choice: Choice | None = None
    confirmed: bool = False
    problem: str = ""
    other_notebook: str = ""


class ChoiceKeeper:
    """Keeps the choice in effect in this process: as reported by a front end, else as read from the notebook's file.

    Thread-safe.

    Args:
        state: The state directory, with the list of this user's choices.
        notebook: Returns the notebook's path, "" if unknown.
        any_notebook: Also accept choices that this user made in another notebook.
    """

    def __init__(self, state: Path, notebook: Callable[[], str], *, any_notebook: bool = False) -> None:
        self._state = state
        self._notebook = notebook
        self._any_notebook = any_notebook
        self._known = KnownNotebooks(state)
        self._lock = threading.Lock()
        self._is_reported = False
        self._last_reported: KeptChoice | None = None
        # chosen in this process, and not known to be in the metadata yet
        self._pending: KeptChoice | None = None
        self._held = CurrentChoice()
        self._looked_at: tuple[str, int, int] | None = None

    def now(self) -> CurrentChoice:
        """Return the current choice. Takes one `stat` of the notebook's file if no front end reports the choice."""
        if not self._is_reported and self._pending is None:
            # the path comes from the front end and may be any text
            with contextlib.suppress(OSError, ValueError):
                self._read_notebook()
        return self._held

    def to_report(self, kept: KeptChoice | None) -> KeptChoice | None:
        """Take the choice in the metadata as a front end reports it.

        Returns:
            The choice that the front end has to write to the metadata; None to leave them unchanged.
        """
        with self._lock:
            pending = self._pending
            if pending is not None and kept != pending and (not self._is_reported or kept == self._last_reported):
                # reported before the front end had written the pending choice
                self._is_reported, self._last_reported = True, kept
                return pending
            if not self._is_reported or kept != self._last_reported or pending is not None:
                self._pending, self._last_reported, self._is_reported = None, kept, True
                self._held = self._checked(Read(kept) if kept is None else read_kept(msgspec.to_builtins(kept)))
            return None

    def confirm(self, choice: Choice) -> KeptChoice:
        """Put a choice of this user into effect and return what the metadata have to hold.

        Raises:
            OSError: The list of this user's choices can't be written.
            UsageError: The state directory belongs to another user.
        """
        choice = normal(choice)
        kept = KeptChoice(choice=choice, version=CHOICE_VERSION)
        self._known.add(choice, self._notebook())
        with self._lock:
            # a choice that the notebook's file has already need not be written, and later changes of the file count
            is_in_file = not self._is_reported and self._pending is None and self._held.choice == choice
            self._pending = None if is_in_file else kept
            self._held = CurrentChoice(choice, True)
        return kept

    def _read_notebook(self) -> None:
        if not (path := self._notebook()):
            return
        status = os.stat(path)
        seen = (path, status.st_mtime_ns, status.st_size)
        if seen == self._looked_at:
            return
        with self._lock:
            if self._is_reported or self._pending is not None:
                return
            self._held = self._checked(read_notebook(Path(path), status.st_size))
            self._looked_at = seen

    def _checked(self, read: Read) -> CurrentChoice:
        if read.kept is None:
            return CurrentChoice(problem=read.problem)
        choice = normal(read.kept.choice)
        if choice == _NOTHING:
            # an empty choice requests nothing, so it needs no confirmation
            return CurrentChoice(choice, True, read.problem)
        made = self._known.find(choice, "" if self._any_notebook else self._notebook())
        return CurrentChoice(choice, made.here, read.problem, made.other_notebook)


def keeper_of(state: Path, shell: Any) -> ChoiceKeeper:
    """Return the keeper of a notebook's choice; in a job, it accepts choices that the user made in any notebook.

    Args:
        state: The state directory.
        shell: The notebook's shell; None in a plain Python program.
    """
    path = functools.partial(notebook_path, shell) if shell is not None else str
    return ChoiceKeeper(state, path, any_notebook=notebook_job.is_job())


class _Metadata(msgspec.Struct):
    sgpu: msgspec.Raw = msgspec.Raw(b"null")


class _Notebook(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


_notebooks = JsonDecoder(_Notebook)


def read_notebook(path: Path, size: int) -> Read:
    """Read the choice in a notebook's file; a file that is not a notebook or is larger than 20 MB has none.

    Raises:
        OSError: The file can't be read.
    """
    if size > MAX_FILE_BYTES:
        return Read()
    try:
        found = decode_json(_notebooks.decode(path.read_bytes()).metadata.sgpu)
    except msgspec.DecodeError:
        return Read()
    return read_kept(found)
