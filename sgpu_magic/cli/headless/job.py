"""What is to be run: a notebook or script, where, with which parameters, and where the executed copy goes.

Parameters are as papermill has them: typed values, and a cell after the one tagged `parameters` that sets them.
Source: papermill's documentation, "Parameterize" and "Command line interface".
"""

from __future__ import annotations

import ast
import difflib
import json
import keyword
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from sgpu_magic.cli.headless.formats import SUFFIXES, Form, form_of
from sgpu_magic.errors import UsageError
from sgpu_magic.options.defaults import JobDefaults
from sgpu_magic.options.job_form import JobFile, defaults_of, job_timeout_s, read_job_file, with_line
from sgpu_magic.options.table import MOST_RETRIES

CELLS = ("auto", "ranks", "here")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

TAG = "parameters"
INJECTED_TAG = "injected-parameters"

_WORDS: dict[str, object] = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_NUMBER = re.compile(r"[+-]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?inf|nan")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A notebook or script to be run.

    Args:
        source: The file.
        form: How it is read.
        arguments: A script's own.
        output: The executed copy; None for a name of its own beside the source, of a script for none.
        parameters: Set in the notebook.
        defaults: What its cells are given where they say nothing.
        pool: The pool's name, "" for the settings'.
        variables: Set in the notebook and on its ranks.
        timeout_s: Longest time for all of it in seconds; None for no limit.
        retries: How often it is run again after a failure of pool, nodes or environment.
        kernel: The Jupyter kernel's name, "" for the notebook's.
        cells: Where plain cells run, one of `CELLS`.
    """

    source: Path
    form: Form = Form.IPYNB
    arguments: tuple[str, ...] = ()
    output: Path | None = None
    parameters: Mapping[str, object] = msgspec.field(default_factory=dict[str, object])
    defaults: JobDefaults = msgspec.field(default_factory=JobDefaults)
    pool: str = ""
    variables: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    timeout_s: float | None = None
    retries: int = 0
    kernel: str = ""
    cells: str = "auto"

    @property
    def is_script(self) -> bool:
        return self.form is Form.SCRIPT


def job_from(target: str, line: Mapping[str, Any], arguments: tuple[str, ...] = ()) -> Job:
    """Read what is to be run.

    Args:
        target: A notebook, a script, or a job file that names one.
        line: What the command's line says, by the job file's keys; it wins, each key by itself.
        arguments: A script's own.

    Raises:
        UsageError: Something can't be meant.
    """
    path = Path(target)
    if path.suffix.lower() in SUFFIXES:
        return _job(_existing(path), with_line(JobFile(), line), "the command", arguments)
    file = read_job_file(path)
    if not file.notebook:
        raise UsageError(f"{path} names no notebook: add `notebook: NAME.ipynb`.")
    source = path.parent / os.path.expanduser(file.notebook)
    if source.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"{path}: {file.notebook!r} is no notebook and no script; their names end in {', '.join(SUFFIXES)}."
        )
    return _job(_existing(source), with_line(file, line), str(path), arguments)


def _job(source: Path, file: JobFile, where: str, arguments: tuple[str, ...]) -> Job:
    check_values(where, file.parameters)
    form = form_of(source)
    if form is Form.PERCENT and arguments:
        # cells of an editor in a program that takes arguments
        form = Form.SCRIPT
    if form is Form.SCRIPT and file.parameters:
        raise UsageError(
            f"{source} is a script, and parameters are a notebook's. Give it arguments of its own: `sgpu run "
            f"{source.name} -- --lr 0.1`."
        )
    if form is not Form.SCRIPT and arguments:
        raise UsageError(f"{source} is a notebook and takes no arguments. Give it parameters: -p NAME=VALUE.")
    cells = file.cells or CELLS[0]
    if cells not in CELLS:
        raise UsageError(f"{where}: cells is {cells!r}; it can be {', '.join(CELLS)}.")
    if not 0 <= file.retries <= MOST_RETRIES:
        raise UsageError(f"{where}: retries is {file.retries}; 0 to {MOST_RETRIES} is possible.")
    for name in file.env:
        if _VARIABLE.fullmatch(name) is None:
            raise UsageError(f"{where}: {name!r} is no name of an environment variable.")
    return Job(
        source=source,
        form=form,
        arguments=arguments,
        output=Path(file.output).absolute() if file.output else None,
        parameters=file.parameters,
        defaults=defaults_of(file, where),
        pool=file.pool,
        variables={name: _text(value) for name, value in file.env.items()},
        timeout_s=job_timeout_s(file, where),
        retries=file.retries,
        kernel=file.kernel,
        cells=cells,
    )


def _existing(path: Path) -> Path:
    if path.is_file():
        return path.absolute()
    beside = [each.name for each in sorted(path.parent.glob(f"*{path.suffix}"))] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=1)
    raise UsageError(f"{path} is not there.{f' Is {near[0]} meant?' if near else ''}")


def _text(value: str | int | float | bool) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# ---------------------------------------------------------------- parameters


def typed(text: str) -> object:
    """Return a value as a person means it on a command line: a number, a truth, nothing, else the text."""
    if text in _WORDS:
        return _WORDS[text]
    if _NUMBER.fullmatch(text) is None:
        return text
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def read_pair(option: str, text: str) -> tuple[str, str]:
    """Read `NAME=VALUE`.

    Raises:
        UsageError: There is no name, or no sign.
    """
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals:
        raise UsageError(f"{option} takes NAME=VALUE or NAME VALUE, as in {option} lr=0.1.")
    check_name(option, name)
    return name, value


def check_name(option: str, name: str) -> None:
    """Raise UsageError when Python can't have a variable of that name."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(f"{option}: {name!r} is no name that a notebook's variable can have.")


def check_values(where: str, values: Mapping[str, object]) -> None:
    """Raise UsageError when a value can't be written into a cell: what JSON has can."""
    for name, value in values.items():
        check_name(where, name)
        if not _is_plain(value):
            kind = type(value).__name__
            raise UsageError(
                f"{where}: {name} is a {kind}; a parameter is a number, a text, true, false, nothing, or a list or "
                "mapping of these. Write it as a text, and read that in the notebook."
            )


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in cast("list[object]", value))
    if isinstance(value, dict):
        return all(
            isinstance(key, str) and _is_plain(item) for key, item in cast("dict[object, object]", value).items()
        )
    return value is None or isinstance(value, bool | int | float | str)


def source_of(values: Mapping[str, object]) -> str:
    """Return the Python that sets them."""
    return "\n".join(["# Parameters", *(f"{name} = {_literal(value)}" for name, value in values.items())])


def _literal(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, list):
        return f"[{', '.join(_literal(item) for item in cast('list[object]', value))}]"
    if isinstance(value, dict):
        items = cast("dict[str, object]", value).items()
        return "{" + ", ".join(f"{key!r}: {_literal(item)}" for key, item in items) + "}"
    return repr(value)


def has_tag(cell: Any, tag: str) -> bool:
    """Whether a notebook's cell has it."""
    tags: Any = cell.get("metadata", {}).get("tags", [])
    return isinstance(tags, list) and tag in tags


def declared(source: str) -> set[str] | None:
    """Return the names that a `parameters` cell sets; None when it is no plain Python."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return None
    names: set[str] = set()
    for statement in body:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = list(statement.targets)
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        names |= {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
    return names
