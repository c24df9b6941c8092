"""The kernel's notebook: facts about it, its cells and its directory; outputs below cells; detection of restarts."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import math
import os
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from sgpu_magic.client.pools import Pools
from sgpu_magic.client.this_machine import this_owner
from sgpu_magic.options import notebook_job
from sgpu_magic.packages.secrets import without_url_credentials
from sgpu_magic.payload.names import FUTURE_FLAGS
from sgpu_magic.views.html_style import SANS, SOFT
from sgpu_magic.wire.run import Owner

# a terminal or a log keeps every line, so progress is printed rarely there
_LINE_EVERY_S = 10.0
JOIN_S = 2.0
_DETACH_TIMEOUT_S = 1.0
# on a restart, a front end interrupts the kernel before it requests the shutdown
_RESTART_PATIENCE_S = 0.3
_SHUTDOWN = "shutdown_request"
_KERNEL_FILE = re.compile(r"kernel-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.json")
# a large repository on a network file system takes longer; its state is then not recorded
_TIMEOUT_S = 2.0
_FRESH_S = 5.0
_COMMAND = ("git", "-c", "core.fsmonitor=false", "--no-optional-locks")


def owner(shell: Any, *, of_cell: bool = True) -> Owner:
    """Describe the owner of a run submitted from this process.

    Args:
        shell: The IPython shell; None in a plain Python program.
        of_cell: Whether the running cell submits the run.
    """
    if shell is None:
        return this_owner()
    return this_owner(notebook_name(shell), kernel_id(shell), cell_id(shell) if of_cell else "")


def cell_number(shell: Any) -> int | None:
    """Return the number of the running cell, None without a shell.

    Newer versions of IPython increment the count before a cell runs, older ones after it.
    """
    if shell is None:
        return None
    running = getattr(shell.displayhook, "exec_result", None)
    return getattr(running, "execution_count", None) or shell.execution_count


def cell_numbers(shell: Any) -> dict[str, int]:
    """Return cell numbers by the file name that IPython gives a cell's code; empty in a program and in a script."""
    numbers: dict[str, int] = getattr(getattr(shell, "compile", None), "_filename_map", {})
    script = notebook_job.of_process().script
    return {file: number for file, number in numbers.items() if file != script} if script else numbers


def future_flags(shell: Any) -> int:
    """Return the compiler flags of all `from __future__ import` in the cells run so far."""
    return int(getattr(getattr(shell, "compile", None), "flags", 0)) & FUTURE_FLAGS


