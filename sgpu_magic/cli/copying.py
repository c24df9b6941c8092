"""`sgpu cp`: copies a run's files to this machine."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TextIO

import msgspec

from sgpu_magic.cli.main import CommandParser, note
from sgpu_magic.client.run_files import FilesOfRun, LocalRunFiles, files_of
from sgpu_magic.client.this_machine import this_umask
from sgpu_magic.config import load_settings
from sgpu_magic.errors import RunFileUnknown, UsageError
from sgpu_magic.files.run_directory import BadName, open_below, parts_of, replace_below
from sgpu_magic.formatting import count_of, format_bytes, names_text
from sgpu_magic.wire.base import short
from sgpu_magic.wire.decoding import decode_json
from sgpu_magic.wire.files import CHECKPOINTS, KEY, WORK, RunFile, RunFiles, work_folders
from sgpu_magic.wire.run import RUN_RECORD, RunRecord

_ADDRESS = re.compile(r"(?P<run>[0-9A-Fa-f]{1,40})(?:/(?P<rank>\d{1,6}))?:(?P<path>.*)", re.DOTALL)
# how many links a note names
_NAMED = 5


class Address(msgspec.Struct, frozen=True):
    """A parsed `RUN[/RANK]:PATH`.

    Args:
        run: Prefix of the run's id.
        path: Path relative to the ranks' working directory, or else to the run's directory; "" is everything.
        rank: The rank whose node to copy from; None is the first.
    """

    run: str
    path: str
    rank: int | None = None


# files by their paths relative to the target
_Wanted = Mapping[str, RunFile]


def copy(options: argparse.Namespace) -> int:
    """Copy the files at an address to a folder, a file or standard output. Without a target, list them.

    Raises:
        UsageError: There is no such run or file, or the target can't be written.
        PoolError: The pool can't be reached.
    """
    source, target = options.source, options.target
    address = read_address(source)
    with files_of(load_settings(), address.run) as files:
        wanted, links = _find(files, address)
        if links:
            note(
                f"symbolic links are not copied: {count_of(len(links), 'link')} left out: {names_text(links, _NAMED)}. "
                "Let the run write copies to get what they lead to."
            )
        if not target:
            for file in wanted.values():
                sys.stdout.write(f"{format_bytes(file.size):>9}  {file.name}\n")
        elif target == "-":
            _to_stream(files, wanted, source, sys.stdout.buffer)
        else:
            try:
                _to_disk(files, wanted, target, sys.stdout)
            except OSError as error:
                raise UsageError(
                    f"{error.filename or target} can't be written: {error.strerror or error}. Fix that and run "
                    "the command again: it continues where it stopped."
                ) from None
        if files.has_ended(files.row()):
            return 0
    note(f"run {short(files.run_id)} has not ended: files that it writes from now on are not included.")
    return 0


def read_address(text: str) -> Address:
    """Parse `RUN[/RANK]:PATH`.

    Raises:
        UsageError: The text is not an address, or its path leads out of the run's directories.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None:
        raise UsageError(
            f"{text!r} is not a path in a run: write RUN:PATH, as in 7f3a:checkpoints, or RUN/RANK:PATH for the node "
            "of one rank. `sgpu cp` copies from a run to this machine; `--upload` copies to a run."
        )
    path = os.path.normpath(found["path"]) if found["path"] else ""
    path = "" if path == os.curdir else path
    try:
        if path:
            parts_of(path)
    except BadName:
        raise UsageError(
            f"{found['path']!r} is outside the run's directories, and nothing else can be copied. Give a path "
            "relative to the ranks' working directory."
        ) from None
    return Address(found["run"], path, int(found["rank"]) if found["rank"] else None)


# ---------------------------------------------------------------- finding the files


def _find(files: FilesOfRun, address: Address) -> tuple[_Wanted, Sequence[str]]:
    """Return the files at an address, and the links there."""
    run = short(files.run_id)
    row = files.row()
    if address.rank is not None and row is not None and address.rank >= row.ranks:
        raise UsageError(f"run {run} has no rank {address.rank}: it has {row.ranks}.")
    if not address.path and address.rank is None:
        found = _list_files(files, "")
        # other links lead to the run's code and its packages
        links = [link for link in found.links if {WORK, CHECKPOINTS}.intersection(link.split("/"))]
        return {file.name: file for file in found.files if file.name != KEY}, links
    folders = work_folders(_node_of(files, address.rank or 0))
    for root in (*folders, *([] if not address.path else [""])):
        under = "/".join(part for part in (root, address.path) if part)
        found = _list_files(files, under)
        if found.files or found.links:
            above = len(os.path.dirname(under)) + 1 if os.path.dirname(under) else 0
            return {file.name[above:]: file for file in found.files}, [link[above:] for link in found.links]
    raise UsageError(f"run {run} has no {address.path or 'files'}.{_where(files, row is None)}")


