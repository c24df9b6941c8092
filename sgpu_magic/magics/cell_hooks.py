"""Hooks around cells: `%sgpu_auto`, names that plain cells rebind, warm ranks, launchers of other packages.

Exception groups raised by ranks are displayed with the ranks' own tracebacks.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from sgpu_magic.client.pool import Pool
from sgpu_magic.client.this_machine import this_interpreter
from sgpu_magic.payload.names import names_bound
from sgpu_magic.payload.namespace import only_in_notebook
from sgpu_magic.payload.notebook_text import with_cell_magic
from sgpu_magic.runs import packages
from sgpu_magic.runs.sessions import registry
from sgpu_magic.runs.sessions.namespace_sync import Assigned
from sgpu_magic.runs.sessions.session import Session
from sgpu_magic.runs.submit.cell_source import transform_of
from sgpu_magic.wire.client import Warm

# ---------------------------------------------------------------- %sgpu_auto


CELL_MAGIC = "sgpu_auto_cell"
"""The internal magic that a plain cell is rewritten to."""

_STAYS = re.compile(
    r"\s*(?:[\w,\s]+=\s*)?"
    r"%(?:sgpu_\w+|pip|conda|mamba|uv|(?:un|re)?load_ext|env|set_env|restart_python|fs)\b"
    # runs another notebook with arguments for its widgets, which are in this kernel
    r"|%run\s.*\s'?\$\w+="
)
_IS_BLANK = re.compile(r"\s*(?:#.*)?$")
_NAME = re.compile(r"(?<![\w.])[^\W\d]\w*")
_RENEW_S = 20.0
_LOOK_S = 0.2

# IPython prints groups with `traceback.print_exc`, and syntax errors with the kernel's frames above them; other errors
# render themselves
_DRAWN_BY_IPYTHON = (BaseExceptionGroup, SyntaxError)
_LAUNCHER = "notebook_launcher"
_STRATEGY = "ddp_notebook"


class AutoMode:
    """The input transformer of `%sgpu_auto`. It precedes IPython's own, because they drop leading blank lines.

    Args:
        shell: The notebook's shell.

    Attributes:
        is_on: Whether plain cells go to the ranks.
    """

    # IPython skips such transformers when it checks whether a cell is complete
    has_side_effects = True
    # such transformers are skipped when a cell's body is read
    sends_cells = True

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self.is_on = False
        cleanup: list[object] = shell.input_transformers_cleanup
        # behind the one of `sgpu_magic.compat`, also when this extension is loaded again
        before = [at for at, each in enumerate(cleanup) if getattr(each, "comes_first", False)]
        cleanup.insert(before[-1] + 1 if before else 0, self)
        registry.when_dropped.append(self._session_gone)

    def remove(self) -> None:
        """Remove the transformer from the shell."""
        registry.when_dropped.remove(self._session_gone)
        self.is_on = False
        if self in self._shell.input_transformers_cleanup:
            self._shell.input_transformers_cleanup.remove(self)

    def __call__(self, lines: list[str]) -> list[str]:
        source = "".join(lines)
        if not self.takes(source) or not self._is_users(source):
            return lines
        return [f"get_ipython().run_cell_magic({CELL_MAGIC!r}, '', {''.join(_with_its_first_lines(lines))!r})\n"]

    def takes(self, source: str) -> bool:
        """Whether this cell goes to the ranks."""
        return self.is_on and not stays_here(source.splitlines()) and not self._uses_notebook_objects(source)

    def _uses_notebook_objects(self, source: str) -> bool:
        """Whether a cell uses an object that can't leave the notebook by its nature, such as `dbutils`."""
        namespace: dict[str, object] = self._shell.user_ns
        code = "\n".join(line for line in source.splitlines() if not _IS_BLANK.match(line))
        return any(only_in_notebook(namespace.get(name)) for name in frozenset(_NAME.findall(code)))

    def _is_users(self, source: str) -> bool:
        """Whether the source is a cell that the user executed.

        Front ends execute their own code silently or without history, and magics such as `%%capture` run their body.
        """
        kernel = getattr(self._shell, "kernel", None)
        if kernel is None:
            return True
        parent: dict[str, Any] = kernel.get_parent("shell") or {}
        content: dict[str, Any] = parent.get("content", {})
        if content.get("silent") or not content.get("store_history", True):
            return False
        code = str(content.get("code", ""))
        # `sgpu_magic.compat` has already removed `%python` from a cell
        return source.splitlines() in (code.splitlines(), with_cell_magic(code).source.splitlines())

    def _session_gone(self) -> None:
        was_on, self.is_on = self.is_on, self.is_on and bool(registry.names())
        # otherwise no cell ended the session, so there is no cell to print below
        if was_on and not self.is_on and threading.current_thread() is threading.main_thread():
            print("%sgpu_auto is off again: no session is connected any more.")  # noqa: T201


def _with_its_first_lines(lines: list[str]) -> list[str]:
    """Replace leading blank lines, which IPython on the rank drops, by comments: line numbers then match the editor."""
    blank = next((index for index, line in enumerate(lines) if line.strip()), len(lines))
    return ["#\n"] * blank + lines[blank:]


def stays_here(lines: Sequence[str]) -> bool:
    """Whether a cell always runs in the notebook: it has a cell magic, only notebook magics, or no code."""
    code = [line for line in lines if not _IS_BLANK.match(line)]
    return not code or code[0].lstrip().startswith("%%") or all(_STAYS.match(line) for line in code)


