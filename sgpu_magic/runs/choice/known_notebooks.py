"""In which notebooks this user has made which choice: a copy of the metadata in another one is not a choice there.

A signature says who has made a choice, and goes wherever the metadata go. What a notebook is lies outside of it: its
path, or the file itself, which keeps its inode when it is renamed.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sgpu_magic.config import private_dir
from sgpu_magic.files.whole_file import write_whole

NOTEBOOKS_FILE = "choice.notebooks"
_MOST_BYTES = 400_000


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


@dataclass(frozen=True, slots=True)
class KnownNotebooks:
    """A list in the state directory. Several kernels may use it at once.

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

    # ------------------------------------------------------------ the file

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
