"""The examples of Markdown pages: README's and the site's.

A fenced block is an example. An HTML comment on the line above it, which readers do not see, gives details:

    <!-- not run: needs a Ray cluster -->    it is only parsed
    <!-- fails: ValueError -->               it ends with that error
    <!-- shows: a terminal -->               what the page shows below it is from somewhere else

A Python block that begins with `# NAME.py` is a file. A `text` block directly below an example is what it shows.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from IPython.core.inputtransformer2 import TransformerManager

import sgpu_magic.magics.run_magics
import sgpu_magic.magics.session_magics  # noqa: F401  they register their parsers
from sgpu_magic.cli.main import command_parser, normalized
from sgpu_magic.options import argparse_form
from sgpu_magic.options.argparse_form import LINE_PARSERS

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
SITE = ROOT / "docs"
_CELL_MAGICS = ("%%distributed", "%%rank", "%%ray_launch")
_BLOCK = re.compile(
    r"^(?:<!-- (?P<what>not run|fails|shows): (?P<said>[^\n]+) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```\n"
    r"(?:\n```text\n(?P<shown>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
_COMMENT = re.compile(r"^<!--.*", re.MULTILINE)
_FILE = re.compile(r"# (\w+\.py)\n")
_WORDS = re.compile(r"(?:^|[;&|\s])(sgpu (?:[a-z]|--).*)", re.DOTALL)
# accepts any words
_HELP = "sgpu_help"
_COMPILED = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


@dataclass(frozen=True)
class Snippet:
    """An example on a page.

    Args:
        page: The page's path.
        line: The line where it begins.
        language: `python`, `shell` and others.
        text: The example.
        not_run: The reason why it can't be run by a test; "" if it can.
        fails: Name of the error that it ends with, "" for none.
        shown: What it shows, according to the page; "" if the page does not say, or shows it from somewhere else.
    """

    page: Path
    line: int
    language: str
    text: str
    not_run: str
    fails: str
    shown: str

    @property
    def file_name(self) -> str:
        """Return the name of the file that it is, "" if it is none."""
        found = _FILE.match(self.text) if self.language == "python" else None
        return found[1] if found is not None else ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@cache
def snippets(page: Path) -> tuple[Snippet, ...]:
    """Return a page's examples, in order."""
    text = page.read_text()
    return tuple(
        Snippet(
            page,
            text.count("\n", 0, found.start("language")) + 1,
            found["language"],
            found["text"],
            found["said"] if found["what"] == "not run" else "",
            found["said"] if found["what"] == "fails" else "",
            "" if found["what"] == "shows" else found["shown"] or "",
        )
        for found in _BLOCK.finditer(text)
        if found["language"] != "text"
    )


def unread_comments(page: Path) -> list[str]:
    """Return a page's HTML comments that say nothing about an example: misspelled, or not on the line above one."""
    return _COMMENT.findall(_BLOCK.sub("", page.read_text()))


def site_pages(*folders: str) -> list[Path]:
    """Return the written pages in these folders of the site."""
    return sorted(page for folder in folders for page in (SITE / folder).glob("*.md"))


# ---------------------------------------------------------------- reading without running


@cache
def check_syntax(snippet: Snippet) -> int:
    """Compile a Python example, and parse the lines of this project's magics and of `sgpu` with their own parsers.

    Returns:
        How many lines were parsed.

    Raises:
        SyntaxError: It is not valid Python.
        UsageError: A parser refuses a line.
    """
    if snippet.language == "shell":
        return sum(map(_parse_command, _commands(snippet.text)))
    if snippet.language != "python":
        return 0
    return _check_cell(snippet.text)


def _check_cell(cell: str) -> int:
    parsed = 0
    first, _, body = cell.partition("\n")
    if first.startswith("%%"):
        name, _, line = first.partition(" ")
        if name in _CELL_MAGICS:
            argparse_form.parse(line, name)
            return 1 + _check_cell(body)
        return sum(map(_parse_command, _commands(body))) if name == "%%bash" else 0
    for line in cell.splitlines():
        found = re.match(r"(?:\w+ = )?%(sgpu_\w+) ?(.*)", line)
        if found is not None and found[1] != _HELP:
            LINE_PARSERS[found[1]]().read(found[2])
            parsed += 1
        elif line.startswith("!"):
            parsed += _parse_command(line[1:])
    compile(TransformerManager().transform_cell(cell), "<example>", "exec", _COMPILED)
    return parsed


def _commands(text: str) -> Iterator[str]:
    """Yield a shell example's commands; a backslash or an open quote continues one on the next line."""
    command = ""
    for line in text.replace("\\\n", " ").splitlines():
        command += line
        try:
            shlex.split(command, comments=True)
        except ValueError:
            command += "\n"
        else:
            yield command
            command = ""
    assert not command, f"no end: {command}"


def _parse_command(line: str) -> int:
    if line.startswith("#"):
        return 0
    found = _WORDS.search(line)
    if found is None:
        return 0
    words = shlex.split(found[1], comments=True)[1:]
    command_parser(words).parse_args(normalized(words))
    return 1


# ---------------------------------------------------------------- comparing what is shown


def missing_lines(snippet: Snippet, shown: str) -> list[str]:
    """Return the lines that the page shows below an example and that are not in `shown`.

    Times, sizes, ids of runs, numbers of cells and the order of lines may differ.
    """
    there = _masked(shown)
    return [line for line in snippet.shown.splitlines() if line.strip() and _masked(line) not in there]


def _masked(text: str) -> str:
    text = re.sub(r"\b(run|sgpu_attach|cancel) [0-9a-f]{4,8}\b", r"\1 #", text)
    text = re.sub(r"\b(cell|In|process) \[?\d+\]?", r"\1 #", text)
    text = re.sub(r"\b\d[\d.,]*( (ms|s|min|B|kB|MB|GB))", r"#\1", text)
    text = re.sub(r"# (ms|s)( · start # (ms|s))?", "# s", text)
    text = re.sub(r"# (B|kB|MB|GB) in # s", "# in # s", text)
    text = re.sub(r"\b\d+\.\d+", "#.#", text)
    return " ".join(text.split())
