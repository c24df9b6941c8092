"""What differs between a run and its replay, in sentences. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_MAX_NAMED = 6


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a run was launched with, as far as it is known; "" and empty where it is not.

    Args:
        host: The machine of its ranks.
        python: `3.11.7`.
        version: sgpu-magic's.
        executable: The ranks' Python.
        digest: Of its packages.
        packages: Versions by canonical name.
        commit: Of the git repository that it was submitted from.
        dirty: Whether that had uncommitted changes; None where nobody knows.
        cwd: Its working directory.
    """

    host: str = ""
    python: str = ""
    version: str = ""
    executable: str = ""
    digest: str = ""
    packages: Mapping[str, str] = field(default_factory=dict[str, str])
    commit: str = ""
    dirty: bool | None = None
    cwd: str = ""


def differences(then: Circumstances, now: Circumstances) -> list[str]:
    """Return what a person should know before they compare the two runs, a sentence each without its full stop."""
    told: list[str] = []
    if then.host and then.host != now.host:
        told.append(f"it ran on {then.host}, and this machine is {now.host}")
    if then.python and now.python and then.python != now.python:
        told.append(f"it ran under Python {then.python}, and this is {now.python}")
    if then.digest and then.digest == now.digest:
        pass
    elif then.packages and now.packages:
        told += _package_differences(then.packages, now.packages)
    elif not then.digest:
        told.append("its packages were not recorded, so they could not be compared")
    if then.version and then.version != now.version:
        told.append(f"it was run by sgpu-magic {then.version}, and this is {now.version}")
    if then.commit and now.commit != then.commit:
        here = f"{now.commit[:10]} is checked out" if now.commit else f"{now.cwd} is in no git repository"
        told.append(f"it was submitted at git commit {then.commit[:10]}, and here {here}: imported modules may differ")
    elif then.commit and (then.dirty or now.dirty):
        when = " and ".join(word for word, dirty in (("then", then.dirty), ("now", now.dirty)) if dirty)
        told.append(f"the git repository had uncommitted changes {when}: imported modules may differ")
    if then.cwd and then.cwd != now.cwd:
        told.append(f"its directory {then.cwd} is not there, so it starts in {now.cwd}")
    return told


def _package_differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    other = [f"{name} {now[name]} (was {then[name]})" for name in then if name in now and now[name] != then[name]]
    missing = [f"{name} {then[name]}" for name in then if name not in now]
    told: list[str] = []
    if other:
        told.append(f"packages of another version: {_listed(other)}")
    if missing:
        told.append(f"packages that are not here: {_listed(missing)}")
    return told


def _listed(items: list[str]) -> str:
    shown = ", ".join(sorted(items)[:_MAX_NAMED])
    more = len(items) - _MAX_NAMED
    return f"{shown} and {more} more" if more > 0 else shown
