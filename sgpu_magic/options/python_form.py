"""The options of `@distributed`, `map` and `connect`: those of the magics, as Python values."""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from sgpu_magic.errors import UsageError
from sgpu_magic.options import table, values
from sgpu_magic.options.option_records import CallOptions, SessionOptions
from sgpu_magic.options.table import (
    MOST_RETRIES,
    RETRY_CHOICES,
    UI_CHOICES,
    Reader,
    as_argument,
    in_python,
    options_spelled,
)
from sgpu_magic.options.values import Duration, Upload

if TYPE_CHECKING:
    from sgpu_magic.runs.sessions import Session

EnvVersion = str | int | os.PathLike[str]
"""A base environment (`4`, `"ai-4"`), `"none"`, a saved environment, or a requirements or pylock file."""


class SharedOptions(TypedDict, total=False):
    """The options that `@distributed` and `map` share.

    Args:
        remote: False runs on this machine's own pool, whatever the default pool is. True requires `gpu_type`.
        timeout: Maximum running time: seconds, a text such as `"30m"` or a `timedelta`. Default and maximum: 7 days.
        wait: Maximum time in the queue, as for `timeout`; 0 runs now or fails. Default: no limit.
        grace: Time between SIGTERM and SIGKILL when the run is stopped. Default: 5 s, or 0 after a failure.
        retries: Number of times to restart the ranks after a worker or node failure. Default: 0.
        retry_on: `"failure"` of a worker or node (default), or `"any"` to restart also after an error in the function.
        env: Environment variables to set on the ranks.
        name: The run's name. Default: the function's name.
        exclude: Names in the notebook that are not sent to the ranks, although the function reads them.
        env_version: The ranks' packages: `"4"` or `"ai-4"` (base environments), a requirements or pylock file, an
            environment saved with `%sgpu_env`, or `"none"` for the packages of this notebook or program. Default: the
            setting `env_version`, else `"none"`.
        torch: The torch to use if packages are installed for the run: `"node"` for the node's (default), `"mine"` to
            install the notebook's.
        allow_build: Allow packages without a wheel to be built from source for the run.
        track: False does not create an MLflow run. Default: the setting `track`.
        upload: A folder or file, or several, to make available to the ranks, which get the path from
            `sgpu_magic.runtime.upload_path("data")`.
        profile: Keep a torch profiler trace of every rank.
        max_cost: Stop the run before it costs more, in the currency of the settings. Default: no limit.
        allow_busy: Also use GPUs that other programs use.
        min_memory: Minimum memory of each device, `"40GB"` or bytes. Without `gpu_type`, the cheapest type that has it
            is used.
        nodes: Number of nodes to spread the ranks over evenly. Default: the pool's choice.
        placement: `"pack"` on as few nodes as possible (default), `"strict_pack"` on one, `"spread"` over many.
        pool: The pool's name, or `"reserved"` or `"on-demand"` for any pool of that kind. Default: the setting `pool`,
            else a reserved pool that has the type, else an on-demand one, else this machine's own.
        ui: How the run is shown: `"auto"`, `"widget"`, `"text"` or `"none"`.
    """

    remote: bool | None
    timeout: Duration | None
    wait: Duration | None
    grace: Duration | None
    retries: int
    retry_on: Literal["failure", "any"]
    env: Mapping[str, str] | None
    name: str
    exclude: Iterable[str]
    env_version: EnvVersion | None
    torch: str | None
    allow_build: bool
    track: bool | None
    upload: Upload
    profile: bool
    max_cost: float | None
    allow_busy: bool
    min_memory: str | float | None
    nodes: int | None
    placement: str | None
    pool: str
    ui: str


class Options(SharedOptions, total=False):
    """The options of `@distributed` and `train.options(...)`: those of `SharedOptions`, and these.

    Args:
        gpus: Number of ranks, one per GPU. Default: 2 on CPU, else all GPUs of one type. Required for GPUs of a shared
            pool.
        num_gpus: Alias for `gpus`.
        gpu_type: `"a10"`, `"h100"` ..., `"cpu"` or `"any"`, or an enum member with such a value. Default: what the
            pool has.
        session: Run in this session's ranks, with the state that its cells left there.
    """

    gpus: int | None
    num_gpus: int | None
    gpu_type: str | enum.Enum | None
    session: Session | None


