"""Notebooks in which this user has made a choice."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from sgpu_magic.config import private_dir
from sgpu_magic.files.atomic_file import write_whole
from sgpu_magic.wire.decoding import decode_json

NOTEBOOKS_FILE = "choice.notebooks"
_MOST_BYTES = 400_000


class _Chosen(msgspec.Struct, frozen=True, array_like=True):
    """A line of the file: a choice's signature and a notebook in which it was made."""

    signed: str
    path: str
    device: int = 0
    inode: int = 0

    def is_in(self, other: _Chosen) -> bool:
        """Whether both are the same notebook, even if it was renamed."""
        same_file = self.inode != 0 and (self.device, self.inode) == (other.device, other.inode)
        return self.path == other.path or same_file


class KnownNotebooks(msgspec.Struct, frozen=True):
    """Records in which notebooks this user made which choice, as metadata may be copied to another notebook.

    A signature identifies the user, but is copied with the metadata. The notebook is identified by its path, or by its
    inode, which a rename keeps. The list is in the state directory; several kernels may use it at once.

    Args:
        state: The state directory.
    """

    state: Path

    def add(self, signed: str, notebook: str) -> None:
        """Record that this user made a choice in a notebook. Write errors are ignored."""
        if notebook:
            self._append(_chosen(signed, notebook))

    def other_than(self, signed: str, notebook: str) -> str:
        """Return another notebook in which a choice was made; "" if it was made in this one, or that is unknown."""
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
        found: list[_Chosen] = []
        with contextlib.suppress(OSError):
            for line in (self.state / NOTEBOOKS_FILE).read_bytes().splitlines():
                with contextlib.suppress(msgspec.DecodeError):
                    found.append(decode_json(line, type=_Chosen))
        return found

    def _append(self, chosen: _Chosen) -> None:
        line = msgspec.json.encode(chosen) + b"\n"
        with contextlib.suppress(OSError):
            file = private_dir(self.state) / NOTEBOOKS_FILE
            # a single write, so that lines of several kernels do not interleave
            descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(descriptor, "ab", buffering=0) as opened:
                opened.write(line)
                if opened.tell() <= _MOST_BYTES:
                    return
            known = self._read()
            newest = known[len(known) // 2 :]
            write_whole(file, b"".join(msgspec.json.encode(each) + b"\n" for each in newest))


def _chosen(signed: str, notebook: str) -> _Chosen:
    # the path comes from the front end and may be any text
    path = os.path.realpath(notebook).encode(errors="backslashreplace").decode() if "\0" not in notebook else ""
    device = inode = 0
    with contextlib.suppress(OSError, ValueError):
        status = os.stat(notebook)
        device, inode = status.st_dev, status.st_ino
    return _Chosen(signed, path, device, inode)
