"""What `sgpu run` gives its notebook's kernel: devices, packages and a limit of cost for cells that name none.

An option that a cell or call gives wins, each by itself; a choice in the notebook's metadata comes after these.
"""

from __future__ import annotations

import functools
import os

import msgspec

from sgpu_magic.errors import UsageError
from sgpu_magic.wire.run import RunSpec

VARIABLE = "SGPU_JOB"
"""The environment variable that has them, as JSON. For `sgpu run` alone: a setting would count everywhere."""


class JobDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What runs of a job are given where their cells say nothing.

    Args:
        gpus: Number of ranks, 0 for none given.
        type: Canonical device type, "" for none given.
        env_version: As in `--env-version`, "" for none given.
        max_cost: The most that each run or session may cost in the currency of the settings; None is no limit.
        nodes: Number of nodes, 0 for none given.
        placement: As in `--placement`, "" for none given.
        min_memory: As in `--min-memory`, "" for none given.
        upload: Folders and files, as in `--upload`.
        ui: How runs are shown that do not say it, "" for what suits the place.
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


def of_process() -> JobDefaults:
    """Return this process's; nothing is given outside of `sgpu run`.

    Raises:
        UsageError: The variable can't be read.
    """
    return _read(os.environ.get(VARIABLE, ""))


def is_job() -> bool:
    """Whether `sgpu run` has started this process."""
    return VARIABLE in os.environ


def as_variable(given: JobDefaults) -> str:
    """Return the variable's value."""
    return msgspec.json.encode(given).decode()


def limited(spec: RunSpec) -> RunSpec:
    """Return what is submitted, with the job's limit of cost where it has none of its own."""
    most = of_process().max_cost
    if most is None or spec.max_cost is not None or spec.session:
        return spec
    return msgspec.structs.replace(spec, max_cost=most)


@functools.lru_cache(4)
def _read(text: str) -> JobDefaults:
    if not text:
        return JobDefaults()
    try:
        return msgspec.json.decode(text, type=JobDefaults)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"the variable {VARIABLE} can't be read: {error}. `sgpu run` sets it for its notebook; unset it elsewhere."
        ) from None
