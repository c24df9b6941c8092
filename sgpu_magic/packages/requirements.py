"""`requirements.txt`: what an environment has, one exact line for each distribution, and where it came from.

It is written without asking anybody, so it is there when no package index can be reached.
"""

from __future__ import annotations

import platform
from pathlib import Path

from sgpu_magic.packages.distributions import Distribution, Kind, Snapshot, distribution_name
from sgpu_magic.packages.lock import Lock
from sgpu_magic.wire.attachments import Environment

_COMPLETE = "# Complete: `uv pip install --no-deps -r requirements.txt` looks no dependencies up."


def snapshot_requirements(snapshot: Snapshot, lock: Lock | None) -> str:
    """What an interpreter has.

    Args:
        snapshot: That is.
        lock: What the package index said of it, None while it was not asked.
    """
    lines = [
        _head(platform.python_version(), snapshot.platform, snapshot.digest),
        f"# What {snapshot.executable} has. {_COMPLETE.removeprefix('# ')}",
        _about_lock(lock),
    ]
    lines += [_line(distribution, lock or Lock()) for distribution in snapshot.distributions]
    return "\n".join(lines) + "\n"


def environment_requirements(environment: Environment, lock: Lock | None) -> str:
    """What a node is told to build.

    Args:
        environment: That is.
        lock: Its lock, None while there is none.
    """
    what = environment.label or "the notebook's own packages"
    lines = [
        _head(_python_version(environment.python), environment.platform or "any machine", environment.digest),
        f"# {what}, as a node was told to build them.",
        *([] if environment.resolve else [_COMPLETE]),
        _about_lock(lock),
        *environment.requirements,
    ]
    lines += [
        f"{distribution_name(wheel)} @ {Path(wheel.path).as_uri()}  # sha256 {wheel.sha256}"
        for wheel in environment.wheels
    ]
    lines += [f"# {pin}  (the node's own takes its place)" for pin in environment.needed]
    return "\n".join(lines) + "\n"


def _python_version(minor: str) -> str:
    """With the patch where it is this process's own."""
    own = platform.python_version()
    return own if own.startswith(f"{minor}.") else minor


def _head(python: str, machine: str, digest: str) -> str:
    return f"# Python {python} on {machine}, digest {digest}"


def _about_lock(lock: Lock | None) -> str:
    if lock is None:
        return "# There is no pylock.toml (yet): the package index was not asked for hashes."
    if not lock.pylock:
        return f"# There is no pylock.toml: {' '.join(lock.problem.split())}"
    return "# With hashes: pylock.toml beside this file."


def _line(distribution: Distribution, lock: Lock) -> str:
    wheel = lock.wheels.get(distribution.key)
    pin = distribution.pin
    match distribution.kind:
        case Kind.VCS | Kind.ARCHIVE:
            return f"{distribution.direct_reference}  # {distribution.version}"
        case Kind.EDITABLE:
            return f"{distribution.key} @ {distribution.url}  # {distribution.version}, editable"
        case Kind.WHEEL | Kind.PROJECT if wheel is None:
            return f"{distribution.key} @ {distribution.url}  # {distribution.version}, in no package index"
        case Kind.CONDA:
            return f"{pin}  # installed by conda"
        case Kind.SYSTEM if distribution.key in lock.unpublished:
            return f"# {pin}  the operating system's, in no package index"
        case Kind.SYSTEM:
            return f"{pin}  # the operating system's"
        case _:
            pass
    if wheel is not None:
        return (
            f"{distribution.key} @ {Path(wheel.path).as_uri()}  # {distribution.version}, repacked: in no package index"
        )
    if distribution.key in lock.other_builds:
        return f"{pin}  # the package index has {lock.other_builds[distribution.key]}"
    if distribution.key in lock.unpublished:
        return f"{pin}  # in no package index"
    return pin
