"""Reads notebooks in all supported formats: .ipynb, Databricks source, percent cells, jupytext's other text formats.

The formats are described in https://docs.databricks.com/notebooks/notebook-export-import (source files) and
https://jupytext.readthedocs.io/en/latest/formats-scripts.html (percent).
"""

# nbformat and jupytext are not typed
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ast
import contextlib
import enum
import importlib
import io
import json
import re
import shlex
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sgpu_magic.errors import UsageError

NOTEBOOK, SCRIPT = ".ipynb", ".py"
SUFFIXES = (NOTEBOOK, SCRIPT, ".md", ".markdown", ".rmd", ".qmd")

_DATABRICKS = "# Databricks notebook source"
_COMMAND = re.compile(r"^# COMMAND -+[ \t]*$", re.MULTILINE)
_MAGIC = re.compile(r"^# MAGIC ?", re.MULTILINE)
_TITLE = re.compile(r"\A# DBTITLE [^\n]*\n?")
_HEADER = re.compile(r"\A(?:#!.*\n|#.*coding[:=].*\n)*# ---\n((?:#.*\n)*?)# ---\n")
_MARKER = re.compile(r"^#\s?%%(?:%*)(?=\s|\[|$)(.*)$")
_KIND = re.compile(r"\[(markdown|md|raw)\]")
_TAGS = re.compile(r"\btags\"?\s*[=:]\s*(\[[^\]]*\])")
_LANGUAGE = re.compile(r'\blanguage="(\w+)"')
_MAGIC_ARGUMENTS = re.compile(r'\bmagic_args="([^"]*)"')
_COMMENTED_MAGIC = re.compile(r"^(?:# ?)+(?:%{1,2}[A-Za-z_]|!\S)")
_RUN = re.compile(r"^%run[ \t]+(\S.*)$", re.MULTILINE)
# Databricks writes cell magics with one percent sign; its %sh continues after a failed command
_CELL_MAGICS = {"sh": "%%bash --no-raise-error", "sql": "%%sql", "scala": "%%scala", "r": "%%R"}
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


class TextCell(msgspec.Struct, frozen=True):
    """A cell of a text format.

    Args:
        source: The cell's text.
        kind: `code`, `markdown` or `raw`.
        tags: Tags in its metadata.
    """

    source: str
    kind: str = "code"
    tags: tuple[str, ...] = ()


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
    if text.startswith(_DATABRICKS):
        return Form.DATABRICKS
    header = _HEADER.match(text)
    form = re.search(r"^#\s+format_name:\s*(\w+)", header[1], re.MULTILINE) if header is not None else None
    if form is not None:
        return Form.PERCENT if form[1] in ("percent", "hydrogen") else Form.JUPYTEXT
    if _markers(text):
        return Form.PERCENT
    return Form.JUPYTEXT if header is not None and re.search(r"^# jupy", header[1], re.MULTILINE) else Form.SCRIPT


def read_notebook(path: Path, form: Form) -> Any:
    """Read a file as a notebook of nbformat version 4. `%run` of another text notebook inserts that one's cells.

    Raises:
        UsageError: The file can't be read, needs a library that is not installed, or runs itself.
    """
    nbformat: Any = importlib.import_module("nbformat")
    if form is Form.IPYNB:
        return nbformat.read(io.StringIO(_text_of(path)), as_version=4)
    kernel = kernel_name(path, form) or "python3"
    made = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": kernel, "display_name": kernel}})
    for cell in _cells_of(path, form, ()):
        new = getattr(nbformat.v4, f"new_{cell.kind}_cell")
        made.cells.append(new(cell.source, metadata={"tags": list(cell.tags)} if cell.tags else {}))
    return made


def kernel_name(path: Path, form: Form) -> str:
    """Return the kernel name in a notebook's metadata, "" for none.

    Raises:
        UsageError: The file is not a notebook.
    """
    if form is Form.IPYNB:
        try:
            return str(json.loads(path.read_bytes()).get("metadata", {}).get("kernelspec", {}).get("name", ""))
        except (ValueError, AttributeError):
            raise UsageError(f"{path} is not a notebook: it is not valid notebook JSON.") from None
    if form is Form.JUPYTEXT:
        return str(_by_jupytext(path).metadata.get("kernelspec", {}).get("name", ""))
    header = _HEADER.match(_text_of(path))
    named = re.search(r"^#\s+kernelspec:\s*\n(?:#.*\n)*?#\s+name:\s*(\S+)", header[1], re.MULTILINE) if header else None
    return named[1] if named is not None else ""


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
            cells = [_databricks_cell(text) for text in _COMMAND.split(_text_of(path).partition("\n")[2])]
        case Form.PERCENT:
            cells = _percent_cells(_text_of(path))
        case Form.IPYNB:
            cells = _nbformat_cells(read_notebook(path, form))
        case _:
            cells = _nbformat_cells(_by_jupytext(path))
    for cell in cells:
        if cell.source.strip():
            yield from _with_its_runs(cell, path, form, [*including, path.resolve()])


def _databricks_cell(text: str) -> TextCell:
    return _with_cell_magic(_MAGIC.sub("", _TITLE.sub("", text.strip("\n"))), ())


