"""Records which choices this user has made in which notebooks.

A choice is stored in its notebook's metadata, so a notebook may come with someone else's. Such a choice takes effect
only when confirmed, because it may take devices, cost money or install packages. The list is in the state directory,
which only this user can write; several kernels may use it at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

import msgspec

from sgpu_magic.config import private_dir
from sgpu_magic.errors import UsageError
from sgpu_magic.files.atomic_file import read_trusted, write_whole
from sgpu_magic.runs.choice.schema import Choice
from sgpu_magic.wire.decoding import decode_json

NOTEBOOKS_FILE = "choice.notebooks"
_MOST_BYTES = 400_000
_EMPTY = Choice()


class _Chosen(msgspec.Struct, frozen=True, array_like=True):
    """A line of the file: the digest of a choice, and the notebook in which it was made; "" if that is unknown."""

    digest: str
    path: str
    device: int = 0
    inode: int = 0

    def is_in(self, other: _Chosen) -> bool:
        """Whether both are the same notebook, even if it was renamed."""
        same_file = self.inode != 0 and (self.device, self.inode) == (other.device, other.inode)
        return self.path == other.path or same_file


class MadeIn(msgspec.Struct, frozen=True):
    """Where this user made a choice.

    Args:
        here: In this notebook, or in one that is unknown.
        other_notebook: Otherwise the path of the last notebook in which the user made it; "" if the user never did.
    """

    here: bool
    other_notebook: str = ""


class KnownNotebooks(msgspec.Struct, frozen=True):
    """The choices that this user has made. A notebook is known by its path, or by its inode, which a rename keeps.

    Args:
        state: The state directory.
    """

    state: Path

    def add(self, choice: Choice, notebook: str) -> None:
        """Record that this user made a choice in a notebook, "" if unknown.

        Raises:
            OSError: The list can't be written.
            UsageError: The state directory belongs to another user.
        """
        self._append(_chosen(choice, notebook))

    def find(self, choice: Choice, notebook: str) -> MadeIn:
        """Return where this user made a choice.

        A choice that was recorded without a notebook counts as made in the first one that asks.
        """
        here = _chosen(choice, notebook)
        known = [each for each in self._read() if each.digest == here.digest]
        if not known or not notebook:
            return MadeIn(bool(known))
        if any(each.is_in(here) for each in known):
            if here not in known:
                # it was renamed, or saved as a new file
                self._append_if_possible(here)
            return MadeIn(True)
        placed = [each.path for each in known if each.path]
        if not placed:
            self._append_if_possible(here)
        return MadeIn(not placed, placed[-1] if placed else "")

    def _read(self) -> list[_Chosen]:
        file = self.state / NOTEBOOKS_FILE
        found: list[_Chosen] = []
        # others who could write the list could confirm choices for this user
        with contextlib.suppress(UsageError):
            for line in read_trusted(file, "the list of notebooks", f"others may write {file}").splitlines():
                with contextlib.suppress(msgspec.DecodeError):
                    found.append(decode_json(line, type=_Chosen))
        return found

    def _append_if_possible(self, chosen: _Chosen) -> None:
        with contextlib.suppress(OSError, UsageError):
            self._append(chosen)

    def _append(self, chosen: _Chosen) -> None:
        file = private_dir(self.state) / NOTEBOOKS_FILE
        # a single write, so that lines of several kernels do not interleave
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "ab", buffering=0) as opened:
            opened.write(msgspec.json.encode(chosen) + b"\n")
            if opened.tell() <= _MOST_BYTES:
                return
        known = self._read()
        newest = known[len(known) // 2 :]
        write_whole(file, b"".join(msgspec.json.encode(each) + b"\n" for each in newest))


def _chosen(choice: Choice, notebook: str) -> _Chosen:
    if not notebook:
        return _Chosen(_digest(choice), "")
    # the path comes from the front end and may be any text
    path = os.path.realpath(notebook).encode(errors="backslashreplace").decode() if "\0" not in notebook else ""
    device = inode = 0
    with contextlib.suppress(OSError, ValueError):
        status = os.stat(notebook)
        device, inode = status.st_dev, status.st_ino
    return _Chosen(_digest(choice), path, device, inode)


def _digest(choice: Choice) -> str:
    """Return a digest of the fields that differ from an empty choice, so that versions with more fields compute it."""
    made = {
        name: getattr(choice, name)
        for name in choice.__struct_fields__
        if getattr(choice, name) != getattr(_EMPTY, name)
    }
    return hashlib.sha256(msgspec.json.encode(made, order="deterministic")).hexdigest()
