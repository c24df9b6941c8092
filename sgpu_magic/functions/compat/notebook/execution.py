"""Running, ending and restarting notebooks: `dbutils.notebook`, `%run`, `dbutils.library.restartPython()`.

`%run ./other` runs another notebook in this kernel, `dbutils.notebook.run` in a kernel of its own.
"""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.metadata
import linecache
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, NoReturn

from sgpu_magic.errors import UsageError
from sgpu_magic.functions.compat.notebook.dbutils import Utility, Widgets
from sgpu_magic.options.notebook_job import NotebookExit, as_arguments, of_process
from sgpu_magic.packages.distributions import Distribution, InstalledPackages
from sgpu_magic.packages.snapshot import Change, changes, loaded_version, take_snapshot, versions
from sgpu_magic.payload.namespace import is_ipythons
from sgpu_magic.payload.notebook_text import databricks_cells, is_databricks_source
from sgpu_magic.runs.notebook import future_flags
from sgpu_magic.wire.decoding import load_json

_SUFFIXES = ("", ".py", ".ipynb")
_TIMED_OUT = 124
# frames from a magic to the code that calls it
_CALLER = 2
_SHOWN_LINES = 20
# `sgpu run` ends its notebook's runs first
_END_S = 30.0
# packages that the kernel itself uses
_KERNELS_OWN = frozenset((
    "anywidget", "comm", "ipykernel", "ipython", "ipywidgets", "jupyter-client", "jupyter-core", "msgspec", "packaging",
    "platformdirs", "psutil", "pyzmq", "sgpu-magic", "tornado", "traitlets",
))  # fmt: skip
_COMPILED = tuple(EXTENSION_SUFFIXES)


class Notebook(Utility):
    """Other notebooks, and the end of this one."""

    path = "dbutils.notebook"

    def exit(self, value: object = "") -> NoReturn:
        """End this notebook with a value: the cells that follow do not run, and `sgpu run` succeeds."""
        raise NotebookExit(str(value))

    def run(self, path: str, timeout_seconds: float = 0, arguments: Mapping[str, object] | None = None) -> str:
        """Run another notebook with `sgpu run`, in a kernel of its own, and return the value that it exits with."""
        found = find_notebook(Path.cwd(), path)
        if found is None:
            raise UsageError(f"dbutils.notebook.run: there is no notebook {path!r} in {Path.cwd()}.")
        words = [sys.executable, "-m", "sgpu_magic.cli", "run", str(found), *as_arguments(of_process())]
        for name, value in (arguments or {}).items():
            words += ["-r", f"{name}={value}"]
        if timeout_seconds:
            words += ["--timeout", f"{timeout_seconds:g}s"]
        code, out, err = _finished(words)
        if code == _TIMED_OUT:
            raise TimeoutError(f"{found.name} took longer than {timeout_seconds:g} s and was ended.")
        if code != 0:
            last_lines = "\n".join(err.splitlines()[-_SHOWN_LINES:])
            raise RuntimeError(f"{found.name} failed: `sgpu run` ended with code {code}.\n{last_lines}")
        copy = out.splitlines()[-1] if out.strip() else ""
        print(f"sgpu: {found.name} has run; its executed copy is {copy}")  # noqa: T201
        metadata: dict[str, Any] = load_json(Path(copy).read_bytes()).get("metadata", {}) if copy else {}
        return str(metadata.get("sgpu", {}).get("exit_value", ""))


