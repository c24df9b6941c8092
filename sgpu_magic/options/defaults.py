"""What `sgpu run` gives its notebook's kernel: devices, packages and a limit of cost for cells that name none.

An option that a cell or call gives wins, each by itself; a choice in the notebook's metadata comes after these.
"""

from __future__ import annotations

import functools
import os
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from sgpu_magic.errors import UsageError
from sgpu_magic.options.asked import RunOptions
from sgpu_magic.options.table import DEVICES
from sgpu_magic.options.values import memory_bytes, strategy_of
from sgpu_magic.wire.run import RunSpec

A = TypeVar("A", bound=RunOptions)

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
    return replace(spec, max_cost=most)


def with_job(asked: A) -> A:
    """Return what is asked for, with what `sgpu run` gives where nothing was."""
    job = of_process()
    wishes, devices = asked.wishes, asked.devices
    if job.env_version and not wishes.env_version:
        wishes = replace(wishes, env_version=job.env_version)
    # a number of ranks and the nodes that they fill belong together, and so do a type and its memory
    if job.nodes and not devices.nodes and (devices.ranks is None or not job.gpus):
        devices = replace(devices, nodes=job.nodes)
    if job.gpus and devices.ranks is None:
        devices = replace(devices, ranks=job.gpus)
    if devices.device_type is None and not devices.min_memory_bytes:
        memory = memory_bytes("--min-memory", job.min_memory)
        devices = replace(devices, device_type=job.type or None, min_memory_bytes=memory)
    if job.placement and not devices.strategy:
        devices = replace(devices, strategy=strategy_of("--placement", job.placement))
    if devices == asked.devices and wishes is asked.wishes:
        return asked
    return replace(asked, devices=devices, wishes=wishes)


def as_words(given: JobDefaults) -> list[str]:
    """Return what is given as the options of a line."""
    words: list[str] = []
    for name in (*DEVICES, "env-version", "max-cost"):
        value = getattr(given, name.replace("-", "_"))
        if value not in (0, "", None):
            words += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
    return words


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
