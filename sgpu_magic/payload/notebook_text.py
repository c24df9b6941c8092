"""The cells of notebooks in text form: Databricks source and percent cells; the magics as Databricks writes them.

Pure functions of text, for `sgpu run`, which reads files, and for a kernel's input transformer and `%run`. The formats
are described in https://docs.databricks.com/notebooks/notebook-export-import (source files) and
https://jupytext.readthedocs.io/en/latest/formats-scripts.html (percent).
"""

from __future__ import annotations

import contextlib
import io
import re
import tokenize

import msgspec

from sgpu_magic.wire.decoding import load_json

_SOURCE = "# Databricks notebook source"
_COMMAND = re.compile(r"^# COMMAND -+[ \t]*$", re.MULTILINE)
_MAGIC = re.compile(r"^# MAGIC ?", re.MULTILINE)
_TITLE = re.compile(r"\A# DBTITLE [^\n]*\n?")
HEADER = re.compile(r"\A(?:#!.*\n|#.*coding[:=].*\n)*# ---\n((?:#.*\n)*?)# ---\n")
"""The YAML header of jupytext's formats; group 1 is its text, commented out."""
_MARKER = re.compile(r"^#\s?%%(?:%*)(?=\s|\[|$)(.*)$")
_KIND = re.compile(r"\[(markdown|md|raw)\]")
_TAGS = re.compile(r"\btags\"?\s*[=:]\s*(\[[^\]]*\])")
_LANGUAGE = re.compile(r'\blanguage="(\w+)"')
_MAGIC_ARGUMENTS = re.compile(r'\bmagic_args="([^"]*)"')
_COMMENTED_MAGIC = re.compile(r"^(?:# ?)+(?:%{1,2}[A-Za-z_]|!\S)")
# Databricks writes cell magics with one percent sign; its %sh continues after a failed command
_CELL_MAGICS = {"sh": "%%bash --no-raise-error", "sql": "%%sql", "scala": "%%scala", "r": "%%R"}
_MARKDOWN = ("md", "md-sandbox")
CELL_MAGIC_NAMES = (*_MARKDOWN, "python", *_CELL_MAGICS)
"""The magics that are written with one percent sign and take all of their cell."""
# uses of the names and magics that the extension `sgpu_magic.compat` provides
_NAMES = re.compile(
    r"^[^#\n]*(?<![\w.])(?:dbutils\.|displayHTML\(|spark\.[a-z])"
    r"|^\s*%(?:restart_python|fs)\b"
    r"|\A\s*%%?(?:sql|scala|R|r)\b|\A\s*%(?:sh|md|md-sandbox|python)\b"
    r"|^%run[ \t]+(?![^\n]*\.(?:py|ipynb)\b)[^-\s]|^%run[^\n]*\s'?\$\w+=",
    re.MULTILINE,
)


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


def is_databricks_source(text: str) -> bool:
    """Whether a Python file is a notebook in Databricks' source format."""
    return text.startswith(_SOURCE)


def databricks_cells(text: str) -> list[TextCell]:
    """Return the cells of a file in Databricks' source format. Empty cells are included."""
    parts = _COMMAND.split(text.partition("\n")[2])
    return [with_cell_magic(_MAGIC.sub("", _TITLE.sub("", part.strip("\n")))) for part in parts]


def uses_databricks_names(source: str) -> bool:
    """Whether a code cell uses a name or magic that a Databricks notebook has without defining it."""
    return _NAMES.search(source) is not None


def percent_cells(text: str) -> list[TextCell]:
    """Return the cells of a file with percent cells. Empty cells are included."""
    header = HEADER.match(text)
    skipped = text[: header.end()].count("\n") if header is not None else 0
    lines = text.splitlines()
    begins = [at for at in markers(text) if at >= skipped]
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
            names = tuple(str(tag) for tag in load_json(tags[1]))
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
    return with_cell_magic(text, names)


def with_cell_magic(text: str, tags: tuple[str, ...] = ()) -> TextCell:
    """Convert a cell with a Databricks magic: `%md` becomes Markdown, `%sh` a cell magic of IPython."""
    first, newline, rest = text.strip("\n").partition("\n")
    word, _, arguments = first.strip().partition(" ")
    name = word[1:].lower() if word.startswith("%") else ""
    if name in _MARKDOWN:
        return TextCell(f"{arguments}{newline}{rest}".strip(), "markdown", tags)
    if name == "python":
        return TextCell(f"{arguments}{newline}{rest}".strip("\n"), tags=tags)
    if name in _CELL_MAGICS:
        magic, arguments = _CELL_MAGICS[name], arguments.strip()
        if name == "sh" and arguments.split(" ")[0] == "-e":
            magic, arguments = "%%bash -e", arguments[2:].strip()
        return TextCell("\n".join(part for part in (magic, arguments, rest) if part), tags=tags)
    return TextCell(text.strip("\n"), tags=tags)


def markers(text: str) -> list[int]:
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
