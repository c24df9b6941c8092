"""What a notebook asks for, kept in its metadata: signed by the user who has chosen it, and known by its notebook.

A choice travels with its notebook. One that this user has not made there is not in effect before it is confirmed: it
may take devices, spend money or install packages.
"""

from __future__ import annotations

import contextlib
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
from sgpu_magic.files.whole_file import write_whole
from sgpu_magic.options import defaults
from sgpu_magic.runs.choice.schema import VERSION, Choice, KeptChoice, Read, normal, read_kept
from sgpu_magic.runs.notebook import notebook_path

KEY_FILE = "choice.key"
NOTEBOOKS_FILE = "choice.notebooks"
MAX_FILE_BYTES = 20_000_000

_KEY_BYTES = 32
_MOST_BYTES = 400_000
_MARK = b"sgpu-choice:"
_NOTHING = Choice()


# ---------------------------------------------------------------- signing


def sign(choice: Choice, key: bytes) -> str:
    """Return a choice's signature: HMAC-SHA-256, hexadecimal.

    Only what differs from an empty choice is signed: a version that knows more fields signs the same.
    """
    said = {
        name: getattr(choice, name)
        for name in choice.__struct_fields__
        if getattr(choice, name) != getattr(_NOTHING, name)
    }
    text = _MARK + msgspec.json.encode(said, order="deterministic")
    return hmac.new(key, text, hashlib.sha256).hexdigest()


def is_signed(kept: KeptChoice, key: bytes | None) -> bool:
    """Whether the owner of the key has made this choice."""
    if key is None or not kept.signed.isascii():
        return False
    return hmac.compare_digest(sign(kept.choice, key), kept.signed)


def read_key(state: Path) -> bytes | None:
    """Return this user's key, None when there is none that can be used."""
    file = state / KEY_FILE
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        # whoever can read or write it could sign for this user
        is_private = status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
        key = opened.read(_KEY_BYTES + 1) if stat.S_ISREG(status.st_mode) and is_private else b""
    return key if len(key) == _KEY_BYTES else None


def own_key(state: Path) -> bytes:
    """Return this user's key, made when there is none. Of several processes that make one, all get the same.

    Raises:
        OSError: It can't be written.
        UsageError: The directory is somebody else's.
    """
    key = read_key(state)
    if key is not None:
        return key
    file = private_dir(state) / KEY_FILE
    temporary = file.with_name(f".{KEY_FILE}.{secrets.token_hex(8)}")
    made = secrets.token_bytes(_KEY_BYTES)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as opened:
            opened.write(made)
        try:
            # of several that make one the first one's stays
            os.link(temporary, file)
        except FileExistsError:
            if read_key(state) is None:
                # of no use, or open to others: what was signed with it counts no more
                os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    return read_key(state) or made


# ---------------------------------------------------------------- where it was made


class _Chosen(msgspec.Struct, frozen=True, array_like=True):
    """A line: a choice's signature, and a notebook in which it was made."""

    signed: str
    path: str
    device: int = 0
    inode: int = 0

    def is_in(self, other: _Chosen) -> bool:
        """Whether it is the same notebook, renamed perhaps."""
        same_file = self.inode != 0 and (self.device, self.inode) == (other.device, other.inode)
        return self.path == other.path or same_file


