"""What is to be run: a notebook or script, where, with which parameters, and where the executed copy goes."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgpu_magic.cli.headless.formats import SUFFIXES, Form, form_of
from sgpu_magic.cli.headless.parameters import check_values
from sgpu_magic.errors import UsageError
from sgpu_magic.options.defaults import JobDefaults
from sgpu_magic.options.job_form import JobFile, defaults_of, job_timeout_s, read_job_file, with_line
from sgpu_magic.options.table import MOST_RETRIES

CELLS = ("auto", "ranks", "here")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
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
    parameters: Mapping[str, object] = field(default_factory=dict[str, object])
    defaults: JobDefaults = field(default_factory=JobDefaults)
    pool: str = ""
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
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
