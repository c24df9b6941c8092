"""Files that a run's ranks have written: those of its work and checkpoint folders, listed and read for a page."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager

from sgpu_magic.errors import RunFileUnknown
from sgpu_magic.files.atomic_file import read_json
from sgpu_magic.files.run_directory import open_below
from sgpu_magic.server.page_schema import PageFile, PageFiles
from sgpu_magic.server.run_places import RunLocation
from sgpu_magic.wire.base import short
from sgpu_magic.wire.files import is_written_by_ranks
from sgpu_magic.wire.run import RUN_RECORD, RunRecord

MOST_LISTED = 1000
"""Number of files that a page lists; `sgpu cp` lists all."""


class FileNotHere(Exception):
    """The run has no such file for its page; the message is shown to the user."""


def list_files(location: RunLocation) -> PageFiles:
    """Return the files that the run's ranks have written below its directory.

    Raises:
        PoolError: The pool of a remote run does not answer.
    """
    try:
        found = location.files().list()
    except RunFileUnknown:
        # its pool has no directory for it yet
        return PageFiles(files=(), more=False, cwd="")
    written = [file for file in found.files if is_written_by_ranks(file.name)]
    listed = (PageFile(name=file.name, size=file.size, changed_at=file.changed_at) for file in written[:MOST_LISTED])
    return PageFiles(
        files=tuple(listed), more=found.more or len(written) > MOST_LISTED, cwd=_outer_working_directory(location)
    )


@contextmanager
def opened_file(location: RunLocation, name: str) -> Generator[int]:
    """Yield a descriptor of a file's current content; a remote run's is copied to this machine first.

    Args:
        location: Where the run is.
        name: The file's path below the run's directory, as the page sends it.

    Raises:
        FileNotHere: The run has no such file, or it is not one that its ranks have written.
        PoolError: The pool of a remote run does not answer.
    """
    if not is_written_by_ranks(name):
        raise _not_here(location, name)
    if location.bring is None:
        try:
            descriptor = open_below(location.directory, name)
        except OSError:
            raise _not_here(location, name) from None
        try:
            yield descriptor
        finally:
            os.close(descriptor)
        return
    with tempfile.TemporaryFile() as copied:
        try:
            location.files().copy_into(name, copied.fileno(), 0)
        except RunFileUnknown:
            raise _not_here(location, name) from None
        yield copied.fileno()


def _not_here(location: RunLocation, name: str) -> FileNotHere:
    run = short(location.spec.run_id)
    return FileNotHere(
        f"run {run} has no file {name[:200]!r} in its work and checkpoint folders. "
        f"`sgpu cp {run}:` lists all its files."
    )


def _outer_working_directory(location: RunLocation) -> str:
    """Return the working directory of ranks that ran in a folder outside the run's directory, else ""."""
    if location.bring is not None:
        return ""
    record = read_json(location.directory / RUN_RECORD, RunRecord)
    if record is None:
        return ""
    is_inside = os.path.commonpath((record.cwd, location.directory)) == str(location.directory)
    return "" if is_inside else record.cwd
