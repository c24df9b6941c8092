"""Editable projects become wheels: built once for each state of their files."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from sgpu_magic.errors import EnvironmentFailed
from sgpu_magic.packages.distributions import Distribution, has_project_file
from sgpu_magic.packages.file_tree import walk
from sgpu_magic.packages.kept_wheels import kept_wheel
from sgpu_magic.packages.kernel_uv import call_uv
from sgpu_magic.wire.environment import Wheel

_BUILD_TIMEOUT_S = 900.0
# what building leaves in a project is no part of it
_LEFT_BY_BUILDS = ("build/", "dist/")
_LAST_WORDS = 1500
# (mtime, size) of a file that was hashed before
_hashes: dict[str, tuple[tuple[int, int], bytes]] = {}


def build_project(distribution: Distribution, root: Path, variables: Mapping[str, str]) -> Wheel:
    """Return the wheel of an editable project as its files are now, built if it is not there.

    Args:
        distribution: Its `path` is the project's directory.
        root: Where wheels are kept.
        variables: Tell uv where packages are.

    Raises:
        EnvironmentFailed: It can't be built.
    """
    folder = distribution.path
    if folder is None or not has_project_file(folder):
        raise EnvironmentFailed(
            f"the editable package {distribution.name} can't travel: its project directory {folder} has neither a "
            "pyproject.toml nor a setup.py any more. Put the project back, or uninstall the package."
        )
    try:
        key = f"project-{distribution.key}-{content_key(folder)}"
        return kept_wheel(root, key, lambda into: _build(distribution, folder, into, variables))
    except OSError as error:
        raise EnvironmentFailed(
            f"no wheel can be made of the editable package {distribution.name} in {folder}: "
            f"{error.strerror or error} ({error.filename or root})."
        ) from error


def content_key(folder: Path) -> str:
    """Hash a project's files: names and contents. What `.gitignore` names is no part of it.

    The commit counts too, for many projects take their version from it.
    """
    digest = hashlib.sha256(_commit(folder).encode())
    for name, path in project_files(folder):
        digest.update(name.encode(errors="surrogateescape") + b"\0" + _file_hash(path))
    return digest.hexdigest()[:32]


def project_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the names of a project's files, relative to it and in order, with their paths."""
    begin = len(folder.name) + 1
    files = ((file.name[begin:], file.path) for file in walk(str(folder.parent), [folder.name]))
    yield from sorted(file for file in files if not file[0].startswith(_LEFT_BY_BUILDS))


def _file_hash(path: str) -> bytes:
    try:
        status = os.stat(path)
        stamp = (status.st_mtime_ns, status.st_size)
        known = _hashes.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").digest()
    except OSError:
        # a link to nowhere, a socket: it is there, and nothing can be read
        return b"-"
    _hashes[path] = (stamp, found)
    return found


def _commit(folder: Path) -> str:
    """The commit that is checked out around a project, "" without a repository."""
    for parent in (folder, *folder.parents):
        head = parent / ".git" / "HEAD"
        try:
            text = head.read_text().strip()
            return (parent / ".git" / text[5:]).read_text().strip() if text.startswith("ref: ") else text
        except OSError:
            if head.exists():
                # packed references: the name of the branch has to do
                return str(head)
    return ""


def _build(distribution: Distribution, folder: Path, into: Path, variables: Mapping[str, str]) -> Path:
    # the hash of a wheel is to tell whether its contents have changed
    variables = {"SOURCE_DATE_EPOCH": "315532800", **variables}
    command = ["build", "--wheel", "--quiet", "--no-sources", "--out-dir", str(into), "--python", sys.executable]
    done = call_uv([*command, str(folder)], variables, _BUILD_TIMEOUT_S)
    first_words = done.words
    if done.status:
        # its build requirements may be installed here, where the index can't be reached
        done = call_uv([*command, "--no-build-isolation", str(folder)], variables, _BUILD_TIMEOUT_S)
    wheels = sorted(into.glob("*.whl"))
    if done.status or not wheels:
        raise EnvironmentFailed(
            f"the editable package {distribution.name} in {folder} can't be built into a wheel, which the pool's "
            f"nodes need: `uv build --wheel {folder}` says: {first_words[-_LAST_WORDS:]}"
        )
    return wheels[0]