def _where(files: FilesOfRun, unknown: bool) -> str:
    """Return a hint about where the ranks' files are."""
    record = _record(files)
    if record is not None and isinstance(files, LocalRunFiles) and Path(record.cwd).parent != files.directory:
        return f" Its ranks' working directory was {record.cwd} on this machine: look there for what they wrote."
    if not unknown and not files.has_ended(files.row()):
        return " It has not ended: what its ranks write on nodes other than the pool's arrives when they have ended."
    return f" `sgpu cp {short(files.run_id)}:` lists its files."


def _node_of(files: FilesOfRun, rank: int) -> int:
    """Return the index of a rank's node, from 0."""
    record = _record(files) if rank else None
    first = 0
    for number, share in enumerate(record.lease.shares if record is not None else ()):
        if first <= rank < first + share.ranks:
            return number
        first += share.ranks
    return 0


def _record(files: FilesOfRun) -> RunRecord | None:
    try:
        return decode_json(files.bring(RUN_RECORD).read_bytes(), type=RunRecord)
    except (OSError, RunFileUnknown, msgspec.DecodeError):
        # the run has not started, or the record arrives with the rest of its files
        return None


def _list_files(files: FilesOfRun, under: str) -> RunFiles:
    try:
        found = files.list(under)
    except (RunFileUnknown, OSError):
        return RunFiles(request=0, files=())
    if found.more:
        raise UsageError(
            f"{under or 'the run'} has more than {len(found.files):,} files. Copy its folders one by one, or pack "
            "them in the run."
        )
    return found


# ---------------------------------------------------------------- copying


def _to_stream(files: FilesOfRun, wanted: _Wanted, source: str, data: BinaryIO) -> None:
    if len(wanted) != 1:
        raise UsageError(f"{source} is a folder of {len(wanted):,} files, and standard output takes a single file.")
    (file,) = wanted.values()
    descriptor = os.memfd_create("sgpu-cp", os.MFD_CLOEXEC)
    with open(descriptor, "rb") as copied:
        files.copy_into(file.name, descriptor, 0)
        copied.seek(0)
        shutil.copyfileobj(copied, data)
    data.flush()


def _to_disk(files: FilesOfRun, wanted: _Wanted, target: str, out: TextIO) -> None:
    folder = Path(os.path.expanduser(target))
    in_folders = all("/" in name for name in wanted)
    if len(wanted) == 1 and not in_folders and not folder.is_dir() and not target.endswith("/"):
        # a single file, copied under another name
        (file,) = wanted.values()
        folder, wanted = folder.parent, {folder.name: file}
    elif not folder.is_dir():
        # like `cp -r`: a target that does not exist becomes the copied folder itself
        if in_folders and len({name.split("/", 1)[0] for name in wanted}) == 1:
            wanted = {name.split("/", 1)[1]: file for name, file in wanted.items()}
        folder.mkdir(parents=True)
    copied, unchanged = 0, 0
    for name, file in wanted.items():
        size = _one(files, file, folder, name)
        if size is None:
            unchanged += 1
            continue
        print(f"{format_bytes(file.size):>9}  {folder / name}", file=out)
        copied += size
    same = f", {unchanged:,} unchanged" if unchanged else ""
    print(f"{count_of(len(wanted), 'file')}, {format_bytes(copied)} copied{same}", file=out, flush=True)


def _one(files: FilesOfRun, file: RunFile, folder: Path, name: str) -> int | None:
    """Copy a file and return the bytes transferred, only the rest of a partial copy; None if it is unchanged."""
    *folders, last = parts_of(name)
    with contextlib.suppress(OSError):
        status = os.lstat(folder.joinpath(*folders, last))
        same_time = abs(status.st_mtime - file.changed_at) < 1e-3
        if stat.S_ISREG(status.st_mode) and status.st_size == file.size and same_time:
            return None
    # the name depends on size and time, so a partial copy of another version is never continued
    about = f"{files.run_id}/{file.name}/{file.size}/{file.changed_at}"
    temporary = f".{last[:100]}.{hashlib.sha256(os.fsencode(about)).hexdigest()[:12]}.part"
    part = "/".join([*folders, temporary])
    descriptor = open_below(folder, part, os.O_WRONLY | os.O_CREAT, make=True)
    try:
        begin = os.fstat(descriptor).st_size
        files.copy_into(file.name, descriptor, begin)
        size = os.fstat(descriptor).st_size
        os.fchmod(descriptor, (0o777 if file.executable else 0o666) & ~this_umask())
        if file.changed_at:
            os.utime(descriptor, (time.time(), file.changed_at))
    finally:
        os.close(descriptor)
    replace_below(folder, temporary, name)
    return size - begin


def _options(parser: CommandParser) -> None:
    parser.add_argument(
        "source", metavar="RUN[/RANK]:PATH", help="path in the ranks' working directory or the run's directory"
    )
    parser.add_argument(
        "target",
        metavar="TARGET",
        nargs="?",
        default="",
        help="folder, file, or - for standard output (default: only list)",
    )
    parser.does(copy)


COMMANDS = {"cp": _options}
