"""The state of the git repository that a run was submitted from, found behind the submission's back."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sgpu_magic.packages.secrets import without_url_credentials

Tags = tuple[tuple[str, str], ...]

# a large repository on a network's disk takes longer, and then nothing is said
_TIMEOUT_S = 2.0
_FRESH_S = 5.0
_COMMAND = ("git", "-c", "core.fsmonitor=false", "--no-optional-locks")


@dataclass(frozen=True, slots=True)
class _Seen:
    """What was found in a directory.

    Args:
        tags: As MLflow names them; none where there is no repository, or no git.
        at: When, by the monotonic clock.
    """

    tags: Tags
    at: float


class GitStates:
    """Finds the state of repositories, each at most once in a few seconds."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._waiting: list[tuple[str, Callable[[Tags], None]]] = []
        self._lock = threading.Lock()
        self._works = False

    def tell(self, directory: str, told: Callable[[Tags], None]) -> None:
        """Call `told` with the directory's state: at once when it is known, else soon, from a thread."""
        seen = self._seen.get(directory)
        if seen is not None and time.monotonic() - seen.at < _FRESH_S:
            if seen.tags:
                told(seen.tags)
            return
        with self._lock:
            self._waiting.append((directory, told))
            begins, self._works = not self._works, True
        if begins:
            threading.Thread(target=self._work, name="sgpu-git", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._works = False
                    return
                waiting, self._waiting = self._waiting, []
            found: dict[str, Tags] = {}
            for directory, told in waiting:
                if directory not in found:
                    found[directory] = git_tags(directory)
                    self._seen[directory] = _Seen(found[directory], time.monotonic())
                if found[directory]:
                    told(found[directory])


def git_tags(directory: str) -> Tags:
    """Ask git for commit, branch, whether anything has changed, and where the repository comes from.

    Returns:
        Nothing where there is no git, no repository, or no answer in time.
    """
    try:
        status = _start(directory, "status", "--porcelain=v2", "--branch", "--untracked-files=normal")
        origin = _start(directory, "config", "--get", "remote.origin.url")
    except OSError:
        return ()
    lines, url = _answer(status), _answer(origin)
    if lines is None:
        return ()
    heads = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch.") and " " in line[2:])
    commit, branch = heads.get("branch.oid", ""), heads.get("branch.head", "")
    if commit in ("", "(initial)"):
        return ()
    tags = [("mlflow.source.git.commit", commit)]
    if branch and branch != "(detached)":
        tags.append(("mlflow.source.git.branch", branch))
    tags.append(("mlflow.source.git.dirty", "true" if any(not line.startswith("#") for line in lines) else "false"))
    if url:
        tags.append(("mlflow.source.git.repoURL", without_url_credentials(url[0])))
    return tuple(tags)


def git_state(directory: str) -> Mapping[str, str]:
    """The same by name, for who compares."""
    return dict(git_tags(directory))


def _start(directory: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*_COMMAND, *arguments],
        cwd=directory,
        env={**os.environ, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        errors="replace",
    )


def _answer(process: subprocess.Popen[str]) -> list[str] | None:
    """The lines that it has written; None when it has failed or takes too long."""
    try:
        text, _ = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None
    return text.splitlines() if process.returncode == 0 else None


states = GitStates()