def checked(**options: Unpack[Options]) -> CallOptions:
    """Check options and return them as `CallOptions`.

    Raises:
        UsageError: An option is invalid or contradicts another.
        TypeError: An option is unknown.
    """
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        known = ", ".join(sorted(Options.__annotations__))
        raise TypeError(f"@distributed has no option {min(unknown)!r}. It has: {known}.")
    given: dict[str, Any] = {**options}
    gpus, num_gpus = options.get("gpus"), options.get("num_gpus")
    if gpus is not None and num_gpus is not None and gpus != num_gpus:
        raise UsageError(f"gpus={gpus!r} and num_gpus={num_gpus!r} are the same option. Give one of them.")
    if gpus is None:
        given["gpus"] = values.rank_count("num_gpus", num_gpus)
    remote, pool = options.get("remote"), options.get("pool", "")
    if remote and options.get("gpu_type") is None and options.get("session") is None:
        raise UsageError(
            'remote=True needs gpu_type: say which GPUs to request, such as gpu_type="h100" ("any" for '
            "whatever the pool has)."
        )
    if remote is False:
        if pool not in ("", "local"):
            raise UsageError(
                f"remote=False selects this machine's own pool, and pool={pool!r} another one. Leave one of them out."
            )
        given["pool"] = "local"
    asked = CallOptions(**_fields(table.CALL, given, _READERS), session=options.get("session"))
    if given.get("retry_on") is not None and not asked.retries:
        raise UsageError("retry_on says when to start again, but not how often: add retries=N.")
    with options_spelled(as_argument):
        table.check_devices(asked.devices)
    return asked


def of_session(given: Mapping[str, Any]) -> SessionOptions:
    """Check the arguments of `connect`.

    Raises:
        UsageError: An argument is invalid.
    """
    names = [name for name in table.SESSION if name != "ui"]
    readers = {name: _READERS[name] for name in ("allow-busy", "allow-build", "env", "no-track")}
    asked = SessionOptions(**_fields(names, {**given, "name": given["name"] or None}, readers))
    with options_spelled(as_argument):
        table.check_devices(asked.devices)
    return asked


def _fields(names: Iterable[str], given: Mapping[str, Any], readers: Mapping[str, Reader]) -> dict[str, Any]:
    return table.read({name: given.get(in_python(name)) for name in names}, in_python, readers)


def _choice(choices: tuple[str, ...]) -> Reader:
    def read(option: str, value: object) -> object:
        if value not in choices:
            raise UsageError(f"{option}={value!r} is not possible; it can be {', '.join(choices)}.")
        return value

    return read


def _retries(option: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST_RETRIES:
        raise UsageError(f"{option}={value!r} is not possible; it must be 0 to {MOST_RETRIES}.")
    return value


def _variables(_: str, env: Mapping[str, str]) -> dict[str, str]:
    variables = {str(name): str(value) for name, value in env.items()}
    if any(not name or "=" in name for name in variables):
        # the value may be a secret that was put in the name's place: it is not repeated
        raise UsageError("env takes variable names and values; a name can't be empty or contain an equals sign.")
    return values.for_ranks(variables)


def _names(option: str, names: Iterable[str]) -> tuple[str, ...]:
    listed = tuple(names.replace(",", " ").split()) if isinstance(names, str) else tuple(names)
    for name in listed:
        if not name.isidentifier():
            raise UsageError(f"{option} has {name!r}, which is not a variable's name.")
    return listed


_READERS: Mapping[str, Reader] = {
    **dict.fromkeys(("allow-build", "allow-busy", "no-track", "profile"), lambda _, given: bool(given)),
    "env": _variables,
    "exclude": _names,
    "retries": _retries,
    "retry-on": lambda option, given: _choice(RETRY_CHOICES)(option, given) == "any",
    "ui": _choice(UI_CHOICES),
}