class KnownNotebooks(msgspec.Struct, frozen=True):
    """In which notebooks this user has made which choice: a copy of the metadata in another one is not a choice there.

    A signature says who has made a choice, and goes wherever the metadata go. What a notebook is lies outside of it:
    its path, or the file itself, which keeps its inode when it is renamed. The list is in the state directory, and
    several kernels may use it at once.

    Args:
        state: The state directory.
    """

    state: Path

    def add(self, signed: str, notebook: str) -> None:
        """This user has made a choice in a notebook; a list that can't be written is left as it is."""
        if notebook:
            self._append(_chosen(signed, notebook))

    def other_than(self, signed: str, notebook: str) -> str:
        """Return where else a choice was made; "" when it was made in this notebook, or nobody knows where."""
        if not notebook:
            return ""
        here = _chosen(signed, notebook)
        known = [each for each in self._read() if each.signed == signed]
        if known and not any(each.is_in(here) for each in known):
            return known[-1].path
        if here not in known:
            self._append(here)
        return ""

    def _read(self) -> list[_Chosen]:
        try:
            lines = (self.state / NOTEBOOKS_FILE).read_bytes().splitlines()
        except OSError:
            return []
        found: list[_Chosen] = []
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                found.append(msgspec.json.decode(line, type=_Chosen))
        return found

    def _append(self, chosen: _Chosen) -> None:
        line = msgspec.json.encode(chosen) + b"\n"
        with contextlib.suppress(OSError):
            file = private_dir(self.state) / NOTEBOOKS_FILE
            # one write: what several kernels add does not mix
            descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(descriptor, "ab", buffering=0) as opened:
                opened.write(line)
                if opened.tell() <= _MOST_BYTES:
                    return
            known = self._read()
            newest = known[len(known) // 2 :]
            write_whole(file, b"".join(msgspec.json.encode(each) + b"\n" for each in newest))


def _chosen(signed: str, notebook: str) -> _Chosen:
    # a path may be anything that a front end has put there
    path = os.path.realpath(notebook).encode(errors="backslashreplace").decode() if "\0" not in notebook else ""
    device = inode = 0
    with contextlib.suppress(OSError, ValueError):
        status = os.stat(notebook)
        device, inode = status.st_dev, status.st_ino
    return _Chosen(signed, path, device, inode)


# ---------------------------------------------------------------- keeping


class Held(msgspec.Struct, frozen=True):
    """The choice that a notebook has now.

    Args:
        choice: In effect, if it is confirmed; None without one.
        confirmed: It is this user's, made in this notebook.
        elsewhere: The other notebook in which this user has made it; "" when somebody else has.
        problem: A sentence about metadata that can't be read, "" when there is nothing to say.
    """

    choice: Choice | None = None
    confirmed: bool = False
    problem: str = ""
    elsewhere: str = ""


_EMPTY = Held()


class ChoiceKeeper:
    """What is in effect in this process: told by a front end, else as the notebook's own file says.

    Methods may be called by any thread.

    Args:
        state: The state directory, where the key is.
        notebook: Returns the notebook's file, "" when nobody has told it.
        any_notebook: What this user has chosen in another notebook counts as well.
    """

    def __init__(self, state: Path, notebook: Callable[[], str], *, any_notebook: bool = False) -> None:
        self._state = state
        self._notebook = notebook
        self._any_notebook = any_notebook
        self._known = KnownNotebooks(state)
        self._lock = threading.Lock()
        self._is_told = False
        self._told: KeptChoice | None = None
        # chosen here, and not in the metadata yet as far as it is known
        self._pending: KeptChoice | None = None
        self._held = _EMPTY
        self._looked_at: tuple[str, int, int] | None = None

    def now(self) -> Held:
        """Return the choice. Costs a look at the time of the notebook's file where no front end tells, else nothing."""
        if not self._is_told and self._pending is None:
            # a path may be anything that a front end has put there
            with contextlib.suppress(OSError, ValueError):
                self._look()
        return self._held

    def told(self, kept: KeptChoice | None) -> KeptChoice | None:
        """A front end says what the metadata have.

        Returns:
            What they shall have, None to leave them as they are.
        """
        with self._lock:
            pending = self._pending
            if pending is not None and kept != pending and (not self._is_told or kept == self._told):
                # asked before it had written what was chosen
                self._is_told, self._told = True, kept
                return pending
            if not self._is_told or kept != self._told or pending is not None:
                self._pending, self._told, self._is_told = None, kept, True
                self._held = self._checked(Read(kept) if kept is None else read_kept(msgspec.to_builtins(kept)))
            return None

    def confirm(self, choice: Choice) -> KeptChoice:
        """This user has chosen it: it is in effect from now on. Return what the metadata shall have.

        Raises:
            OSError: The key can't be written.
            UsageError: The state directory is somebody else's.
        """
        choice = normal(choice)
        kept = KeptChoice(choice=choice, signed=sign(choice, own_key(self._state)), version=VERSION)
        self._known.add(kept.signed, self._notebook())
        with self._lock:
            self._pending, self._held = kept, Held(choice, True)
        return kept

    def _look(self) -> None:
        path = self._notebook()
        if not path:
            return
        status = os.stat(path)
        seen = (path, status.st_mtime_ns, status.st_size)
        if seen == self._looked_at:
            return
        with self._lock:
            if self._is_told or self._pending is not None:
                return
            self._held = self._checked(read_notebook(Path(path), status.st_size))
            self._looked_at = seen

    def _checked(self, read: Read) -> Held:
        if read.kept is None:
            return Held(problem=read.problem) if read.problem else _EMPTY
        signed, choice = is_signed(read.kept, read_key(self._state)), normal(read.kept.choice)
        if choice == _NOTHING or not signed or self._any_notebook:
            # an empty one asks for nothing that anybody would have to confirm
            return Held(choice, signed or choice == _NOTHING, read.problem)
        elsewhere = self._known.other_than(read.kept.signed, self._notebook())
        return Held(choice, not elsewhere, read.problem, elsewhere)


def keeper_of(state: Path, shell: Any) -> ChoiceKeeper:
    """Return what keeps a notebook's choice; in a job what its user has chosen anywhere counts.

    Args:
        state: The state directory.
        shell: The notebook's shell, None in a plain Python program.
    """
    return ChoiceKeeper(
        state, lambda: notebook_path(shell) if shell is not None else "", any_notebook=defaults.is_job()
    )


class _Metadata(msgspec.Struct):
    sgpu: msgspec.Raw = msgspec.Raw(b"null")


class _Notebook(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


_notebooks = msgspec.json.Decoder(_Notebook)


def read_notebook(path: Path, size: int) -> Read:
    """Read a notebook's file; one that is none, or that is very large, has no choice.

    Raises:
        OSError: It can't be read.
    """
    if size > MAX_FILE_BYTES:
        return Read()
    try:
        found = msgspec.json.decode(_notebooks.decode(path.read_bytes()).metadata.sgpu)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Read()
    return read_kept(found)
