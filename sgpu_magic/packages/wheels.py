"""Wheels made on this machine from installed packages and from editable projects.

Each is made once and cached by the content that it was made from.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import io
import os
import re
import shutil
import stat
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from sgpu_magic.config import private_dir
from sgpu_magic.errors import EnvironmentFailed
from sgpu_magic.files.atomic_file import sha256_of
from sgpu_magic.files.file_state import ByFile
from sgpu_magic.packages.code_files import TreeFile, archive_entry, walk
from sgpu_magic.packages.distributions import INSTALLERS_OWN, Distribution, has_project_file, record_of
from sgpu_magic.packages.uv_command import call_uv
from sgpu_magic.wire.attachments import Wheel

_SHA256 = "sha256"
# Installed files go back to their places in a wheel: scripts to `.data/scripts`, other files outside the site directory
# to `.data/data`. The same installation always gives the same bytes.
_COMPRESSION = 5
_TAG = re.compile(r"^tag\s*:\s*([^\s-]+)-([^\s-]+)-(\S+)\s*$", re.IGNORECASE | re.MULTILINE)
_BUILD_TIMEOUT_S = 900.0
# left in a project by builds, not part of it
_LEFT_BY_BUILDS = ("build/", "dist/")
_LAST_WORDS = 1500


def kept_wheel(root: Path, key: str, make: Callable[[Path], Path]) -> Wheel:
    """Return a cached wheel. Makes it if there is none.

    Args:
        root: Directory of cached wheels.
        key: Identifies the content that the wheel is made from; used as a directory name.
        make: Makes the wheel in an empty directory and returns its path.

    Raises:
        OSError: The wheel can't be written.
    """
    folder = root / key
    found = _wheel_in(folder)
    if found is not None:
        return found
    private_dir(root)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=root, ignore_cleanup_errors=True) as temporary:
        wheel = make(Path(temporary))
        for entry in Path(temporary).iterdir():
            if entry != wheel:
                entry.unlink()
        Path(temporary, _SHA256).write_text(sha256_of(wheel))
        try:
            os.rename(temporary, folder)
        except OSError:
            # another kernel was faster
            if _wheel_in(folder) is None:
                raise
    made = _wheel_in(folder)
    if made is None:
        raise FileNotFoundError(f"the wheel in {folder} is gone")
    return made


def _wheel_in(folder: Path) -> Wheel | None:
    with contextlib.suppress(OSError, StopIteration):
        file = next(folder.glob("*.whl"))
        sha256 = (folder / _SHA256).read_text()
        # mark it as used: wheels unused for long are removed
        os.utime(folder)
        return Wheel(file=file.name, sha256=sha256, size=file.stat().st_size, path=str(file))
    return None


def remove_old_wheels(root: Path, before: float) -> None:
    """Remove cached wheels that have not been used since a point in time.

    Args:
        root: Directory of cached wheels.
        before: Wall-clock time.
    """
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(root)):
            if entry.is_dir(follow_symlinks=False) and entry.stat().st_mtime < before:
                shutil.rmtree(entry.path, ignore_errors=True)


# ---------------------------------------------------------------- from installed packages


def repack(distribution: Distribution, root: Path) -> Wheel:
    """Return the wheel of an installed distribution, cached or made now.

    Args:
        distribution: A distribution with a `RECORD`.
        root: Directory of cached wheels.

    Raises:
        EnvironmentFailed: The wheel can't be made.
    """
    if not distribution.record:
        raise EnvironmentFailed(
            f"the installed package {distribution.name} {distribution.version} is in no package index, and its "
            f"installer did not record its files ({distribution.location} has no RECORD), so no wheel "
            "can be built from it. Install it with pip or uv from its source or a wheel."
        )
    try:
        key = f"repacked-{distribution.key}-{distribution.record}"
        return kept_wheel(root, key, lambda folder: _write_wheel(Path(distribution.location), folder))
    except OSError as error:
        raise EnvironmentFailed(
            f"no wheel can be built from the installed package {distribution.name} {distribution.version}: "
            f"{error.strerror or error} ({error.filename or root}). Reinstall it, or free some disk space."
        ) from error


def installed_bytes(distribution: Distribution) -> int:
    """Return the total size of a distribution's files according to its `RECORD`."""
    with contextlib.suppress(OSError):
        return sum(int(row[2]) for row in record_of(distribution.location) if len(row) > 2 and row[2].isdigit())
    return 0


