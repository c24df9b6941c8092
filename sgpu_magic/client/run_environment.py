"""The circumstances of a recorded run, such as its packages, from its directory; what differs between two runs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sgpu_magic.files.atomic_file import read_json
from sgpu_magic.files.run_directory import EventFile
from sgpu_magic.wire.events import Described
from sgpu_magic.wire.files import REQUIREMENTS
from sgpu_magic.wire.run import RUN_RECORD, RunRecord

_HEAD = re.compile(r"# Python (?P<python>[\w.]+) on .*?, digest (?P<digest>[0-9a-f]+)")
_COMMIT_DIGITS = 10


class Circumstances(msgspec.Struct, frozen=True):
    """The circumstances of a run; "" or empty if unknown.

    Args:
        host: The machine of its ranks.
        python: Version of Python, such as `3.11.7`.
        version: Version of sgpu-magic.
        digest: Digest of its packages.
        packages: Versions of its packages by canonical name.
        commit: Commit of the git repository that it was submitted from.
        dirty: Whether the repository had uncommitted changes; None if unknown.
        cwd: Its working directory.
    """

    host: str = ""
    python: str = ""
    version: str = ""
    digest: str = ""
    packages: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    commit: str = ""
    dirty: bool | None = None
    cwd: str = ""


def recorded_circumstances(record: RunRecord, requirements: Path | None, tags: Mapping[str, str]) -> Circumstances:
    """Return the circumstances of a run from its records.

    Args:
        record: Its `run.json`.
        requirements: Path of the requirements file with the pins of its packages, None if there is none.
        tags: Tags that were added after its submission.
    """
    python, digest, packages = _pins(record.spec.environment, requirements)
    return Circumstances(record.host, python, record.version, digest, packages, *commit_of(tags), record.cwd)


def read_circumstances(directory: Path) -> Circumstances | None:
    """Return the circumstances recorded in a run's directory; None if the record is missing or can't be read.

    The packages of a cell in a session are recorded with the session, whose directory is beside the cell's.
    """
    record = read_json(directory / RUN_RECORD, RunRecord)
    if record is None:
        return None
    owner = directory.parent / record.spec.session if record.spec.in_session else directory
    requirements = owner / REQUIREMENTS
    return recorded_circumstances(record, requirements if requirements.is_file() else None, _tags(directory))


def _tags(directory: Path) -> dict[str, str]:
    """Return the tags in a run's event log; of a damaged log, those before the damage."""
    tags: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
        for event, _ in EventFile(directory).new_events():
            if isinstance(event.body, Described):
                tags.update(event.body.tags)
    return tags


def commit_of(tags: Mapping[str, str]) -> tuple[str, bool | None]:
    """Return the commit in MLflow's tags, and whether there were uncommitted changes."""
    dirty = {"true": True, "false": False}.get(tags.get("mlflow.source.git.dirty", "").lower())
    return tags.get("mlflow.source.git.commit", ""), dirty


def _pins(digest: str, path: Path | None) -> tuple[str, str, dict[str, str]]:
    """Return a run's Python, and the digest and versions of its packages.

    Args:
        digest: The digest in its spec, "" if it was not known then.
        path: Its requirements file, None if there is none.
    """
    python, packages = "", dict[str, str]()
    for line in path.read_text(errors="replace").splitlines() if path is not None else ():
        if (head := _HEAD.match(line)) is not None:
            # the only place of the digest for a run submitted before its packages were known
            python, digest = head["python"], digest or head["digest"]
        try:
            pin = Requirement(line.partition(" #")[0].partition(" --hash")[0].strip())
        except InvalidRequirement:
            continue
        versions = [each.version for each in pin.specifier if each.operator in ("==", "===")]
        if len(versions) == 1:
            packages[canonicalize_name(pin.name)] = versions[0]
    return python, digest, packages


# ---------------------------------------------------------------- what differs


class Change(msgspec.Struct, frozen=True):
    """One difference.

    Args:
        name: A distribution, or `Python`, `sgpu-magic`, `machine`, `directory`, `git commit`.
        before: Its value in the earlier run, "" if that had none.
        after: Its value in the later run, "" if that has none.
    """

    name: str
    before: str
    after: str


def changes_between(before: Circumstances, after: Circumstances) -> list[Change]:
    """Return the differences between two runs; what is unknown of either is left out."""
    pairs = {
        "machine": (before.host, after.host),
        "Python": (before.python, after.python),
        "sgpu-magic": (before.version, after.version),
        "directory": (before.cwd, after.cwd),
        "git commit": (_commit_text(before), _commit_text(after)),
    }
    known = [Change(name, then, now) for name, (then, now) in pairs.items() if then and now and then != now]
    return [*known, *_package_changes(before, after)]


def _package_changes(before: Circumstances, after: Circumstances) -> Iterator[Change]:
    is_same = before.digest != "" and before.digest == after.digest
    if is_same or not before.packages or not after.packages:
        return
    for name in sorted(before.packages.keys() | after.packages.keys()):
        then, now = before.packages.get(name, ""), after.packages.get(name, "")
        if then != now:
            yield Change(name, then, now)


def _commit_text(of: Circumstances) -> str:
    commit = of.commit[:_COMMIT_DIGITS]
    return f"{commit} with uncommitted changes" if commit and of.dirty else commit
