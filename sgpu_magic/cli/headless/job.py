"""What is to be run: a notebook or script, where, with which parameters, and where the executed copy goes."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sgpu_magic.cli.headless.formats import SUFFIXES, Form, form_of
from sgpu_magic.cli.headless.job_file import JobFile, read_accelerator, read_job_file
from sgpu_magic.cli.headless.parameters import check_values
from sgpu_magic.errors import UsageError
from sgpu_magic.runs.job_defaults import JobDefaults
from sgpu_magic.runs.option_values import MOST_RANKS, STRATEGIES, check_spread, device_type, duration_s, memory_bytes
from sgpu_magic.runs.package_options import max_cost_from

CELLS = ("auto", "ranks", "here")
_MOST_RETRIES = 100
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command's line says; None or empty where it says nothing. As `job_file.JobFile`."""

    gpus: int | None = None
    type: str | None = None
    pool: str = ""
    nodes: int | None = None
    placement: str = ""
    min_memory: str = ""
    env_version: str = ""
    max_cost: str | None = None
    parameters: Mapping[str, object] = field(default_factory=dict[str, object])
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    timeout: str | None = None
    retries: int | None = None
    kernel: str = ""
    cells: str = ""
    output: str = ""
    upload: tuple[str, ...] = ()


def job_from(target: str, options: Options, arguments: tuple[str, ...] = ()) -> Job:
    """Read what is to be run.

    Args:
        target: A notebook, a script, or a job file that names one.
        options: They win over the job file's keys, each by itself.
        arguments: A script's own.

    Raises:
        UsageError: Something can't be meant.
    """
    path = Path(target)
    if path.suffix.lower() in SUFFIXES:
        return _job(_existing(path), JobFile(), options, Path(), "the command", arguments)
    file = read_job_file(path)
    if not file.notebook:
        raise UsageError(f"{path} names no notebook: add `notebook: NAME.ipynb`.")
    folder = path.parent
    source = folder / os.path.expanduser(file.notebook)
    if source.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"{path}: {file.notebook!r} is no notebook and no script; their names end in {', '.join(SUFFIXES)}."
        )
    return _job(_existing(source), file, options, folder, str(path), arguments)


def _job(source: Path, file: JobFile, options: Options, folder: Path, where: str, arguments: tuple[str, ...]) -> Job:
    parameters = {**file.parameters, **options.parameters}
    check_values(where, parameters)
    form = form_of(source)
    if form is Form.PERCENT and arguments:
        # cells of an editor in a program that takes arguments
        form = Form.SCRIPT
    if form is Form.SCRIPT and parameters:
        raise UsageError(
            f"{source} is a script, and parameters are a notebook's. Give it arguments of its own: `sgpu run "
            f"{source.name} -- --lr 0.1`."
        )
    if form is not Form.SCRIPT and arguments:
        raise UsageError(f"{source} is a notebook and takes no arguments. Give it parameters: -p NAME=VALUE.")
    cells = options.cells or file.cells or "auto"
    if cells not in CELLS:
        raise UsageError(f"{where}: cells is {cells!r}; it can be {', '.join(CELLS)}.")
    retries = file.retries if options.retries is None else options.retries
    if not 0 <= retries <= _MOST_RETRIES:
        raise UsageError(f"{where}: retries is {retries}; 0 to {_MOST_RETRIES} is possible.")
    variables = {**{name: _text(value) for name, value in file.env.items()}, **options.variables}
    for name in variables:
        if _VARIABLE.fullmatch(name) is None:
            raise UsageError(f"{where}: {name!r} is no name of an environment variable.")
    output = options.output or (str(folder / os.path.expanduser(file.output)) if file.output else "")
    return Job(
        source=source,
        form=form,
        arguments=arguments,
        output=Path(output).absolute() if output else None,
        parameters=parameters,
        defaults=_defaults(file, options, folder, where),
        pool=options.pool or file.pool,
        variables=variables,
        timeout_s=_timeout_s(file, options, where),
        retries=retries,
        kernel=options.kernel or file.kernel,
        cells=cells,
    )


def _defaults(file: JobFile, options: Options, folder: Path, where: str) -> JobDefaults:
    gpus, kind = file.gpus, file.type
    if file.hardware_accelerator:
        if gpus is not None or kind is not None:
            raise UsageError(f"{where}: hardware_accelerator says how many of which type: leave gpus and type out.")
        gpus, kind = read_accelerator(file.hardware_accelerator, f"{where}: hardware_accelerator")
    if options.gpus is not None:
        gpus = options.gpus
    if options.type is not None:
        kind = options.type
    if gpus is not None and not 1 <= gpus <= MOST_RANKS:
        raise UsageError(f"{where}: gpus is {gpus}; 1 to {MOST_RANKS} is possible.")
    nodes = file.nodes if options.nodes is None else options.nodes
    if nodes is not None and not 1 <= nodes <= MOST_RANKS:
        raise UsageError(f"{where}: nodes is {nodes}; 1 to {MOST_RANKS} is possible.")
    placement = options.placement or file.placement
    if placement and placement not in STRATEGIES:
        raise UsageError(f"{where}: placement is {placement!r}; it can be {', '.join(STRATEGIES)}.")
    if file.environment != "" and file.env_version != "":
        raise UsageError(f"{where}: environment and env_version are the same: leave one of them out.")
    min_memory = options.min_memory or str(file.min_memory)
    memory_bytes(f"{where}: min_memory", min_memory)
    check_spread(gpus, nodes or 0, placement)
    env_version = options.env_version or str(file.environment or file.env_version)
    if not options.env_version and env_version and (folder / env_version).is_file():
        env_version = str((folder / env_version).absolute())
    uploads = (file.upload,) if isinstance(file.upload, str) else tuple(file.upload)
    return JobDefaults(
        gpus=gpus or 0,
        type=device_type(f"{where}: type", kind or None) or "",
        env_version=env_version,
        max_cost=max_cost_from(f"{where}: max_cost", options.max_cost or file.max_cost),
        nodes=nodes or 0,
        placement=placement,
        min_memory=min_memory,
        upload=_uploads(options.upload, Path(), where) or _uploads(uploads, folder, where),
    )


def _uploads(paths: tuple[str, ...], folder: Path, where: str) -> tuple[str, ...]:
    """Return them as the notebook's kernel finds them, which stands elsewhere."""
    found = tuple(os.path.abspath(folder / os.path.expanduser(path)) for path in paths if path)
    for path in found:
        if not os.path.exists(path):
            raise UsageError(f"{where}: upload: {path} is not there.")
    return found


def _timeout_s(file: JobFile, options: Options, where: str) -> float | None:
    if options.timeout is None and file.timeout is not None and file.timeout_s is not None:
        raise UsageError(f"{where}: timeout and timeout_s are the same: leave one of them out.")
    given = options.timeout if options.timeout is not None else file.timeout
    given = file.timeout_s if given is None else given
    if given is None:
        return None
    seconds = duration_s(f"{where}: timeout", given)
    if seconds <= 0:
        raise UsageError(f"{where}: a timeout of {given} leaves no time to run.")
    return seconds


def _existing(path: Path) -> Path:
    if path.is_file():
        return path.absolute()
    beside = [each.name for each in sorted(path.parent.glob(f"*{path.suffix}"))] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=1)
    raise UsageError(f"{path} is not there.{f' Is {near[0]} meant?' if near else ''}")


def _text(value: str | int | float | bool) -> str:
    return value if isinstance(value, str) else json.dumps(value)