def _finished(words: Sequence[str]) -> tuple[int, str, str]:
    """Run a command and wait for its end. An interrupt ends the command, then propagates."""
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    )
    with process:
        try:
            out, err = process.communicate()
        except BaseException:
            process.terminate()
            try:
                process.communicate(timeout=_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    return process.returncode, out, err


def find_notebook(folder: Path, name: str) -> Path | None:
    """Return the file of a notebook that is named as Databricks names it, without a suffix; None if there is none."""
    paths = (folder / f"{name}{suffix}" for suffix in _SUFFIXES)
    return next((path.resolve() for path in paths if path.is_file()), None)


class RunMagic:
    """`%run`: a notebook in Databricks' source format, or one named without its suffix, runs in this namespace.

    So does any notebook with arguments for its widgets, `$name="value"`.
    Everything else goes to IPython's own `%run`.

    Args:
        shell: The notebook's shell.
        widgets: Gets the arguments, `$name="value"`.
        original: IPython's magic.
    """

    # as `IPython.core.magic.no_var_expand`: IPython would replace `$name` by the value of a variable of that name
    _ipython_magic_no_var_expand = True

    def __init__(self, shell: Any, widgets: Widgets, original: Callable[[str], object]) -> None:
        self._shell = shell
        self._widgets = widgets
        self._original = original
        # the chain of running notebooks, outermost first
        self._running: list[Path] = []

    def __call__(self, line: str) -> object:
        __tracebackhide__ = True
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            words = []
        if not words or words[0].startswith("-"):
            return self._original(self._shell.var_expand(line, _CALLER))
        folder = self._running[-1].parent if self._running else Path.cwd()
        path = find_notebook(folder, words[0])
        is_ours = not words[0].endswith(".ipynb") or any(word.startswith("$") for word in words[1:])
        cells = _cells_of(path) if path is not None and is_ours else None
        if path is None or cells is None:
            line = self._shell.var_expand(line, _CALLER)
            if path is not None and self._running:
                # relative to the notebook that runs it
                line = f"{shlex.quote(str(path))}{line.strip().removeprefix(words[0])}"
            return self._original(line)
        if path in self._running:
            way = " -> ".join(each.name for each in (*self._running, path))
            raise UsageError(f"the notebooks run each other in a cycle: {way}. Remove one `%run`.")
        arguments = _arguments(words[1:], path)
        self._running.append(path)
        try:
            with self._widgets._bound(arguments):  # pyright: ignore[reportPrivateUsage]
                for number, source in cells:
                    _run_cell(self._shell, source, f"{path.name}, cell {number}")
        finally:
            self._running.pop()
        return None


def _arguments(words: Sequence[str], path: Path) -> dict[str, str]:
    given: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name.startswith("$") or not equals:
            raise UsageError(f'`%run` of the notebook {path.name} takes arguments as $name="value", not {word!r}.')
        given[name[1:]] = value
    return given


def _cells_of(path: Path) -> list[tuple[int, str]] | None:
    """Return the code cells of a notebook, each with its number; None for what IPython's own `%run` runs."""
    if path.suffix == ".ipynb":
        try:
            cells: list[dict[str, Any]] = load_json(path.read_bytes())["cells"]
            return [(at, "".join(cell["source"])) for at, cell in enumerate(cells, 1) if cell["cell_type"] == "code"]
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{path} is not a notebook: it is not valid notebook JSON.") from None
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    if not is_databricks_source(text):
        return None
    return [(at, cell.source) for at, cell in enumerate(databricks_cells(text), 1) if cell.kind == "code"]


def _run_cell(shell: Any, source: str, name: str) -> None:
    """Run a cell as IPython does, with its last expression displayed. Errors are raised, not shown."""
    __tracebackhide__ = True
    code: str = shell.transform_cell(source)
    # without a modification time, tracebacks and `inspect` find the source here
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    body = ast.parse(code, name).body
    flags = future_flags(shell)
    last_expression = (
        body.pop() if body and isinstance(body[-1], ast.Expr) and not code.rstrip().endswith(";") else None
    )
    exec(compile(ast.Module(body, []), name, "exec", flags, dont_inherit=True), shell.user_ns)
    if last_expression is not None:
        exec(compile(ast.Interactive([last_expression]), name, "single", flags, dont_inherit=True), shell.user_ns)


# ---------------------------------------------------------------- restarting Python

# The kernel keeps running: the user's variables are removed, and modules whose distribution was replaced since the
# extension was loaded are imported again by the next import. Compiled modules can't be imported twice in a process and
# need a restart of the kernel.


class Library(Utility):
    """Python's packages.

    Args:
        shell: The notebook's shell.
        keep: Names of the namespace that stay.
    """

    path = "dbutils.library"

    def __init__(self, shell: Any, keep: Collection[str]) -> None:
        self._shell = shell
        self._keep = keep
        self._installed = take_snapshot()

    def restartPython(self) -> None:
        """Remove all variables, and take new versions of packages with the next import. The kernel goes on."""
        _forget_variables(self._shell, self._keep)
        before, self._installed = self._installed, take_snapshot()
        for sentence in forget_replaced(before, self._installed, sys.modules):
            print(f"sgpu: {sentence}")  # noqa: T201


def _forget_variables(shell: Any, keep: Collection[str]) -> None:
    namespace: dict[str, object] = shell.user_ns
    # names that IPython and its extensions have put there
    hidden: dict[str, object] = shell.user_ns_hidden
    for name, value in list(namespace.items()):
        is_users = name not in hidden or hidden[name] is not value
        if is_users and name not in keep and not is_ipythons(name, value):
            namespace.pop(name, None)
    hook = shell.displayhook
    if getattr(hook, "do_full_cache", False):
        # values in Out would keep device memory allocated
        hook.flush()
    gc.collect()


def forget_replaced(before: InstalledPackages, now: InstalledPackages, modules: dict[str, ModuleType]) -> list[str]:
    """Remove the loaded modules of distributions whose version has changed, so that they are imported anew.

    Args:
        before: The distributions when this process loaded its modules.
        now: The distributions that are installed now.
        modules: Loaded modules, as in `sys.modules`.

    Returns:
        A sentence for each distribution whose modules have to stay until the kernel is restarted.
    """
    stay: list[str] = []
    importlib.invalidate_caches()
    for change in changes(versions(before), versions(now)):
        found = now.get(change.name) or before.get(change.name)
        if found is None:
            continue
        loaded = _loaded(_tops(found), modules)
        if not loaded or _is_loaded_already(found, change, modules):
            continue
        if change.name in _KERNELS_OWN or any(_is_compiled(modules[name]) for name in loaded):
            stay.append(f"restart the kernel to use the change of {change.words}: compiled code of it is loaded.")
            continue
        for name in loaded:
            modules.pop(name, None)
    return stay


def _is_loaded_already(found: Distribution, change: Change, modules: Mapping[str, ModuleType]) -> bool:
    """Whether the loaded version is the installed one, as for a package that was imported after its change."""
    if not change.now:
        return False
    version = loaded_version(found.module_names, modules)
    if version:
        return version == change.now
    # a package that was not installed before must have been imported after its installation
    return not change.before and any(_is_compiled(modules[name]) for name in _loaded(_tops(found), modules))


def _loaded(tops: Collection[str], modules: Mapping[str, ModuleType]) -> list[str]:
    starts = tuple(f"{name}." for name in tops)
    return [name for name in list(modules) if name in tops or name.startswith(starts)]


def _is_compiled(module: object) -> bool:
    file: object = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    return isinstance(file, str) and file.endswith(_COMPILED)


def _tops(found: Distribution) -> frozenset[str]:
    """Return the modules of a distribution. In a namespace package, only the modules that are its own."""
    try:
        files = importlib.metadata.Distribution.at(found.location).files or []
    except OSError:
        files = []
    paths = [PurePosixPath(each).parts for each in files if each.suffix in (".py", ".so")]
    packages = {parts[0] for parts in paths if len(parts) == 2 and parts[1] == "__init__.py"}
    modules = {(*parts[:-1], parts[-1].partition(".")[0])[:2] for parts in paths}
    modules = {names for names in modules if all(map(str.isidentifier, names))}
    tops = frozenset(names[0] if names[0] in packages else ".".join(names) for names in modules)
    return tops or frozenset(found.module_names)
