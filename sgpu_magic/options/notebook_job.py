"""What `sgpu run` and its notebook's kernel exchange: defaults of options, parameters for widgets, and a final value.

An option of a cell or call overrides its default; these in turn take precedence over the notebook's own choice.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from sgpu_magic.errors import UsageError
from sgpu_magic.options.option_records import RunOptions
from sgpu_magic.options.table import DEVICES
from sgpu_magic.options.values import memory_bytes, strategy_of
from sgpu_magic.wire.decoding import decode_json
from sgpu_magic.wire.run import RunSpec

A = TypeVar("A", bound=RunOptions)
T = TypeVar("T")

VARIABLE = "SGPU_JOB"
"""Environment variable with the defaults as JSON. Only `sgpu run` sets it; a setting would apply to all kernels."""

PARAMETERS_VARIABLE = "SGPU_JOB_PARAMETERS"
"""Environment variable with the job's parameters as JSON, each value as text. Only `sgpu run` sets it."""

# ---------------------------------------------------------------- defaults of options


class JobDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Defaults for the runs of a job.

    Args:
        gpus: Number of ranks; 0 if not given.
        type: Canonical device type; "" if not given.
        env_version: As in `--env-version`; "" if not given.
        max_cost: Cost limit of each run or session in the currency of the settings; None means no limit.
        nodes: Number of nodes; 0 if not given.
        placement: As in `--placement`; "" if not given.
        min_memory: As in `--min-memory`; "" if not given.
        upload: Folders and files, as in `--upload`.
        ui: How runs are shown, as in `--ui`; "" to decide by the front end.
        script: Path of the script that is the job; "" for a notebook.
        arguments: Its `sys.argv` if it runs on the ranks, else empty.
        module: Its name if it is started as a module; "" for a path.
    """

    gpus: int = 0
    type: str = ""
    env_version: str = ""
    max_cost: float | None = None
    nodes: int = 0
    placement: str = ""
    min_memory: str = ""
    upload: tuple[str, ...] = ()
    ui: str = ""
    script: str = ""
    arguments: tuple[str, ...] = ()
    module: str = ""


def of_process() -> JobDefaults:
    """Return the defaults of this process; all empty outside of `sgpu run`.

    Raises:
        UsageError: The variable can't be read.
    """
    return _decoded(VARIABLE, JobDefaults)


def is_job() -> bool:
    """Whether `sgpu run` started this process."""
    return VARIABLE in os.environ


def as_variable(given: JobDefaults) -> str:
    """Return the value of the variable for these defaults."""
    return msgspec.json.encode(given).decode()


def limited(spec: RunSpec) -> RunSpec:
    """Return the spec with the job's cost limit, unless it has its own or runs in a session."""
    most = of_process().max_cost
    if most is None or spec.max_cost is not None or spec.session:
        return spec
    return replace(spec, max_cost=most)


def with_job(asked: A) -> A:
    """Fill in options that were not given with the job's defaults."""
    job = of_process()
    environment, devices = asked.environment, asked.devices
    if job.env_version and not environment.env_version:
        environment = replace(environment, env_version=job.env_version)
    # ranks and nodes belong together, as do type and memory: a default does not mix with a given value
    if job.nodes and not devices.nodes and (devices.ranks is None or not job.gpus):
        devices = replace(devices, nodes=job.nodes)
    if job.gpus and devices.ranks is None:
        devices = replace(devices, ranks=job.gpus)
    if devices.device_type is None and not devices.min_memory_bytes:
        memory = memory_bytes("--min-memory", job.min_memory)
        devices = replace(devices, device_type=job.type or None, min_memory_bytes=memory)
    if job.placement and not devices.strategy:
        devices = replace(devices, strategy=strategy_of("--placement", job.placement))
    return replace(asked, devices=devices, environment=environment)


def as_arguments(given: JobDefaults) -> list[str]:
    """Return the defaults as options of a command line."""
    words: list[str] = []
    for name in (*DEVICES, "env-version", "max-cost"):
        value = getattr(given, name.replace("-", "_"))
        if value not in (0, "", None):
            words += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
    return words


def _decoded(variable: str, kind: type[T]) -> T:
    """Decode the JSON in a variable; the kind's empty value if it is not set."""
    text = os.environ.get(variable, "")
    try:
        return decode_json(text, type=kind) if text else kind()
    except msgspec.DecodeError as error:
        raise UsageError(
            f"the variable {variable} can't be read: {error}. `sgpu run` sets it for its notebook; unset it elsewhere."
        ) from None


# ---------------------------------------------------------------- parameters, and the final value


def parameters_of_process() -> dict[str, str]:
    """Return the parameters of the job as text; empty outside of `sgpu run`.

    Raises:
        UsageError: The variable can't be read.
    """
    return _decoded(PARAMETERS_VARIABLE, dict[str, str])


def parameters_as_variable(parameters: Mapping[str, object]) -> str:
    """Return the value of the variable. Lists and mappings are written as JSON, other values as Python writes them."""
    texts = {
        name: msgspec.json.encode(value).decode() if isinstance(value, list | dict) else str(value)
        for name, value in parameters.items()
    }
    return msgspec.json.encode(texts).decode()


class NotebookExit(BaseException):
    """Ends the notebook with a value: the cells that follow do not run.

    Not an `Exception`, so that a handler of the notebook's own code does not stop it. A front end shows one line;
    for `sgpu run` it is a success.

    Args:
        value: The value as text.
    """

    def __init__(self, value: str) -> None:
        super().__init__(value)
        self.value = value

    def _render_traceback_(self) -> list[str]:
        return [f"Notebook exited: {' '.join(self.value.split())}".rstrip(": ")]
