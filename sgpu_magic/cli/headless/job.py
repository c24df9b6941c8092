"""A job of `sgpu run`: the notebook or script, its options and parameters, and the path of the executed copy.

Parameters work as in papermill: typed values, set in a cell inserted after the one tagged `parameters`.
Source: papermill's documentation, "Parameterize" and "Command line interface".
"""

from __future__ import annotations

import ast
import contextlib
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
from sgpu_magic.options.job_form import JobFile, defaults_of, job_timeout_s, read_job_file, with_line
from sgpu_magic.options.notebook_job import JobDefaults
from sgpu_magic.options.table import MOST_RETRIES, as_job_key, options_spelled

CELLS = ("auto", "ranks", "here")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

TAG = "parameters"
INJECTED_TAG = "injected-parameters"

_WORDS: dict[str, object] = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_NUMBER = re.compile(r"[+-]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?inf|nan")


class HeadlessJob(msgspec.Struct, frozen=True, kw_only=True):
    """A notebook or script to run.

    Args:
        source: Path of the file.
        form: Format of the file.
        file: The options as given, of the job file and the command line.
        arguments: Arguments of a script.
        output: Path of the executed copy; None for a generated name next to a notebook, and for no copy of a script.
        defaults: Options for cells that do not set them.
        variables: Environment variables for the notebook and its ranks.
        timeout_s: Time limit for the whole job in seconds; None for none.
        cells: Where plain cells run, one of `CELLS`.
        folder: Working directory: a notebook's own folder; for a script on the command line, that of the command.
        as_written: The script's `sys.argv[0]`.
        module: The script's name as a module that is started by its name; "" for a path.
        restarts: How often a script's ranks are started again after any failure.
    """

    source: Path
    form: Form
    file: JobFile
    arguments: tuple[str, ...]
    output: Path | None
    defaults: JobDefaults
    variables: Mapping[str, str]
    timeout_s: float | None
    cells: str
    folder: Path
    as_written: str
    module: str = ""
    restarts: int = 0

    @property
    def is_script(self) -> bool:
        return self.form is Form.SCRIPT


def job_from(
    target: str, line: Mapping[str, Any], arguments: tuple[str, ...] = (), *, as_script: bool = False
) -> HeadlessJob:
    """Return the job for a target and the options of the command line.

    Args:
        target: A notebook, a script, or a job file that names one.
        line: Options of the command line, by the job file's keys. They override those in the job file.
        arguments: Arguments of a script.
        as_script: A .py file is a script, whatever its form.

    Raises:
        UsageError: The target or an option is not valid.
    """
    path = Path(target)
    if path.suffix.lower() in SUFFIXES:
        job = _job(_existing(path), with_line(JobFile(), line), "the command", arguments, as_script=as_script)
        # as `python train.py`
        return msgspec.structs.replace(job, folder=Path.cwd(), as_written=target) if job.is_script else job
    file = read_job_file(path)
    if not file.notebook:
        raise UsageError(f"{path} names no notebook: add `notebook: NAME.ipynb`.")
    source = path.parent / os.path.expanduser(file.notebook)
    if source.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"{path}: {file.notebook!r} is neither a notebook nor a script; their names end in {', '.join(SUFFIXES)}."
        )
    with options_spelled(as_job_key):
        return _job(_existing(source), with_line(file, line), str(path), arguments)


def _job(
    source: Path, file: JobFile, where: str, arguments: tuple[str, ...], *, as_script: bool = False
) -> HeadlessJob:
    check_values(where, file.parameters)
    form = form_of(source)
    if as_script and source.suffix != ".py":
        raise UsageError(f"{source} is not a Python script.")
    if as_script or (form is Form.PERCENT and arguments):
        # a script that has percent cells only for an editor
        form = Form.SCRIPT
    if form is Form.SCRIPT and file.parameters:
        raise UsageError(
            f"{source} is a script, and parameters are for notebooks. Give it arguments of its own: `sgpu run "
            f"{source.name} -- --lr 0.1`."
        )
    if form is not Form.SCRIPT and arguments:
        raise UsageError(f"{source} is a notebook and takes no arguments. Give it parameters: -p NAME=VALUE.")
    cells = file.cells or CELLS[0]
    if cells not in CELLS:
        raise UsageError(f"{where}: cells is {cells!r}; it can be {', '.join(CELLS)}.")
    if not 0 <= file.retries <= MOST_RETRIES:
        raise UsageError(f"{where}: retries is {file.retries}; it must be 0 to {MOST_RETRIES}.")
    for name in file.env:
        if _VARIABLE.fullmatch(name) is None:
            raise UsageError(f"{where}: {name!r} is not the name of an environment variable.")
    return HeadlessJob(
        source=source,
        form=form,
        file=file,
        arguments=arguments,
        output=Path(file.output).absolute() if file.output else None,
        defaults=defaults_of(file, where),
        variables={name: value if isinstance(value, str) else json.dumps(value) for name, value in file.env.items()},
        timeout_s=job_timeout_s(file, where),
        cells=cells,
        folder=source.parent,
        as_written=str(source),
    )


def _existing(path: Path) -> Path:
    if path.is_file():
        return path.absolute()
    beside = [each.name for each in sorted(path.parent.glob(f"*{path.suffix}"))] if path.parent.is_dir() else []
    raise UsageError.of_unknown_name(f"{path} does not exist.", path.name, beside)


# ---------------------------------------------------------------- parameters


def typed(text: str) -> object:
    """Convert a value from the command line to a number, True, False or None if it looks like one, else keep it."""
    if text in _WORDS:
        return _WORDS[text]
    if _NUMBER.fullmatch(text) is None:
        return text
    for read in (int, float):
        with contextlib.suppress(ValueError):
            return read(text)
    return text


def read_pair(option: str, text: str) -> tuple[str, str]:
    """Parse `NAME=VALUE`.

    Raises:
        UsageError: There is no valid name, or no `=`.
    """
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals:
        raise UsageError(f"{option} takes NAME=VALUE or NAME VALUE, as in {option} lr=0.1.")
    check_name(option, name)
    return name, value


def check_name(option: str, name: str) -> None:
    """Raise UsageError if the name is not valid for a Python variable."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(f"{option}: {name!r} is not a name that a variable can have.")


def check_values(where: str, values: Mapping[str, object]) -> None:
    """Raise UsageError if a name is not valid, or a value is not a JSON type and so can't be written into a cell."""
    for name, value in values.items():
        check_name(where, name)
        if not _is_plain(value):
            kind = type(value).__name__
            raise UsageError(
                f"{where}: {name} is a {kind}; a parameter is a number, a string, true, false, null, or a list or "
                "mapping of these. Write it as a string, and parse that in the notebook."
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
    """Return Python code that sets the parameters."""
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
    """Whether a notebook's cell has a tag."""
    tags: Any = cell.get("metadata", {}).get("tags", [])
    return isinstance(tags, list) and tag in tags


def declared(source: str) -> set[str] | None:
    """Return the names that a `parameters` cell sets; None if it is not plain Python."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return None
    targets = [target for each in body if isinstance(each, ast.Assign) for target in each.targets]
    targets += [each.target for each in body if isinstance(each, ast.AnnAssign)]
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
