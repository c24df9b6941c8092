"""Descriptions of environments: the files in a run's directory that describe one, and the report of `%sgpu_env`."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from sgpu_magic.config import Settings, load_settings
from sgpu_magic.errors import UsageError
from sgpu_magic.options.option_records import OWN_PACKAGES
from sgpu_magic.packages import named_environments, snapshot
from sgpu_magic.packages.distributions import InstalledPackages, Kind, normalised
from sgpu_magic.packages.lock import Lock, cache_lock, cached_lock, lock_order, make_lock
from sgpu_magic.packages.named_environments import BASE_NAMES, base_list
from sgpu_magic.packages.snapshot import changes, process_began_at, stale_modules, versions
from sgpu_magic.views.pool_tables import EnvironmentReport
from sgpu_magic.views.units import Row
from sgpu_magic.wire.attachments import Environment

if TYPE_CHECKING:
    from sgpu_magic.packages.package_metadata import Package
    from sgpu_magic.runs.sessions.session import Session

# below the state directory
WHEELS = "wheels"
_LOCKS = "locks"
_WHEELS_STAY_S = 60 * 24 * 3600.0
# after a failure, the index is queried again only after this time: a dead network would delay each run
_RETRY_AFTER_S = 600.0
_failed: dict[str, tuple[float, Lock]] = {}


Described = InstalledPackages | Environment
"""What is described to a pool: a snapshot of this process's packages, or an environment that a node builds."""

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


def requirements_of(described: Described, lock: Lock | None) -> str:
    """Return the text of `requirements.txt`, with the details of the lock file."""
    # imported here: only needed to write these texts
    from sgpu_magic.packages.requirement_files import environment_requirements, snapshot_requirements

    if isinstance(described, Environment):
        return environment_requirements(described, lock)
    return snapshot_requirements(described, lock)


def lock_of(
    described: Described, *, make: bool = True, gently: bool = False, retry_after_s: float = _RETRY_AFTER_S
) -> Lock | None:
    """Return an environment's lock file; None if there is none, or the settings disable lock files.

    Args:
        described: The environment.
        make: Make the lock file if there is none.
        gently: Make it at low priority, in the background.
        retry_after_s: Time after a failure in which the failed lock is returned.
    """
    settings = load_settings()
    if not settings.lock_environments:
        return None
    root = settings.state_path / _LOCKS
    key = f"{described.digest}-order" if isinstance(described, Environment) else described.digest
    lock = cached_lock(root, key)
    if lock is None and make:
        failed_at, lock = _failed.get(key, (0.0, None))
        if lock is not None and time.monotonic() - failed_at < retry_after_s:
            return lock
        if (lock := _make_lock(described, settings, gently=gently)).problem:
            _failed[key] = (time.monotonic(), lock)
        else:
            cache_lock(root, key, lock)
    return lock


def _make_lock(described: Described, settings: Settings, *, gently: bool) -> Lock:
    # imported here: a kernel does not need these at its start
    from sgpu_magic.packages.uv_command import index_variables
    from sgpu_magic.packages.wheels import remove_old_wheels

    variables = index_variables(settings.index_url)
    if isinstance(described, Environment):
        return lock_order(described, sys.executable, variables, gently=gently)
    wheels = settings.state_path / WHEELS
    remove_old_wheels(wheels, time.time() - _WHEELS_STAY_S)
    return make_lock(described, wheels, variables, gently=gently)


# ---------------------------------------------------------------- the report of %sgpu_env


def report(settings: Settings, sessions: Iterable[Session], compared_to: str = "") -> EnvironmentReport:
    """Report this process's packages.

    Args:
        settings: Settings, with the default environment and the directory of saved ones.
        sessions: The connected sessions.
        compared_to: Name of a base or saved environment, or a file, to compare with; "" for no comparison.

    Raises:
        UsageError: There is no such environment or file.
    """
    # imported here, as below: a kernel does not need these at its start
    from sgpu_magic.packages.mismatches import find_mismatches
    from sgpu_magic.packages.nvidia_driver import driver_version
    from sgpu_magic.packages.package_metadata import packages_of

    now = snapshot.take_snapshot()
    installed = packages_of(now)
    kinds = Counter(_KINDS[found.kind] for found in now.distributions).most_common()
    lines = [f"packages: {', '.join(f'{count} {kind}' for kind, count in kinds)}"]
    if settings.env_version not in OWN_PACKAGES:
        lines.append(f"runs have the packages of {settings.env_version} (setting env_version)")
    if saved := named_environments.saved_names(settings):
        lines.append(f"saved: {', '.join(saved)}")
    return EnvironmentReport(
        title=f"Python {'.'.join(map(str, sys.version_info[:3]))}",
        facts=(
            f"{len(now.distributions)} packages",
            _describe_torch(installed.get("torch")),
            sys.prefix,
        ),
        lines=tuple(lines),
        pending=(*describe_stale(now), *since_connected(now, sessions)),
        broken=tuple(found.sentence for found in find_mismatches(installed, driver=driver_version())),
        compared_to=compared_to,
        differences=_differences(settings, now, compared_to) if compared_to else (),
    )


def _describe_torch(torch: Package | None) -> str:
    if torch is None:
        return "no torch"
    return f"torch {torch.version}" + (f" (CUDA {torch.cuda})" if torch.cuda else " (no CUDA)")


def describe_stale(now: InstalledPackages) -> list[str]:
    """Return a sentence for each package that this process has loaded in another version than the installed one."""
    first = snapshot.first_snapshot() or now
    return [found.words for found in stale_modules(first, now, dict(sys.modules), process_began_at())]


def since_connected(now: InstalledPackages, sessions: Iterable[Session]) -> list[str]:
    """Return a sentence for each session that was connected before packages changed: its ranks keep loaded modules."""
    lines: list[str] = []
    for session in sessions:
        if session.spec.environment_label:
            # the session has its own packages, which do not change here
            continue
        if found := changes(versions(session.packages), versions(now)):
            words = [change.words for change in found[:_MOST_CHANGES]]
            words += [f"{len(found) - _MOST_CHANGES} more"] if len(found) > _MOST_CHANGES else []
            lines.append(
                f"since session {session.name} was connected: {', '.join(words)}. Modules that its ranks have imported "
                "stay as they were: %sgpu_restart restarts its ranks."
            )
    return lines


def _differences(settings: Settings, now: InstalledPackages, name: str) -> tuple[Row, ...]:
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
    from sgpu_magic.runs.choice.packages import base_of, base_versions

    if name in BASE_NAMES:
        base = base_list(name)
        listed = {**base.public, **base.left_out}
        remarks = {normalised(each): "the operating system's" for each in base.system}
        remarks |= {normalised(each): "in no index" for each in base.private}
        return {normalised(each): version for each, version in listed.items()}, {**remarks, "": base.python_minor}
    saved = named_environments.saved_names(settings)
    if name not in saved and not Path(name).expanduser().is_file():
        raise UsageError(
            f"--diff {name!r}: there is no such environment or file. There are: {', '.join([*BASE_NAMES, *saved])}."
        )
    found = base_of(settings, name)
    return {each: version or "any" for each, version in base_versions(found).items()}, {"": found.python}
