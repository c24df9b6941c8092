"""The content of `%sgpu_env`: the kernel's packages, differences to a base environment, changes not in use yet."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from sgpu_magic.config import Settings
from sgpu_magic.errors import UsageError
from sgpu_magic.packages import named_environments, snapshot
from sgpu_magic.packages.distributions import Kind, Snapshot, normalised
from sgpu_magic.packages.mismatches import driver_version, find_mismatches, packages_of
from sgpu_magic.packages.named_environments import BASE_NAMES, base_list
from sgpu_magic.packages.requirement_files import name_of, read_file, version_of
from sgpu_magic.packages.snapshot import changes, process_began_at, stale_modules, versions
from sgpu_magic.views.pool_tables import EnvironmentReport
from sgpu_magic.views.units import Row

if TYPE_CHECKING:
    from sgpu_magic.runs.sessions.session import Session

_KINDS = {
    Kind.REGISTRY: "from an index",
    Kind.VCS: "from a repository",
    Kind.ARCHIVE: "from an archive",
    Kind.EDITABLE: "editable",
    Kind.PROJECT: "from a local project",
    Kind.WHEEL: "from a local wheel",
    Kind.CONDA: "from conda",
    Kind.SYSTEM: "the system's",
}
_MOST_CHANGES = 6


def report(settings: Settings, sessions: Iterable[Session], compared_to: str = "") -> EnvironmentReport:
    """Report this process's packages.

    Args:
        settings: Settings, with the default environment and the directory of saved ones.
        sessions: The connected sessions.
        compared_to: Name of a base or saved environment, or a file, to compare with; "" for no comparison.

    Raises:
        UsageError: There is no such environment or file.
    """
    now = snapshot.take_snapshot()
    kinds = Counter(found.kind for found in now.distributions)
    told = ", ".join(f"{count} {_KINDS[kind]}" for kind, count in kinds.most_common())
    return EnvironmentReport(
        title=f"Python {'.'.join(map(str, sys.version_info[:3]))}",
        facts=(f"{len(now.distributions)} packages", _torch(now), f"digest {now.digest[:8]}", sys.prefix),
        lines=(f"packages: {told}", *_default(settings), *_saved(settings)),
        pending=(*stale_words(now), *since_connected(now, sessions)),
        broken=tuple(
            found.sentence for found in find_mismatches(packages_of(now), now.shadowed, driver=driver_version())
        ),
        compared_to=compared_to,
        differences=_differences(settings, now, compared_to) if compared_to else (),
    )


def _torch(now: Snapshot) -> str:
    torch = packages_of(now).get("torch")
    if torch is None:
        return "no torch"
    return f"torch {torch.version}" + (f" (CUDA {torch.cuda})" if torch.cuda else " (no CUDA)")


def _default(settings: Settings) -> list[str]:
    chosen = settings.env_version
    return [f"runs have the packages of {chosen} (setting env_version)"] if chosen not in ("", "none") else []


def _saved(settings: Settings) -> list[str]:
    names = named_environments.saved_names(settings)
    return [f"saved: {', '.join(names)}"] if names else []


def stale_words(now: Snapshot) -> list[str]:
    """Return a sentence for each package that this process has loaded in another version than the installed one."""
    first = snapshot.first_snapshot() or now
    modules = dict(sys.modules)
    return [found.words for found in stale_modules(first, now, modules, process_began_at())]


def since_connected(now: Snapshot, sessions: Iterable[Session]) -> list[str]:
    """Return a sentence for each session that was connected before packages changed: its ranks keep loaded modules."""
    lines: list[str] = []
    for session in sessions:
        if session.spec.environment_label:
            # the session has its own packages, which do not change here
            continue
        found = changes(versions(session.packages), versions(now))
        if found:
            words = [change.words for change in found[:_MOST_CHANGES]]
            words += [f"{len(found) - _MOST_CHANGES} more"] if len(found) > _MOST_CHANGES else []
            lines.append(
                f"since session {session.name} was connected: {', '.join(words)}. Modules that its ranks have imported "
                "stay as they were: %sgpu_restart restarts its ranks."
            )
    return lines


def _differences(settings: Settings, now: Snapshot, name: str) -> tuple[Row, ...]:
    there, remarks = _versions_of(settings, name)
    here = versions(now)
    python = remarks.pop("", "")
    rows = [
        (change.name, change.before or "-", change.now or "-", remarks.get(change.name, ""))
        for change in changes(here, there)
    ]
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (*([("Python", minor, python, "")] if python and python != minor else []), *rows)


def _versions_of(settings: Settings, name: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return versions and remarks by normalised name; the remark of "" is Python's minor version."""
    if name in BASE_NAMES:
        base = base_list(name)
        listed = {**base.public, **base.left_out}
        remarks = {normalised(each): "the operating system's" for each in base.system}
        remarks |= {normalised(each): "in no index" for each in base.private}
        return {normalised(each): version for each, version in listed.items()}, {**remarks, "": base.python_minor}
    kept = named_environments.load(settings, name)
    if kept is not None:
        lines, python = (*kept.requirements, *kept.needed), kept.python
    elif Path(name).expanduser().is_file():
        found = read_file(Path(name).expanduser())
        lines, python = found.lines, found.python
    else:
        known = ", ".join([*BASE_NAMES, *named_environments.saved_names(settings)])
        raise UsageError(f"--diff {name!r}: there is no such environment or file. There are: {known}.")
    return {normalised(name_of(line)): version_of(line) or "any" for line in lines}, {"": python}
