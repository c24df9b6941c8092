"""What `@distributed`, `map` and `connect` take: the same options as the magics', as Python values."""

from __future__ import annotations

import enum
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from sgpu_magic.errors import UsageError
from sgpu_magic.options import table, values
from sgpu_magic.options.asked import CallOptions, Devices, SessionOptions
from sgpu_magic.options.table import MOST_RETRIES, RETRY_CHOICES, UI_CHOICES, Reader, in_python, in_pythons_words
from sgpu_magic.options.values import Duration, Upload

if TYPE_CHECKING:
    from sgpu_magic.runs.sessions import Session

EnvVersion = str | int | os.PathLike[str]
"""A base environment's name (`4`, `"ai-4"`), `"none"`, a saved one's name, or a requirements or pylock file."""


class SharedOptions(TypedDict, total=False):
    """The options that `@distributed` and `map` share.

    Args:
        remote: False runs on this machine's own pool whatever the default pool is; True needs `gpu_type`.
        timeout: Longest running time; default and most: 7 days.
        wait: Longest time in the queue, 0 to run now or fail. Default: as long as it takes.
        grace: Time between TERM and KILL when it is stopped. Default: 5 s, none after a failure.
        retries: How often the ranks are started again when a worker or node fails. Default: 0.
        retry_on: `"failure"` of a worker or node (default), or `"any"`: also after an error of the function itself.
        retry_any: The earlier spelling of `retry_on="any"`.
        env: Variables to set on the ranks.
        name: The run's name. Default: the function's.
        exclude: Names of the notebook that stay there although the function reads them.
        env_version: The ranks' packages: `"4"`, `"ai-4"`, a requirements or pylock file, or one that `%sgpu_env` has
            saved; `"none"` for this notebook's or program's own. Default: the setting `env_version`, else `"none"`.
        torch: Where packages are installed for the run: `"node"` uses the node's torch (default), `"mine"` installs
            the notebook's.
        allow_build: Packages without a wheel may be built from source for the run.
        track: False: it does not become an MLflow run. Default: the setting `track`.
        upload: A folder or file, or several, that the ranks find there too: `sgpu_magic.runtime.upload_path("data")`.
        profile: Keep a trace of torch's profiler from every rank.
        max_cost: It is stopped before it costs more, in the currency of the settings. Default: no limit.
        allow_busy: Also take GPUs that other programs use.
        min_memory: Memory of each device, `"40GB"` or bytes. Without `gpu_type` the cheapest type that has it.
        nodes: Nodes that the ranks are spread over evenly. Default: the pool's choice.
        placement: `"pack"` on as few nodes as can be (default), `"strict_pack"` on one, `"spread"` over many.
        pool: The pool's name, or `"reserved"` or `"on-demand"` for any such. Default: the setting `pool`, else a
            reserved pool that has the type, an on-demand one, this machine's own.
        ui: How it is shown: `"auto"`, `"widget"`, `"text"` or `"none"`.
    """

    remote: bool | None
    timeout: Duration | None
    wait: Duration | None
    grace: Duration | None
    retries: int
    retry_on: Literal["failure", "any"]
    retry_any: bool
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
    """The options of `@distributed` and of `train.options(...)`: those of `SharedOptions`, and these.

    Args:
        gpus: Ranks, one per GPU. Default: 2 on CPU, else all GPUs of the pool's one type.
        num_gpus: Another name of `gpus`.
        gpu_type: `"a10"`, `"h100"` ..., `"cpu"` or `"any"` (default: what the pool has); also an enum's member whose
            value is such a text.
        session: Run in this session's ranks, with the state that its cells have left there.
    """

    gpus: int | None
    num_gpus: int | None
    gpu_type: str | enum.Enum | None
    session: Session | None


def checked(**options: Unpack[Options]) -> CallOptions:
    """Check options and return them in the protocol's words.

    Raises:
        UsageError: One means nothing, or contradicts another.
        TypeError: There is no option of that name.
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
            'remote=True needs gpu_type: say which GPUs the pool shall give, such as gpu_type="h100" ("any" for '
            "whatever it has)."
        )
    if remote is False:
        if pool not in ("", "local"):
            raise UsageError(
                f"remote=False is this machine's own pool, so pool={pool!r} can't be meant too. Leave one of them out."
            )
        given["pool"] = "local"
    if "retry_any" in options:
        warnings.warn('retry_any=True is now retry_on="any"', DeprecationWarning, stacklevel=2)
        if options["retry_any"]:
            given.setdefault("retry_on", "any")
    asked = CallOptions(**_fields(table.CALL, given, _READERS), session=options.get("session"))
    if given.get("retry_on") is not None and not asked.retries:
        raise UsageError("retry_on says when to start again, but not how often: add retries=N.")
    _check_devices(asked.devices)
    return asked


def of_session(given: Mapping[str, Any]) -> SessionOptions:
    """Check what `connect` was given.

    Raises:
        UsageError: Something means nothing.
    """
    names = [name for name in table.SESSION if name != "ui"]
    readers = {name: _READERS[name] for name in ("allow-busy", "allow-build", "env", "no-track")}
    asked = SessionOptions(**_fields(names, {**given, "name": given["name"] or None}, readers))
    _check_devices(asked.devices)
    return asked


def _check_devices(devices: Devices) -> None:
    try:
        table.check_devices(devices)
    except UsageError as error:
        raise UsageError(in_pythons_words(error.message)) from None


def _fields(names: Iterable[str], given: Mapping[str, Any], readers: Mapping[str, Reader]) -> dict[str, Any]:
    return table.read({name: given.get(in_python(name)) for name in names}, in_python, readers)


def _choice(choices: tuple[str, ...]) -> Reader:
    def read(option: str, value: object) -> object:
        if value not in choices:
            raise UsageError(f"{option}={value!r} is not possible; there are: {', '.join(choices)}.")
        return value

    return read


def _retries(option: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST_RETRIES:
        raise UsageError(f"{option}={value!r} is not possible; 0 to {MOST_RETRIES} are.")
    return value


def _variables(_: str, env: Mapping[str, str]) -> dict[str, str]:
    variables = {str(name): str(value) for name, value in env.items()}
    if any(not name or "=" in name for name in variables):
        # the value may be a secret that was put in the name's place: it is not repeated
        raise UsageError("env takes names of variables and their values, and no name is empty or has a sign in it.")
    return variables


def _names(option: str, names: Iterable[str]) -> tuple[str, ...]:
    listed = tuple(names.replace(",", " ").split()) if isinstance(names, str) else tuple(names)
    for name in listed:
        if not name.isidentifier():
            raise UsageError(f"{option} has {name!r}, which is not a variable's name.")
    return listed


def _truth(_: str, value: object) -> bool:
    return bool(value)


_READERS: Mapping[str, Reader] = {
    "allow-build": _truth,
    "allow-busy": _truth,
    "env": _variables,
    "exclude": _names,
    "no-track": _truth,
    "profile": _truth,
    "retries": _retries,
    "retry-on": lambda option, given: _choice(RETRY_CHOICES)(option, given) == "any",
    "ui": _choice(UI_CHOICES),
}
