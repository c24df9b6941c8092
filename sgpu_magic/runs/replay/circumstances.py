"""Chooses the Python of a replay, and reports what differs from the recorded run."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from packaging.utils import canonicalize_name

from sgpu_magic import __version__
from sgpu_magic.client.run_environment import Circumstances, commit_of, recorded_circumstances
from sgpu_magic.client.this_machine import this_interpreter
from sgpu_magic.config import host_name, load_settings
from sgpu_magic.formatting import names_text
from sgpu_magic.packages.local_code import installed_entries
from sgpu_magic.packages.snapshot import take_snapshot
from sgpu_magic.runs.git_state import git_tags
from sgpu_magic.wire.decoding import decode_json
from sgpu_magic.wire.run import Interpreter

if TYPE_CHECKING:
    from sgpu_magic.runs.replay.recorded import Recorded

_PROBE_S = 30.0
_MAX_NAMED = 6


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """The Python of a replay.

    Args:
        interpreter: Another interpreter on this machine; None means this process's, or an environment to build.
        env_version: The requirements file to build an environment from; "" if none is built.
        digest: Digest of its packages; "" if unknown.
    """

    interpreter: Interpreter | None = None
    env_version: str = ""
    digest: str = ""


def choose(recorded: Recorded, wanted: str, *, here: bool) -> Chosen:
    """Find a Python with the run's packages: this one, the run's own, or one built from the recorded requirements.

    Args:
        recorded: The run.
        wanted: Digest of the run's packages; "" if unknown.
        here: Use this Python, whatever packages it has.
    """
    own = Chosen(digest=take_snapshot().digest)
    executable = recorded.record.executable
    built = recorded.spec.environment_label or _is_built(executable)
    if here or (wanted and own.digest == wanted and not built):
        return own
    if not built and executable != sys.executable and os.access(executable, os.X_OK):
        found = _probe(executable)
        if found is not None and (not wanted or found.digest == wanted):
            return found
    if wanted and recorded.requirements is not None:
        return Chosen(env_version=str(recorded.requirements), digest=wanted)
    return own


def path_of(recorded: Recorded, chosen: Chosen) -> tuple[str, ...]:
    """Return the ranks' `sys.path`: the run's own folders, and the package directories of the chosen Python."""
    then = recorded.record.sys_path
    if chosen.interpreter is not None:
        return then
    installed = {*recorded.record.installed, *installed_entries(then)}
    folders = [entry for entry in then if entry not in installed and not _is_built(entry)]
    return (*folders, *installed_entries(tuple(filter(None, sys.path))))


def of_run(recorded: Recorded) -> Circumstances:
    """Return the recorded circumstances of a run."""
    return recorded_circumstances(recorded.record, recorded.requirements, recorded.tags)


def of_replay(chosen: Chosen, cwd: str, packages: Mapping[str, str]) -> Circumstances:
    """Return the circumstances of a replay.

    Args:
        chosen: The replay's Python.
        cwd: Its working directory.
        packages: Versions of the run's packages by canonical name, used unless the replay runs in this Python.
    """
    is_own = chosen.interpreter is None and not chosen.env_version
    if is_own:
        packages = {canonicalize_name(each.name): each.version for each in take_snapshot().distributions}
    python = platform.python_version() if is_own else ""
    commit = commit_of(dict(git_tags(cwd)))
    return Circumstances(host_name(), python, __version__, chosen.digest, packages, *commit, cwd)


def _is_built(executable: str) -> bool:
    return Path(executable).is_relative_to(load_settings().environments_path)


def _probe(executable: str) -> Chosen | None:
    """Ask another Python for its packages; None if it fails, for example because of an older sgpu-magic."""
    command = [executable, "-m", "sgpu_magic.runs.replay.circumstances"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PROBE_S, check=True, stdin=subprocess.DEVNULL)
        return decode_json(done.stdout, type=Chosen)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError):
        return None


def differences(then: Circumstances, now: Circumstances) -> list[str]:
    """Return the differences between two runs, a sentence each without a full stop."""
    found: list[str] = []
    if then.host and then.host != now.host:
        found.append(f"it ran on {then.host}, and this machine is {now.host}")
    if then.python and now.python and then.python != now.python:
        found.append(f"it ran under Python {then.python}, and this is {now.python}")
    has_same = then.digest and then.digest == now.digest
    if then.packages and now.packages and not has_same:
        found += _package_differences(then.packages, now.packages)
    elif not then.digest:
        found.append("its packages were not recorded, so they could not be compared")
    if then.version and then.version != now.version:
        found.append(f"it was run by sgpu-magic {then.version}, and this is {now.version}")
    if then.commit and now.commit != then.commit:
        here = f"{now.commit[:10]} is checked out" if now.commit else f"{now.cwd} is in no git repository"
        found.append(f"it was submitted at git commit {then.commit[:10]}, and here {here}: imported modules may differ")
    elif then.commit and (then.dirty or now.dirty):
        when = " and ".join(word for word, dirty in (("then", then.dirty), ("now", now.dirty)) if dirty)
        found.append(f"the git repository had uncommitted changes {when}: imported modules may differ")
    if then.cwd and then.cwd != now.cwd:
        found.append(f"its directory {then.cwd} does not exist here, so it starts in {now.cwd}")
    return found


def _package_differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    other = [f"{name} {now[name]} (was {then[name]})" for name in then if name in now and now[name] != then[name]]
    missing = [f"{name} {then[name]}" for name in then if name not in now]
    groups = {"packages of another version": other, "packages that are not installed here": missing}
    return [f"{what}: {names_text(sorted(names), _MAX_NAMED)}" for what, names in groups.items() if names]


def main() -> None:
    """Print this Python's interpreter and packages as JSON, for `_probe` in another Python."""
    found = Chosen(interpreter=this_interpreter(), digest=take_snapshot().digest)
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
