"""Signs and verifies the choice in a notebook's metadata, and records in which notebooks it was made.

A choice is copied with its notebook. One that this user did not make in this notebook takes effect only when confirmed,
because it may take devices, cost money or install packages.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import os
import secrets
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from sgpu_magic.config import private_dir
from sgpu_magic.files.atomic_file import write_whole
from sgpu_magic.options import notebook_job
from sgpu_magic.runs.choice.known_notebooks import KnownNotebooks
from sgpu_magic.runs.choice.schema import VERSION, Choice, KeptChoice, Read, normal, read_kept
from sgpu_magic.runs.notebook import notebook_path
from sgpu_magic.wire.decoding import JsonDecoder, decode_json

KEY_FILE = "choice.key"
MAX_FILE_BYTES = 20_000_000

_KEY_BYTES = 32
_MARK = b"sgpu-choice:"
_NOTHING = Choice()


# ---------------------------------------------------------------- signing


def sign(choice: Choice, key: bytes) -> str:
    """Return a choice's signature: HMAC-SHA-256, hexadecimal.

    Only fields that differ from an empty choice are signed, so that versions with more fields compute the same.
    """
    said = {
        name: getattr(choice, name)
        for name in choice.__struct_fields__
        if getattr(choice, name) != getattr(_NOTHING, name)
    }
    text = _MARK + msgspec.json.encode(said, order="deterministic")
    return hmac.new(key, text, hashlib.sha256).hexdigest()


def is_signed(kept: KeptChoice, key: bytes | None) -> bool:
    """Whether the choice is signed with the key."""
    return key is not None and kept.signed.isascii() and hmac.compare_digest(sign(kept.choice, key), kept.signed)


def read_key(state: Path) -> bytes | None:
    """Return this user's key; None if there is none, or its file is not private."""
    file = state / KEY_FILE
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        # anyone who can read or write the key could sign for this user
        is_private = status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
        key = opened.read(_KEY_BYTES + 1) if stat.S_ISREG(status.st_mode) and is_private else b""
    return key if len(key) == _KEY_BYTES else None


def own_key(state: Path) -> bytes:
    """Return this user's key; create it if there is none. Concurrent processes get the same key.

    Raises:
        OSError: The key can't be written.
        UsageError: The directory belongs to another user.
    """
    if (key := read_key(state)) is not None:
        return key
    file = private_dir(state) / KEY_FILE
    made = secrets.token_bytes(_KEY_BYTES)
    try:
        write_whole(file, made, replace=False)
    except FileExistsError:
        # replace a key that is invalid or not private, unless another process did; its signatures become invalid
        if read_key(state) is None:
            write_whole(file, made)
    return read_key(state) or made


# ---------------------------------------------------------------- the current choice


class Held(msgspec.Struct, frozen=True):
    """The current choice of a notebook.

    Args:
        choice: The choice; None if there is none.
        confirmed: Whether it is in effect: this user made it in this notebook, or it is empty.
        problem: A sentence about metadata that can't be read; "" if there is no problem.
        elsewhere: Another notebook in which this user made it; "" if another user made it.
    """

    choice: Choice | None = None
    confirmed: bool = False
    problem: str = ""
    elsewhere: str = ""


class ChoiceKeeper:
    """Keeps the choice in effect in this process: as reported by a front end, else as read from the notebook's file.

    Thread-safe.

    Args:
        state: The state directory, with the key.
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
        self._held = Held()
        self._looked_at: tuple[str, int, int] | None = None

    def now(self) -> Held:
        """Return the current choice. Takes one `stat` of the notebook's file if no front end reports the choice."""
        if not self._is_reported and self._pending is None:
            # the path comes from the front end and may be any text
            with contextlib.suppress(OSError, ValueError):
                self._look()
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
        """Put a choice of this user into effect and return the signed choice for the metadata.

        Raises:
            OSError: The key can't be written.
            UsageError: The state directory belongs to another user.
        """
        choice = normal(choice)
        kept = KeptChoice(choice=choice, signed=sign(choice, own_key(self._state)), version=VERSION)
        self._known.add(kept.signed, self._notebook())
        with self._lock:
            self._pending, self._held = kept, Held(choice, True)
        return kept

    def _look(self) -> None:
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

    def _checked(self, read: Read) -> Held:
        if read.kept is None:
            return Held(problem=read.problem)
        signed, choice = is_signed(read.kept, read_key(self._state)), normal(read.kept.choice)
        if choice == _NOTHING or not signed or self._any_notebook:
            # an empty choice needs no confirmation
            return Held(choice, signed or choice == _NOTHING, read.problem)
        elsewhere = self._known.other_than(read.kept.signed, self._notebook())
        return Held(choice, not elsewhere, read.problem, elsewhere)


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