def notebook_path(shell: Any) -> str:
    """Return the notebook's path, "" if unknown: VS Code sets it in the namespace, Jupyter in a variable."""
    return str(shell.user_ns.get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME", ""))


def notebook_name(shell: Any) -> str:
    """Return the file name of the notebook, "" if unknown."""
    return os.path.basename(notebook_path(shell))


def kernel_id(shell: Any) -> str:
    """Return the Jupyter server's id of this kernel, "" without a server."""
    application = getattr(getattr(shell, "kernel", None), "parent", None)
    found = _KERNEL_FILE.fullmatch(os.path.basename(str(getattr(application, "connection_file", ""))))
    return found[1] if found is not None else ""


def cell_id(shell: Any) -> str:
    """Return the id of the running cell, which JupyterLab and Notebook send with each execution; "" elsewhere."""
    get_parent: Any = getattr(shell, "get_parent", dict)
    message: dict[str, Any] = get_parent() or {}
    return str(message.get("metadata", {}).get("cellId") or "")


def working_directory() -> str:
    """Return the working directory; `/` if it has been removed, since relative paths have no meaning then."""
    try:
        return os.getcwd()
    except OSError:
        return os.sep


# ---------------------------------------------------------------- the git repository


Tags = tuple[tuple[str, str], ...]

_asking = threading.Lock()
# by directory: the monotonic time of the last git call, and its tags
_seen: dict[str, tuple[float, Tags]] = {}


def tell_git_state(directory: str, on_tags: Callable[[Tags], None]) -> None:
    """Call `on_tags` with the state of a repository: at once if it is known, else later from a thread.

    Args:
        directory: A folder in the repository; without a repository or git, `on_tags` is not called.
        on_tags: Takes MLflow's tags.
    """

    def find() -> None:
        # if many runs are submitted at once, only the first calls git
        with _asking:
            if (tags := _known(directory)) is None:
                tags = git_tags(directory)
                _seen[directory] = (time.monotonic(), tags)
        if tags:
            on_tags(tags)

    known = _known(directory)
    if known is None:
        threading.Thread(target=find, name="sgpu-git", daemon=True).start()
    elif known:
        on_tags(known)


def _known(directory: str) -> Tags | None:
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


# ---------------------------------------------------------------- outputs below cells


def publish(data: Mapping[str, object], display_id: str = "", *, update: bool = False) -> None:
    """Show data by media type below the running cell, or in place of what was shown under `display_id`."""
    # IPython declares no types here
    from IPython.display import publish_display_data  # pyright: ignore[reportUnknownVariableType]

    publish_display_data(dict(data), transient={"display_id": display_id} if display_id else None, update=update)


class Background:
    """A thread whose outputs appear below the cell that started it.

    Args:
        name: The thread's name.
        work: The function to run; takes an event that is set to stop it.
    """

    def __init__(self, name: str, work: Callable[[threading.Event], None]) -> None:
        self._stopped = threading.Event()
        # with the cell's context, where ipykernel keeps the cell that outputs belong to
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(work, self._stopped), name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stop the thread. If it waits for a pool's reply, it ends after the reply and shows nothing more."""
        self._stopped.set()
        self._thread.join(JOIN_S)


class NoticeBoard:
    """Shows and removes one notice at a time below the cell that ran last.

    Args:
        shown: Whether there is a front end; without one, only `%sgpu_status` shows notices.
    """

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._display_id = ""
        self._lock = threading.Lock()

    def notice(self, text: str) -> None:
        """Show `text`, or remove the notice if it is "". Does not block the link's thread, which calls this."""
        if self._shown and (text or self._display_id):
            threading.Thread(target=self.show, args=(text,), name="sgpu-notice", daemon=True).start()

    def show(self, text: str) -> None:
        """As `notice`, in the calling thread."""
        with self._lock:
            if not text and not self._display_id:
                return
            update = bool(self._display_id)
            display_id = self._display_id or f"sgpu-notice-{secrets.token_hex(4)}"
            self._display_id = display_id if text else ""
            html = f'<div style="{SANS};font-size:12px;{SOFT}">sgpu: {escape(text)}</div>' if text else ""
            data = {"text/plain": f"sgpu: {text}" if text else "", "text/html": html}
            publish(data, display_id, update=update)


class SendingBoard:
    """Shows in one line what takes long before a run starts, and removes it; without a front end, on stderr.

    Args:
        is_notebook: Whether there is a front end.
    """

    def __init__(self, is_notebook: bool) -> None:
        self._display = NoticeBoard(is_notebook) if is_notebook else None
        self._due = 0.0

    def show(self, text: str) -> None:
        """Show `text`; "" removes the line. Called by the thread that is at work."""
        if self._display is not None:
            self._display.show(text)
        elif text and time.monotonic() >= self._due:
            self._due = time.monotonic() + _LINE_EVERY_S
            sys.stderr.write(f"sgpu: {text}\n")
            sys.stderr.flush()


# ---------------------------------------------------------------- kernel restarts


def watch_restarts(kernel: Any, pools: Pools, *, detaches: bool) -> RestartWatch | None:
    """Return a watch over the kernel's restarts; None if there is no kernel, or it does not report them."""
    if _SHUTDOWN not in getattr(kernel, "control_handlers", {}):
        return None
    return RestartWatch(kernel, pools, detaches=detaches)


class RestartWatch:
    """Wraps the kernel's handler of shutdown requests.

    Args:
        kernel: The ipykernel.
        pools: The process's pools.
        detaches: Whether to detach the runs before the kernel ends.

    Attributes:
        asked: Set when a restart has been requested.
        before: Called when a restart is requested, in the thread of the control channel; must return quickly.
    """

    def __init__(self, kernel: Any, pools: Pools, *, detaches: bool) -> None:
        self.detaches = detaches
        self.asked = threading.Event()
        self.before: Callable[[], None] | None = None
        self._kernel = kernel
        self._pools = pools
        self._original = kernel.control_handlers[_SHUTDOWN]
        kernel.control_handlers[_SHUTDOWN] = self._shut_down

    def remove(self) -> None:
        """Restore the kernel's own handler."""
        if self._kernel.control_handlers.get(_SHUTDOWN) == self._shut_down:
            self._kernel.control_handlers[_SHUTDOWN] = self._original

    def is_asked(self) -> bool:
        """Whether an interrupt belongs to a restart that detaches the runs; waits up to 0.3 s for the restart."""
        with contextlib.suppress(KeyboardInterrupt):
            return self.detaches and self.asked.wait(_RESTART_PATIENCE_S)
        return False

    async def _shut_down(self, stream: Any, ident: Any, parent: Any) -> None:
        """Handle a shutdown request, in the thread of the control channel while the main thread continues."""
        if parent["content"].get("restart"):
            self.asked.set()
            if self.before is not None:
                self.before()
            if self.detaches:
                self._pools.detach_all(_DETACH_TIMEOUT_S)
        handled = self._original(stream, ident, parent)
        if inspect.isawaitable(handled):
            await handled
