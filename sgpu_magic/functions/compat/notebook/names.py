"""Puts the names and magics of a Databricks notebook into a shell, except those that exist there already."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any

from sgpu_magic.errors import UsageError
from sgpu_magic.functions.compat.notebook import displayHTML, file_system
from sgpu_magic.functions.compat.notebook.dbutils import Secrets, Utility, Widgets
from sgpu_magic.functions.compat.notebook.execution import Library, Notebook, RunMagic
from sgpu_magic.functions.compat.notebook.file_system import FileSystem
from sgpu_magic.functions.compat.notebook.spark import Spark, run_sql
from sgpu_magic.options.notebook_job import is_job, parameters_of_process
from sgpu_magic.payload.notebook_text import CELL_MAGIC_NAMES, with_cell_magic

_FIRST_LINE = re.compile(r"\s*%([A-Za-z][A-Za-z-]*)(?![\w%-])[ \t]*(.*)")
_LANGUAGES = {"scala": "Scala", "R": "R", "r": "R"}


def install(shell: Any) -> ExitStack:
    """Put the names and magics into a shell. Closing the returned stack removes them.

    Raises:
        UsageError: The parameters of `sgpu run` can't be read.
    """
    undo = ExitStack()
    namespace: dict[str, object] = shell.user_ns
    draws = getattr(shell, "kernel", None) is not None and not is_job()

    def show(control: Any) -> None:
        shell.display_pub.publish(control._repr_mimebundle_())

    widgets = Widgets(parameters_of_process(), show if draws else None)
    ours: dict[str, object] = {"displayHTML": displayHTML, "spark": Spark(namespace)}
    ours["dbutils"] = dbutils = DBUtils(shell, widgets, ours)
    for name in [name for name in ours if name in namespace]:
        del ours[name]
    # `%who` lists the user's own variables
    shell.push(ours, interactive=False)
    undo.callback(_take_back, shell, dict(ours))

    transformer = CellMagics(shell)
    shell.input_transformers_cleanup.insert(0, transformer)
    undo.callback(_remove, shell.input_transformers_cleanup, transformer)

    def run_sql_cell(line: str, cell: str) -> None:
        run_sql(namespace.get("spark", ours.get("spark")), f"{line}\n{cell}", namespace)

    def run_fs(line: str, cell: str | None = None) -> None:
        for command in [line, *(cell or "").splitlines()]:
            if command.strip():
                file_system.run_line(dbutils.fs, command)

    def restart_python(line: str) -> None:
        dbutils.library.restartPython()

    magics: list[tuple[str, str, Callable[..., object]]] = [
        ("line", "restart_python", restart_python),
        ("line_cell", "fs", run_fs),
        ("cell", "sql", run_sql_cell),
        *(("cell", name, _refuses(language)) for name, language in _LANGUAGES.items()),
    ]
    for kind, name, function in magics:
        if shell.find_line_magic(name) is None and shell.find_cell_magic(name) is None:
            shell.register_magic_function(function, kind, name)
            undo.callback(_unregister, shell, name, function)
    original = shell.find_line_magic("run")
    if original is not None:
        run = RunMagic(shell, widgets, original)
        # in the table itself: registering would make the function an attribute too
        shell.magics_manager.magics["line"]["run"] = run
        undo.callback(_unregister, shell, "run", run, original)
    return undo


class DBUtils(Utility):
    """Utilities of a Databricks notebook, on this machine.

    Args:
        shell: The notebook's shell.
        widgets: `dbutils.widgets`.
        keep: Names that `restartPython` keeps.
    """

    def __init__(self, shell: Any, widgets: Widgets, keep: Collection[str]) -> None:
        self.fs = FileSystem()
        self.library = Library(shell, keep)
        self.notebook = Notebook()
        self.secrets = Secrets()
        self.widgets = widgets

    def _overview(self) -> str:
        parts = [part for part in vars(self).values() if isinstance(part, Utility)]
        lines = [f"  {part.path.partition('.')[2]}: {(part.__doc__ or '').partition(chr(10))[0]}" for part in parts]
        return "\n".join(["dbutils has these parts; dbutils.fs.help() lists the functions of one:", "", *lines])


class CellMagics:
    """Input transformer for cells that Databricks marks with one percent sign in their first line, such as `%sh`.

    Args:
        shell: The notebook's shell. Names for which it has a line magic are left alone.
    """

    # before the transformer of `%sgpu_auto`: a cell that becomes a cell magic stays in the notebook
    comes_first = True

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, lines: list[str]) -> list[str]:
        begin = next((at for at, line in enumerate(lines) if line.strip()), len(lines))
        found = _FIRST_LINE.match(lines[begin]) if begin < len(lines) else None
        if found is None:
            return lines
        name, rest = found[1], found[2]
        if name == "fs":
            # a line magic, unless commands follow below it
            below = any(line.strip() for line in lines[begin + 1 :])
            return ["%%fs\n" if not rest else f"%%fs {rest}\n", *lines[begin + 1 :]] if below else lines
        if name.lower() not in CELL_MAGIC_NAMES or self._shell.find_line_magic(name) is not None:
            return lines
        cell = with_cell_magic("".join(lines[begin:]))
        source = f"%%markdown\n{cell.source}" if cell.kind == "markdown" else cell.source
        if not source.partition("\n")[2].strip() and source.startswith("%%"):
            # IPython refuses a cell magic without a body
            return ["pass\n"]
        return f"{source}\n".splitlines(keepends=True)


def _refuses(language: str) -> Callable[[str, str], None]:
    def refuse(line: str, cell: str) -> None:
        raise UsageError(
            f"cells in {language} need a kernel or an IPython extension of that language; this kernel runs Python."
        )

    return refuse


def _take_back(shell: Any, ours: dict[str, object]) -> None:
    for name, value in ours.items():
        if shell.user_ns.get(name) is value:
            del shell.user_ns[name]
        shell.user_ns_hidden.pop(name, None)


def _remove(transformers: list[object], transformer: object) -> None:
    if transformer in transformers:
        transformers.remove(transformer)


def _unregister(shell: Any, name: str, function: object, original: object = None) -> None:
    for table in shell.magics_manager.magics.values():
        if table.get(name) is function:
            del table[name]
            if original is not None:
                table[name] = original
