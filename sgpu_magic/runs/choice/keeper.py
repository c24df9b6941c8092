"""What a notebook asks for, kept in its metadata: read from there, checked, and signed by the user who has chosen it.

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
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sgpu_magic.config import private_dir
from sgpu_magic.runs.choice.known_notebooks import KnownNotebooks
from sgpu_magic.runs.choice.schema import CHOICE_KEY, VERSION, Choice, KeptChoice
from sgpu_magic.runs.option_values import MOST_RANKS
from sgpu_magic.wire.devices import ANY, canonical_type

KEY_FILE = "choice.key"
MAX_FILE_BYTES = 20_000_000

_KEY_BYTES = 32
_MARK = b"sgpu-choice:"
_MOST_PACKAGES = 500
_LONGEST_TEXT = 1000
_NOTHING = Choice()


# ---------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class Read:
    """What a notebook's metadata say.

    Args:
        kept: The choice, None without one that can be read.
        problem: A sentence about what can't be read, "" when all can.
    """

    kept: KeptChoice | None = None
    problem: str = ""


def read_kept(found: object) -> Read:
    """Read the value under `CHOICE_KEY`; whatever stands there, this does not raise."""
    if found is None:
        return Read()
    try:
        kept = msgspec.convert(found, KeptChoice)
    except msgspec.ValidationError as error:
        return Read(None, _unreadable(str(error).rstrip(".")))
    problem = problem_of(kept.choice)
    if problem:
        return Read(None, _unreadable(problem.rstrip(".")))
    if kept.version > VERSION:
        return Read(
            kept,
            "This notebook's choice was kept by a newer sgpu-magic; what this one does not know of it is left out.",
        )
    return Read(kept)


def _unreadable(why: str) -> str:
    return (
        f"What this notebook's metadata ask for under `{CHOICE_KEY}` can't be read, so nothing of it is used: {why}. "
        "Choose again in the panel."
    )


def problem_of(choice: Choice) -> str:
    """Return why a choice can't be meant, a sentence; "" when it can. Does not look what a pool has."""
    if not 0 <= choice.gpus <= MOST_RANKS:
        return f"{choice.gpus} is not a number of ranks; 1 to {MOST_RANKS} is possible."
    texts = (choice.type, choice.pool, choice.env_version, *choice.dependencies, *choice.removed)
    long = next((text for text in texts if len(text) > _LONGEST_TEXT or not text.isprintable()), None)
    if long is not None:
        return f"{long[:40]!r} is too long, or has signs in it that can't be shown."
    if len(choice.dependencies) + len(choice.removed) > _MOST_PACKAGES:
        return f"more than {_MOST_PACKAGES} packages are added or removed; a requirements file takes as many."
    try:
        canonical_type(choice.type or ANY)
    except ValueError as error:
        return str(error)
    if choice.dependencies or choice.removed:
        # what parses requirements is only loaded where there are some
        from sgpu_magic.runs.choice.packages import problem_of_packages

        return problem_of_packages(choice)
    return ""


def normal(choice: Choice) -> Choice:
    """Return a choice that `problem_of` has found possible, its type in the one spelling."""
    if not choice.type:
        return choice
    name = canonical_type(choice.type)
    return msgspec.structs.replace(choice, type="" if name == ANY else name)


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


# ---------------------------------------------------------------- keeping


@dataclass(frozen=True, slots=True)
class Held:
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


# ---------------------------------------------------------------- in words


def words_of(choice: Choice, pool: str) -> str:
    """Return `2 on A10, local, this notebook's packages`.

    Args:
        choice: The choice.
        pool: The settings' pool, for a choice that names none.
    """
    kind = label_of(choice.type)
    if choice.gpus:
        devices = f"{choice.gpus} on {kind}" if kind else f"{choice.gpus} rank{'s' * (choice.gpus > 1)}"
    else:
        devices = kind or "the pool's devices"
    return ", ".join((devices, choice.pool or pool, packages_words(choice)))


def packages_words(choice: Choice) -> str:
    """Return `this notebook's packages`, `the packages of 4, peft added`."""
    words = [f"the packages of {choice.env_version}" if choice.env_version else "this notebook's packages"]
    if choice.dependencies:
        words.append(f"{_some(choice.dependencies)} added")
    if choice.removed:
        words.append(f"{_some(choice.removed)} removed")
    return ", ".join(words)


def label_of(device_type: str) -> str:
    """Return `A10` for `a10`; "" for any."""
    return "" if device_type in ("", ANY) else device_type.upper()


def _some(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
