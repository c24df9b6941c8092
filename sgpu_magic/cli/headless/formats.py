"""Reads notebooks in all supported formats: .ipynb, Databricks source, percent cells, jupytext's other text formats.

`payload.notebook_text` splits Databricks source and percent cells.
"""

# nbformat and jupytext are not typed
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ast
import enum
import importlib
import io
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sgpu_magic.errors import UsageError
from sgpu_magic.payload.notebook_text import (
    HEADER,
    TextCell,
    databricks_cells,
    is_databricks_source,
    markers,
    percent_cells,
)
from sgpu_magic.wire.decoding import load_json

NOTEBOOK, SCRIPT = ".ipynb", ".py"
SUFFIXES = (NOTEBOOK, SCRIPT, ".md", ".markdown", ".rmd", ".qmd")

_RUN = re.compile(r"^%run[ \t]+(\S.*)$", re.MULTILINE)
_ARGUMENT = re.compile(r"\$\w+=")
# a script that uses one of these names from this package submits runs itself
_SUBMITS = frozenset(("distributed", "ray_launch", "map", "connect", "Run", "*"))
_PACKAGES = ("sgpu_magic", "serverless_gpu", "databricks.air")


class Form(enum.Enum):
    """The format of a file."""

    IPYNB = enum.auto()
    DATABRICKS = enum.auto()
    PERCENT = enum.auto()
    JUPYTEXT = enum.auto()
    SCRIPT = enum.auto()


def form_of(path: Path) -> Form:
    """Return the format of a file. A Python file without any sign of a notebook is a script.

    Raises:
        UsageError: The file can't be read.
    """
    if path.suffix.lower() == NOTEBOOK:
        return Form.IPYNB
    if path.suffix.lower() != SCRIPT:
        return Form.JUPYTEXT
    text = _text_of(path)
    if is_databricks_source(text):
        return Form.DATABRICKS
    header = _header_of(text)
    form = re.search(r"^#\s+format_name:\s*(\w+)", header, re.MULTILINE)
    if form is not None:
        return Form.PERCENT if form[1] in ("percent", "hydrogen") else Form.JUPYTEXT
    if markers(text):
        return Form.PERCENT
    return Form.JUPYTEXT if re.search(r"^# jupy", header, re.MULTILINE) else Form.SCRIPT


def read_notebook(path: Path, form: Form) -> Any:
    """Read a file as a notebook of nbformat version 4. `%run` of another text notebook inserts that one's cells.

    In an .ipynb notebook, that applies only to a notebook that `%run` names without a suffix, as in Databricks.

    Raises:
        UsageError: The file can't be read, needs a library that is not installed, or runs itself.
    """
    nbformat: Any = importlib.import_module("nbformat")
    if form is Form.IPYNB:
        made = _ipynb(path)
        made.cells = [part for cell in made.cells for part in _ipynb_parts(cell, path, nbformat)]
        return made
    kernel = kernel_name(path, form) or "python3"
    cells = [_new_cell(cell, nbformat) for cell in _cells_of(path, form, ())]
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": {"name": kernel, "display_name": kernel}})


def kernel_name(path: Path, form: Form) -> str:
    """Return the kernel name in a notebook's metadata, "" for none.

    Raises:
        UsageError: The file is not a notebook.
    """
    if form is Form.IPYNB:
        try:
            return str(load_json(path.read_bytes()).get("metadata", {}).get("kernelspec", {}).get("name", ""))
        except (ValueError, AttributeError):
            raise UsageError(f"{path} is not a notebook: it is not valid notebook JSON.") from None
    if form is Form.JUPYTEXT:
        return str(_by_jupytext(path).metadata.get("kernelspec", {}).get("name", ""))
    header = _header_of(_text_of(path))
    named = re.search(r"^#\s+kernelspec:\s*\n(?:#.*\n)*?#\s+name:\s*(\S+)", header, re.MULTILINE)
    return named[1] if named is not None else ""


def check_kernel(name: str) -> None:
    """Check that there is a kernel for Python of this name, "" for the default.

    Raises:
        UsageError: There is none.
    """
    # installed with nbclient
    specs: Any = importlib.import_module("jupyter_client.kernelspec")
    manager = specs.KernelSpecManager()
    try:
        language = manager.get_kernel_spec(name or "python3").language
    except specs.NoSuchKernel:
        listed = ", ".join(sorted(manager.find_kernel_specs()))
        raise UsageError(
            f"there is no kernel {name!r} on this machine. Available: {listed}. Choose one with --kernel NAME."
        ) from None
    if language.lower() != "python":
        raise UsageError(
            f"the kernel {name!r} runs {language}, and cells for a pool must be Python. Choose another with --kernel."
        )