# ---------------------------------------------------------------- names that a cell rebinds


class RebindTracker:
    """Tracks which names plain cells rebind while sessions are connected.

    Args:
        shell: The notebook's shell.
        auto: Decides which cells go to the ranks.
    """

    def __init__(self, shell: Any, auto: AutoMode) -> None:
        self._shell = shell
        self._auto = auto
        self._undo: list[tuple[Session, Assigned]] = []

    def before_cell(self, info: Any) -> None:
        """Record the names before the cell runs: once it has bound them, it may itself run something in a session."""
        self._undo = []
        sessions, source = registry.all_sessions(), info.raw_cell
        if not sessions or not isinstance(source, str):
            return
        if not source.lstrip().startswith("%%") and not self._auto.takes(source):
            with contextlib.suppress(SyntaxError):
                names = names_bound(source, transform=transform_of(self._shell))
                self._undo = [(session, session.shipping.assigned(names)) for session in sessions]

    def after_cell(self, result: Any) -> None:
        """Take back what a failed cell would have assigned."""
        undo, self._undo = self._undo, []
        if not result.success:
            for session, before in undo:
                session.shipping.not_assigned(before)


# ---------------------------------------------------------------- warm ranks


class WarmPool:
    """Keeps this kernel's zygote and standby group warm.

    Args:
        pool: The pool that holds them.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._ranks = 0
        self._key = this_interpreter().key
        self._renewed_at = self._looked_at = time.monotonic()

    def ran(self, ranks: int) -> None:
        """Record the size of the last run, for which the pool replenishes its standby group by itself."""
        self._ranks = ranks
        self._renewed_at = time.monotonic()

    def after_cell(self, result: object = None) -> None:
        """Handle IPython's `post_run_cell`. Takes a few `stat` calls, and occasionally a message."""
        if registry.names():
            # a connected session keeps its own standby group, on its own devices
            self._ranks = 0
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            # check at most once per interval: installing packages takes longer
            return
        interpreter, self._looked_at = this_interpreter(), now
        if interpreter.key != self._key or (self._ranks and now - self._renewed_at > _RENEW_S):
            self._key, self._renewed_at = interpreter.key, now
            self._pool.tell(Warm(interpreter=interpreter, ranks=self._ranks))
        packages.of(self._pool).begin()


# ---------------------------------------------------------------- errors of ranks that IPython renders itself


def draw_rank_errors(shell: Any) -> None:
    """Display groups and syntax errors of ranks with the ranks' tracebacks, unless the user has set a handler."""
    if not shell.custom_exceptions:
        shell.set_custom_exc(_DRAWN_BY_IPYTHON, _draw_rank_error)


def draw_no_rank_errors(shell: Any) -> None:
    """Undo `draw_rank_errors`."""
    if shell.custom_exceptions == _DRAWN_BY_IPYTHON:
        shell.set_custom_exc((), None)


def _draw_rank_error(
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
    tb_offset: int | None = None,
) -> list[str]:
    draw: Callable[[], list[str]] | None = getattr(error, "_render_traceback_", None)
    if draw is None:
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset, running_compiled_code=True)
    else:
        shell._showtraceback(kind, error, draw())
    return []


# ---------------------------------------------------------------- cells that start processes with other packages


def hint_for(source: str) -> str:
    """Return the line for a cell that launches processes with accelerate or Lightning, "" for any other cell.

    Args:
        source: The cell as Python code.
    """
    try:
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    except (SyntaxError, ValueError):
        return ""
    for call in calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        strategy = given.get("strategy")
        if name == _LAUNCHER:
            function = _text(call.args[0] if call.args else given.get("function"), "the function")
            arguments = call.args[1] if len(call.args) > 1 else given.get("args")
            number = _text(call.args[2] if len(call.args) > 2 else given.get("num_processes"), "N")
            inner = ", ".join(map(ast.unparse, arguments.elts)) if isinstance(arguments, ast.Tuple) else ""
            shown = f"`{function}({inner or ('' if arguments is None else '...')})`"
            return f"sgpu: to run this on the pool, write {shown} in a cell with `%%distributed --gpus {number}`."
        if isinstance(strategy, ast.Constant) and str(strategy.value).startswith(_STRATEGY):
            number = _text(given.get("devices"), "N")
            return (
                f"sgpu: to run this on the pool, write `%%distributed --gpus {number}` above the cell, and "
                'strategy="ddp" in it.'
            )
    return ""


def _text(node: ast.expr | None, otherwise: str) -> str:
    return otherwise if node is None else ast.unparse(node)


class LauncherHints:
    """Prints the hint once for each line of text in a kernel.

    Args:
        shell: The notebook's shell.
        auto: The switch that sends plain cells to the ranks.
    """

    def __init__(self, shell: Any, auto: AutoMode) -> None:
        self._shell = shell
        self._auto = auto
        self._shown: set[str] = set()

    def before_cell(self, info: Any) -> None:
        """Handle IPython's `pre_run_cell`."""
        source = str(getattr(info, "raw_cell", "") or "")
        is_plain = not self._auto.is_on and not source.lstrip().startswith("%%")
        if not is_plain or (_LAUNCHER not in source and _STRATEGY not in source):
            return
        transform: Callable[[str], str] | None = transform_of(self._shell)
        hint = hint_for(source if transform is None else transform(source))
        if hint and hint not in self._shown:
            self._shown.add(hint)
            sys.stdout.write(f"{hint}\n")
