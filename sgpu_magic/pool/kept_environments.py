"""Files that describe environments (`requirements.txt`, `pylock.toml`), kept once and linked into run directories.

A run's directory has the same file as all others of its environment and user, so a thousand runs cost the disk nothing
more, and nobody changes what others have.
What no run's directory links any more goes when the pool looks after its state directory.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from sgpu_magic.config import private_dir
from sgpu_magic.errors import UsageError
from sgpu_magic.files.content_store import store_name
from sgpu_magic.files.run_directory import has_content, link_or_copy
from sgpu_magic.files.whole_file import write_whole
from sgpu_magic.packages.distributions import is_valid_digest
from sgpu_magic.wire.client import KeepEnvironment
from sgpu_magic.wire.record import is_valid_id

_Kept = tuple[str, str]
"""A user's store and an environment's digest; "" while that is not known."""

_FILES = ("requirements.txt", "pylock.toml")
# of all the user's runs in that environment: it is not to be changed in one run's directory
_MODE = 0o400
_MOST_BYTES = 20_000_000
_MOST_RUNS_KNOWN = 1000


class KeptEnvironments:
    """The files of every environment that runs had. Of one thread.

    Args:
        root: Where they are kept, by user and digest.
        runs_path: Where runs have their directories.
    """

    def __init__(self, root: Path, runs_path: Path) -> None:
        self._root = root
        self._runs_path = runs_path
        # in this service's life: clients send the files once
        self._used: set[_Kept] = set()
        # the last runs and what they have: files that come later, or better ones, are put there too
        self._runs: dict[str, _Kept] = {}

    def keep(self, message: KeepEnvironment, user: str) -> None:
        """Write a user's files down, and link them into the directories of their runs that had this environment."""
        digest = message.digest
        files = [(name, text) for name, text in message.files if name in _FILES and len(text) <= _MOST_BYTES]
        if not is_valid_digest(digest):
            return
        kept = store_name(user), digest
        self._used.add(kept)
        for run_id in message.runs:
            if self._runs.get(run_id, kept)[0] == kept[0]:
                self._remember(run_id, kept)
        # a disk that is full, or was taken away, costs a run its copy of these files and nothing else
        with contextlib.suppress(OSError, UsageError):
            folder = private_dir(private_dir(private_dir(self._root) / kept[0]) / digest)
            for name, text in files:
                _write(folder / name, text)
        for run_id in [run_id for run_id, known in self._runs.items() if known == kept]:
            self._put(kept, run_id)

    def link(self, digest: str, run_id: str, user: str) -> None:
        """Put the files into a run's directory, now or once they are there.

        Args:
            digest: The environment's; "" where it was not known yet when the run was submitted. It may be by now.
            run_id: The run, whose directory is there.
            user: Whose it is.
        """
        own = store_name(user)
        known = self._runs.get(run_id, (own, ""))
        # who else named the run does not count
        before = known if known[0] == own else (own, "")
        kept = (own, digest) if is_valid_digest(digest) else before
        self._remember(run_id, kept)
        if kept[1]:
            self._used.add(kept)
            self._put(kept, run_id)

    def remove_unlinked(self) -> None:
        """Remove what no run's directory has any more, but nothing that a run of this service's clients may have."""
        for folder in self._root.glob("*/*"):
            if (folder.parent.name, folder.name) not in self._used and not _is_linked(folder):
                # of earlier versions there are files here
                shutil.rmtree(folder if folder.is_dir() else folder.parent, ignore_errors=True)
                with contextlib.suppress(OSError):
                    folder.parent.rmdir()

    def _remember(self, run_id: str, kept: _Kept) -> None:
        if is_valid_id(run_id):
            self._runs[run_id] = kept
            while len(self._runs) > _MOST_RUNS_KNOWN:
                del self._runs[next(iter(self._runs))]

    def _put(self, kept: _Kept, run_id: str) -> None:
        directory = self._runs_path / run_id
        # not there yet, or removed already
        if not is_valid_id(run_id) or not directory.is_dir():
            return
        for name in _FILES:
            with contextlib.suppress(OSError):
                link_or_copy(self._root / kept[0] / kept[1] / name, directory / name)


def _write(path: Path, text: str) -> None:
    """Write a file under its name at once, whole, unless it says the same already."""
    data = text.encode()
    if not has_content(path, data):
        write_whole(path, data, _MODE)


def _is_linked(folder: Path) -> bool:
    paths = [folder]
    with contextlib.suppress(OSError):
        paths = list(folder.iterdir())
    for path in paths:
        with contextlib.suppress(OSError):
            if not path.is_dir() and path.lstat().st_nlink > 1:
                return True
    return False