def _percent_cells(text: str) -> list[TextCell]:
    header = _HEADER.match(text)
    skipped = text[: header.end()].count("\n") if header is not None else 0
    lines = text.splitlines()
    begins = [at for at in _markers(text) if at >= skipped]
    cells = [_percent_cell("", lines[skipped : begins[0] if begins else len(lines)])]
    for at, end in zip(begins, [*begins[1:], len(lines)], strict=True):
        marker = _MARKER.match(lines[at])
        cells.append(_percent_cell(marker[1] if marker is not None else "", lines[at + 1 : end]))
    return cells


def _percent_cell(marker: str, lines: list[str]) -> TextCell:
    """Return the cell below a line `# %%`; `marker` is the rest of that line."""
    kind, tags, language = _KIND.search(marker), _TAGS.search(marker), _LANGUAGE.search(marker)
    names: tuple[str, ...] = ()
    if tags is not None:
        with contextlib.suppress(ValueError):
            names = tuple(str(tag) for tag in json.loads(tags[1]))
    text = "\n".join(lines).strip("\n")
    if kind is not None:
        quoted = re.fullmatch(r'r?("""|\'\'\')\n?(.*?)\n?\1', text.strip(), re.DOTALL)
        text = quoted[2] if quoted is not None else _uncommented(text)
        return TextCell(text, "raw" if kind[1] == "raw" else "markdown", names)
    if language is not None:
        arguments = _MAGIC_ARGUMENTS.search(marker)
        text = f"%%{language[1]} {arguments[1] if arguments is not None else ''}".rstrip() + f"\n{_uncommented(text)}"
    elif 'active="ipynb"' in marker:
        text = _uncommented(text)
    else:
        # jupytext comments out magics, and escapes comments that look like magics with a second `#`
        text = "\n".join(
            re.sub(r"^# ?", "", line) if _COMMENTED_MAGIC.match(line) else line for line in text.splitlines()
        )
    return _with_cell_magic(text, names)


def _with_cell_magic(text: str, tags: tuple[str, ...]) -> TextCell:
    """Convert a cell with a Databricks magic: `%md` becomes Markdown, `%sh` a cell magic of IPython."""
    first, newline, rest = text.strip("\n").partition("\n")
    word, _, arguments = first.strip().partition(" ")
    name = word[1:].lower() if word.startswith("%") else ""
    if name in ("md", "md-sandbox"):
        return TextCell(f"{arguments}{newline}{rest}".strip(), "markdown", tags)
    if name == "python":
        return TextCell(f"{arguments}{newline}{rest}".strip("\n"), tags=tags)
    if name in _CELL_MAGICS:
        magic, arguments = _CELL_MAGICS[name], arguments.strip()
        if name == "sh" and arguments.split(" ")[0] == "-e":
            magic, arguments = "%%bash -e", arguments[2:].strip()
        return TextCell("\n".join(part for part in (magic, arguments, rest) if part), tags=tags)
    return TextCell(text.strip("\n"), tags=tags)


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
        other = _named(path.parent, named[0]) if named else None
        if other is None:
            if form is Form.DATABRICKS:
                raise UsageError(f"{path} has `{found[0].strip()}`, but there is no such notebook in {path.parent}.")
            continue
        other_form = form_of(other)
        before = cell.source[done : found.start()].lstrip("\n")
        if other_form is Form.SCRIPT or (other_form is Form.IPYNB and form is not Form.DATABRICKS):
            # left to IPython's own %run, with the path resolved relative to this file
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


def _check_run(line: str, named: Sequence[str], other: Path, including: Sequence[Path]) -> None:
    if len(named) > 1:
        raise UsageError(
            f"{including[-1]} has `{line.strip()}`, but a notebook that another one runs takes no arguments here. Set "
            f"variables before that line, and read them in {other.name}."
        )
    if other in including:
        way = " -> ".join(each.name for each in (*including, other))
        raise UsageError(f"the notebooks run each other in a cycle: {way}. Remove one `%run`.")


def _named(folder: Path, name: str) -> Path | None:
    """Return the file that `%run NAME` refers to, None if there is none."""
    for path in (folder / name, folder / f"{name}{SCRIPT}", folder / f"{name}{NOTEBOOK}"):
        if path.is_file() and path.suffix.lower() in SUFFIXES:
            return path.resolve()
    return None


# ------------------------------------------------------------ text


def _markers(text: str) -> list[int]:
    """Return the line numbers, from 0, at which percent cells begin. Ignores markers inside strings."""
    lines = text.splitlines()
    found = [at for at, line in enumerate(lines) if _MARKER.match(line)]
    if found and any(quote in text for quote in ('"""', "'''")):
        # a file with uncommented magics is not valid Python: then all markers count
        with contextlib.suppress(tokenize.TokenError, SyntaxError):
            tokens = tokenize.generate_tokens(io.StringIO(text).readline)
            comments = {token.start[0] - 1 for token in tokens if token.type == tokenize.COMMENT}
            found = [at for at in found if at in comments]
    return found


def _uncommented(text: str) -> str:
    return re.sub(r"^# ?", "", text, flags=re.MULTILINE)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}.") from None


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