def _write_wheel(info: Path, folder: Path) -> Path:
    """Write the wheel of the `.dist-info` directory into `folder`."""
    stem = info.name.removesuffix(".dist-info")
    members = _members(info, stem)
    file = folder / f"{stem}-{_tags(info)}.whl"
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=_COMPRESSION) as wheel:
        # metadata last, as in every wheel: it can be read without the rest
        for name, path in sorted(members.items(), key=lambda member: (member[0].startswith(info.name), member[0])):
            data = path.read_bytes()
            if name.startswith(f"{stem}.data/scripts/"):
                data = _with_plain_shebang(data)
            wheel.writestr(archive_entry(name, executable=bool(path.stat().st_mode & stat.S_IXUSR)), data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.writerow((name, f"sha256={digest}", len(data)))
        rows.writerow((f"{info.name}/RECORD", "", ""))
        wheel.writestr(archive_entry(f"{info.name}/RECORD"), record.getvalue())
    return file


def _members(info: Path, stem: str) -> dict[str, Path]:
    """Return the files of the wheel, path on disk by name in the wheel."""
    site = info.parent
    programs = metadata.Distribution.at(info).entry_points
    # installers generate these scripts
    generated = {program.name for program in programs if program.group in ("console_scripts", "gui_scripts")}
    members: dict[str, Path] = {}
    for name, *_ in record_of(info):
        path = Path(os.path.normpath(site / name))
        if name.endswith(".pyc") or (path.parent == info and path.name in INSTALLERS_OWN):
            continue
        if path.is_relative_to(site):
            members[path.relative_to(site).as_posix()] = path
        elif path.parent.name in ("bin", "Scripts"):
            if path.name not in generated:
                members[f"{stem}.data/scripts/{path.name}"] = path
        elif path.is_relative_to(sys.prefix):
            members[f"{stem}.data/data/{path.relative_to(sys.prefix).as_posix()}"] = path
    return members


def _tags(info: Path) -> str:
    """Return the compressed tag, such as `py3-none-any`, from the `Tag` lines of `WHEEL`."""
    tags = _TAG.findall((info / "WHEEL").read_text(encoding="utf-8"))
    return "-".join(".".join(dict.fromkeys(parts)) for parts in zip(*tags, strict=True)) or "py3-none-any"


def _with_plain_shebang(data: bytes) -> bytes:
    """Replace the interpreter's path in a script by `#!python`, which installers replace by theirs."""
    first, newline, rest = data.partition(b"\n")
    return b"#!python" + newline + rest if first.startswith(b"#!") and b"python" in first else data


# ---------------------------------------------------------------- from editable projects, cached by their files


def build_project(distribution: Distribution, root: Path, variables: Mapping[str, str]) -> Wheel:
    """Return the wheel of an editable project with its current files, cached or built now.

    Args:
        distribution: The distribution; its `path` is the project's directory.
        root: Directory of cached wheels.
        variables: Environment variables that configure uv's package index.

    Raises:
        EnvironmentFailed: The wheel can't be built.
    """
    folder = distribution.path
    if folder is None or not has_project_file(folder):
        raise EnvironmentFailed(
            f"the editable package {distribution.name} can't be sent to the ranks: its project directory {folder} no "
            "longer has a pyproject.toml or a setup.py. Restore the project, or uninstall the package."
        )
    try:
        key = f"project-{distribution.key}-{content_key(folder)}"
        return kept_wheel(root, key, lambda into: _build(distribution, folder, into, variables))
    except OSError as error:
        raise EnvironmentFailed(
            f"no wheel can be built from the editable package {distribution.name} in {folder}: "
            f"{error.strerror or error} ({error.filename or root})."
        ) from error


def content_key(folder: Path) -> str:
    """Hash the names and contents of a project's files, except those that git ignores.

    The commit is included: many projects derive their version from it.
    """
    digest = hashlib.sha256(os.fsencode(_commit(folder)))
    for name, file in project_files(folder):
        # a file removed since the walk counts as removed before it
        with contextlib.suppress(FileNotFoundError):
            sha256 = _file_hash(file.path, file.state)
            digest.update(os.fsencode(name) + b"\0" + bytes.fromhex(sha256))
    return digest.hexdigest()[:32]


def project_files(folder: Path) -> Iterator[tuple[str, TreeFile]]:
    """Yield each of a project's files with its name relative to the project, sorted by name."""
    begin = len(folder.name) + 1
    files = {file.name[begin:]: file for file in walk(str(folder.parent), [folder.name])}
    yield from ((name, files[name]) for name in sorted(files) if not name.startswith(_LEFT_BY_BUILDS))


_file_hash = ByFile(sha256_of)


def _commit(folder: Path) -> str:
    """Return the commit checked out in the project's repository, "" without a repository."""
    for parent in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            head = (parent / ".git" / "HEAD").read_text().strip()
            reference = parent / ".git" / head.removeprefix("ref: ")
            # for packed references use the name of the branch
            return reference.read_text().strip() if reference.is_file() else head
    return ""


def _build(distribution: Distribution, folder: Path, into: Path, variables: Mapping[str, str]) -> Path:
    # reproducible: the wheel's hash changes only with its contents
    variables = {"SOURCE_DATE_EPOCH": "315532800", **variables}
    command = ["build", "--wheel", "--quiet", "--no-sources", "--out-dir", str(into), "--python", sys.executable]
    done = call_uv([*command, str(folder)], variables, _BUILD_TIMEOUT_S)
    first_words = done.words
    if done.status:
        # if the index can't be reached, its build requirements may still be installed here
        done = call_uv([*command, "--no-build-isolation", str(folder)], variables, _BUILD_TIMEOUT_S)
    wheels = sorted(into.glob("*.whl"))
    if done.status or not wheels:
        raise EnvironmentFailed(
            f"the editable package {distribution.name} in {folder} can't be built into a wheel, which the pool's "
            f"nodes need: `uv build --wheel {folder}` says: {first_words[-_LAST_WORDS:]}"
        )
    return wheels[0]