def submits_runs(source: str) -> bool:
    """Whether a script submits runs itself: then it runs once, locally, instead of on all ranks."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    modules: set[str] = set()
    taken: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {each.asname or each.name.split(".")[0] for each in node.names if _is_ours(each.name)}
        elif isinstance(node, ast.ImportFrom) and _is_ours(node.module or ""):
            taken |= {each.name for each in node.names}
    return not taken.isdisjoint(_SUBMITS) or any(
        isinstance(node, ast.Attribute)
        and node.attr in _SUBMITS
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
        for node in ast.walk(tree)
    )


def _is_ours(module: str) -> bool:
    return module.split(".")[0] in _PACKAGES


# ------------------------------------------------------------ cells


def _cells_of(path: Path, form: Form, including: Sequence[Path]) -> Iterator[TextCell]:
    """Yield the cells of a text format; `including` is the chain of notebooks whose `%run` includes this one."""
    match form:
        case Form.DATABRICKS:
            cells = databricks_cells(_text_of(path))
        case Form.PERCENT:
            cells = percent_cells(_text_of(path))
        case Form.IPYNB:
            cells = _nbformat_cells(_ipynb(path))
        case _:
            cells = _nbformat_cells(_by_jupytext(path))
    for cell in cells:
        if cell.source.strip():
            written = Form.DATABRICKS if form is Form.IPYNB and _runs_as_databricks(cell.source, path) else form
            yield from _with_its_runs(cell, path, written, [*including, path.resolve()])


def _nbformat_cells(notebook: Any) -> list[TextCell]:
    return [TextCell(cell.source, cell.cell_type, tuple(cell.metadata.get("tags", ()))) for cell in notebook.cells]


def _with_its_runs(cell: TextCell, path: Path, form: Form, including: Sequence[Path]) -> Iterator[TextCell]:
    """Yield a cell, with each `%run` of another notebook replaced by that notebook's cells."""
    if cell.kind != "code" or cell.source.lstrip().startswith("%%"):
        yield cell
        return
    done = 0
    for found in _RUN.finditer(cell.source):
        try:
            words = shlex.split(found[1], comments=True)
        except ValueError:
            continue
        named = [word for word in words if not word.startswith("-")]
        other = _find_run_file(path.parent, named[0]) if named else None
        if other is None:
            if form is Form.DATABRICKS:
                raise UsageError(f"{path} has `{found[0].strip()}`, but there is no such notebook in {path.parent}.")
            continue
        other_form = form_of(other)
        before = cell.source[done : found.start()].lstrip("\n")
        is_ipythons = other_form is Form.SCRIPT or (other_form is Form.IPYNB and form is not Form.DATABRICKS)
        if is_ipythons or (len(named) > 1 and all(map(_ARGUMENT.match, named[1:]))):
            # leave it to the kernel's %run, with the path resolved relative to this file: to IPython's own, or with
            # arguments for widgets to that of `sgpu_magic.compat`
            rest = " ".join(shlex.quote(word) for word in words if word != named[0])
            yield TextCell(f"{before}%run {shlex.quote(str(other))} {rest}".rstrip(), tags=cell.tags)
        else:
            _check_run(found[0], named, other, including)
            if before.strip():
                yield TextCell(before.strip("\n"), tags=cell.tags)
            yield from _cells_of(other, other_form, including)
        done = found.end()
    if cell.source[done:].strip():
        yield TextCell(cell.source[done:].strip("\n"), tags=cell.tags) if done else cell


def _ipynb_parts(cell: Any, path: Path, nbformat: Any) -> list[Any]:
    """Return a cell of an .ipynb notebook, or the cells of the Databricks notebook that it runs."""
    if cell.cell_type != "code" or not _runs_as_databricks(cell.source, path):
        return [cell]
    parts = _with_its_runs(TextCell(cell.source), path, Form.DATABRICKS, [path.resolve()])
    return [_new_cell(part, nbformat) for part in parts]


def _new_cell(cell: TextCell, nbformat: Any) -> Any:
    new = getattr(nbformat.v4, f"new_{cell.kind}_cell")
    return new(cell.source, metadata={"tags": list(cell.tags)} if cell.tags else {})


def _runs_as_databricks(source: str, path: Path) -> bool:
    """Whether a cell runs a notebook in Databricks' source format, or an .ipynb file named without its suffix.

    IPython's own `%run` runs neither; everything else is left to it.
    """
    found = _RUN.fullmatch(source.strip())
    name = found[1].strip("\"' ") if found is not None else ""
    other = _find_run_file(path.parent, name) if name else None
    form = form_of(other) if other is not None else None
    return form is Form.DATABRICKS or (form is Form.IPYNB and not (path.parent / name).is_file())


def _check_run(line: str, named: Sequence[str], other: Path, including: Sequence[Path]) -> None:
    if len(named) > 1:
        raise UsageError(
            f"{including[-1]} has `{line.strip()}`, but a notebook that another one runs takes arguments only for "
            f'its widgets, as $name="value". Set variables before that line, and read them in {other.name}.'
        )
    if other in including:
        way = " -> ".join(each.name for each in (*including, other))
        raise UsageError(f"the notebooks run each other in a cycle: {way}. Remove one `%run`.")


def _find_run_file(folder: Path, name: str) -> Path | None:
    """Return the file that `%run NAME` refers to, None if there is none."""
    paths = (folder / f"{name}{suffix}" for suffix in ("", SCRIPT, NOTEBOOK))
    return next((path.resolve() for path in paths if path.is_file() and path.suffix.lower() in SUFFIXES), None)


# ------------------------------------------------------------ text


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}.") from None


def _header_of(text: str) -> str:
    """Return the header that jupytext writes in comments, "" for none."""
    header = HEADER.match(text)
    return header[1] if header is not None else ""


def _ipynb(path: Path) -> Any:
    nbformat: Any = importlib.import_module("nbformat")
    return nbformat.read(io.StringIO(_text_of(path)), as_version=4)


def _by_jupytext(path: Path) -> Any:
    try:
        jupytext: Any = importlib.import_module("jupytext")
    except ImportError:
        raise UsageError(
            f"{path} is a notebook in a jupytext format, and jupytext is not installed. Install it: `pip install "
            "'sgpu-magic[jupytext]'`."
        ) from None
    # both are installed with jupytext
    nbformat, yaml = importlib.import_module("nbformat"), importlib.import_module("yaml")
    try:
        return jupytext.read(path)
    except (ValueError, nbformat.ValidationError, yaml.YAMLError) as error:
        raise UsageError(f"{path} is not a notebook that jupytext can read: {str(error).splitlines()[0]}.") from None
