"""The state of the notebook's git repository."""

from __future__ import annotations

import math
import os
import subprocess
import threading
import time
from collections.abc import Callable

from sgpu_magic.packages.secrets import without_url_credentials

# a large repository on a network file system takes longer; its state is then not recorded
_TIMEOUT_S = 2.0
_FRESH_S = 5.0
_COMMAND = ("git", "-c", "core.fsmonitor=false", "--no-optional-locks")
Tags = tuple[tuple[str, str], ...]
_asking = threading.Lock()
# by directory: the monotonic time of the last git call, and its tags
_seen: dict[str, tuple[float, Tags]] = {}


def report_git_state(directory: str, on_tags: Callable[[Tags], None]) -> None:
    """Call `on_tags` with the state of a repository: at once if it is known, else later from a thread.

    Args:
        directory: A folder in the repository; without a repository or git, `on_tags` is not called.
        on_tags: Takes MLflow's tags.
    """

    def find() -> None:
        # if many runs are submitted at once, only the first calls git
        with _asking:
            if (tags := _cached_tags(directory)) is None:
                tags = git_tags(directory)
                _seen[directory] = (time.monotonic(), tags)
        if tags:
            on_tags(tags)

    known = _cached_tags(directory)
    if known is None:
        threading.Thread(target=find, name="sgpu-git", daemon=True).start()
    elif known:
        on_tags(known)


def _cached_tags(directory: str) -> Tags | None:
    """Return the tags found within the last 5 s, None if there are none."""
    at, tags = _seen.get(directory, (-math.inf, ()))
    return tags if time.monotonic() - at < _FRESH_S else None


def git_tags(directory: str) -> Tags:
    """Return the repository's commit, branch, uncommitted changes and remote URL as MLflow tags.

    Returns:
        The tags; empty without git, a repository, or an answer in time.
    """
    lines = _git(directory, "status", "--porcelain=v2", "--branch", "--untracked-files=normal")
    if lines is None:
        return ()
    heads = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch.") and " " in line[2:])
    commit, branch = heads.get("branch.oid", ""), heads.get("branch.head", "")
    if commit in ("", "(initial)"):
        return ()
    url = _git(directory, "config", "--get", "remote.origin.url")
    tags = {
        "mlflow.source.git.commit": commit,
        "mlflow.source.git.branch": branch if branch != "(detached)" else "",
        "mlflow.source.git.dirty": "true" if any(not line.startswith("#") for line in lines) else "false",
        "mlflow.source.git.repoURL": without_url_credentials(url[0]) if url else "",
    }
    return tuple((name, value) for name, value in tags.items() if value)


def _git(directory: str, *arguments: str) -> list[str] | None:
    """Return git's output lines; None if there is no git, or it fails or takes too long."""
    try:
        done = subprocess.run(
            [*_COMMAND, *arguments],
            cwd=directory,
            env={**os.environ, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()
