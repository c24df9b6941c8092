"""`sgpu run`: executes a notebook without a front end, from a shell, cron, Airflow or CI.

job        the job to run: options of the command and keys of a job file, validated; parameters
formats    reading notebooks: .ipynb, Databricks source, percent cells, jupytext; telling scripts apart
execution  runs the kernel cell by cell
cell_end   what a cell's exception means: the exit code, the value of `dbutils.notebook.exit`
outcome    cells inserted before the run; the executed copy

Of `sgpu run`, a kernel imports only this package, for `run_as_script`, and `cell_end`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def run_as_script(shell: Any, file: str, folder: str, arguments: list[str]) -> None:
    """Make a kernel execute a script's cell as `python script` would.

    Args:
        shell: The kernel's shell.
        file: The script, which becomes `__file__` and names the code of its cell in tracebacks.
        folder: The first entry of `sys.path`.
        arguments: `sys.argv`.
    """
    sys.path.insert(0, folder)
    sys.argv[:] = arguments
    shell.user_ns["__file__"] = file
    compiler = shell.compile
    text = Path(file).read_text("utf-8").rstrip()
    named, shown = compiler.get_code_name, compiler.format_code_name

    def code_name(raw: str, *more: Any) -> str:
        return file if raw.rstrip() == text else named(raw, *more)

    def shown_name(name: str) -> Any:
        return None if name == file else shown(name)

    compiler.get_code_name = code_name
    compiler.format_code_name = shown_name
    # no value of a last expression is displayed
    shell.ast_node_interactivity = "none"
