"""The files that describe environments, kept by the pool."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from sgpu_magic.config import private_dir
from sgpu_magic.errors import UsageError
from sgpu_magic.files.atomic_file import has_content, link_or_copy, write_whole
from sgpu_magic.files.content_store import store_name
from sgpu_magic.packages.environment_digest import is_valid_digest
from sgpu_magic.wire.base import is_valid_id
from sgpu_magic.wire.client import KeepEnvironment

_Kept = tuple[str, str]
"""A user's store and an environment's digest; the digest is "" while it is unknown."""

_FILES = ("requirements.txt", "pylock.toml")
# read-only: all the user's runs in that environment share the file
_MODE = 0o400
_MOST_BYTES = 20_000_000
_MOST_RUNS_KNOWN = 1000


class EnvironmentStore:
    """The files of all environments that runs had. Used from one thread only.

    Args:
        root: Where they are stored, by user and digest.
        runs_path: Holds the runs' directories.
    """

    def __init__(self, root: Path, runs_path: Path) -> None:
        self._root = root
        self._runs_path = runs_path
        # used since this service started, so never removed: clients send the files only once
        self._used: set[_Kept] = set()
        # the latest runs and their environments: files that arrive later are linked there too
        self._runs: dict[str, _Kept] = {}

    def keep(self, message: KeepEnvironment, user: str) -> None:
        """Store a user's files, and link them into the directories of their runs with this environment."""
        digest = message.digest
        files = [(name, text.encode()) for name, text in message.files if name in _FILES and len(text) <= _MOST_BYTES]
        if not is_valid_digest(digest):
            return
        kept = store_name(user), digest
        self._used.add(kept)
        for run_id in message.runs:
            if self._runs.get(run_id, kept)[0] == kept[0]:
                self._remember(run_id, kept)
        # on a full or missing disk a run only lacks its copy of these files
        with contextlib.suppress(OSError, UsageError):
            folder = private_dir(private_dir(private_dir(self._root) / kept[0]) / digest)
            for name, data in files:
                if not has_content(folder / name, data):
                    write_whole(folder / name, data, _MODE)
        for run_id in [run_id for run_id, known in self._runs.items() if known == kept]:
            self._put(kept, run_id)

    def link(self, digest: str, run_id: str, user: str) -> None:
        """Link the files into a run's directory, now or once they arrive.

        Args:
            digest: The environment's digest; "" if it was not known when the run was submitted.
            run_id: The run, whose directory exists.
            user: The run's user.
        """
        own = store_name(user)
        known = self._runs.get(run_id, (own, ""))
        # ignore an entry that another user made for this run
        before = known if known[0] == own else (own, "")
        kept = (own, digest) if is_valid_digest(digest) else before
        self._remember(run_id, kept)
        if kept[1]:
            self._used.add(kept)
            self._put(kept, run_id)

    def remove_unlinked(self) -> None:
        """Remove files that no run's directory links to, except those used since this service started."""
        for folder in self._root.glob("*/*"):
            if (folder.parent.name, folder.name) not in self._used and not _is_linked(folder):
                shutil.rmtree(folder, ignore_errors=True)
                with contextlib.suppress(OSError):
                    folder.parent.rmdir()

    def _remember(self, run_id: str, kept: _Kept) -> None:
        if is_valid_id(run_id):
            self._runs[run_id] = kept
            while len(self._runs) > _MOST_RUNS_KNOWN:
                del self._runs[next(iter(self._runs))]

    def _put(self, kept: _Kept, run_id: str) -> None:
        directory = self._runs_path / run_id
        # the directory may not exist yet, or be removed already
        if not is_valid_id(run_id) or not directory.is_dir():
            return
        for name in _FILES:
            with contextlib.suppress(OSError):
                link_or_copy(self._root / kept[0] / kept[1] / name, directory / name)


def _is_linked(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(not path.is_dir() and path.lstat().st_nlink > 1 for path in folder.iterdir())
    # count an unreadable folder as linked, so that it is kept
    return True
