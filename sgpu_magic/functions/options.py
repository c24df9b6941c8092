"""What `@distributed` takes, checked: the same options as the magic's, as Python values."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, TypedDict, TypeGuard, Unpack

from sgpu_magic.config import SEVEN_DAYS_S
from sgpu_magic.errors import UsageError
from sgpu_magic.runs.option_values import (
    UI_CHOICES,
    check_spread,
    device_type,
    duration_s,
    in_pythons_words,
    memory_bytes,
    node_count,
    rank_count,
    strategy_of,
)
from sgpu_magic.runs.package_options import EnvVersion, Upload, max_cost_from, wishes_from
from sgpu_magic.runs.submit.placing import Devices
from sgpu_magic.runs.submit.spec import RunOptions

if TYPE_CHECKING:
    from sgpu_magic.runs.sessions import Session

Duration = float | str | timedelta
"""Seconds, a text such as `"30m"`, or a `datetime.timedelta`."""

_RETRY_ON = ("failure", "any")
_MAX_RETRIES = 100


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions(RunOptions):
    """The same, checked and in the protocol's words.

    Args:
        session: Its ranks are used; None is a lease of its own.
    """

    session: Session | None = None


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
    gpus, num_gpus = options.get("gpus"), options.get("num_gpus")
    if gpus is not None and num_gpus is not None and gpus != num_gpus:
        raise UsageError(f"gpus={gpus!r} and num_gpus={num_gpus!r} are the same option. Give one of them.")
    gpu_type = _device_type(options.get("gpu_type"))
    session = options.get("session")
    remote = options.get("remote")
    if remote and gpu_type is None and session is None:
        raise UsageError(
            'remote=True needs gpu_type: say which GPUs the pool shall give, such as gpu_type="h100" ("any" for '
            "whatever it has)."
        )
    if remote is False and options.get("pool", "") not in ("", "local"):
        raise UsageError(
            f"remote=False is this machine's own pool, so pool={options.get('pool')!r} can't be meant too. Leave one "
            "of them out."
        )
    timeout_s = _seconds("timeout", options.get("timeout"))
    if timeout_s is not None and not 0 < timeout_s <= SEVEN_DAYS_S:
        raise UsageError(
            f"timeout={options.get('timeout')!r} is not possible: a run may take more than 0 s and at most 7 days."
        )
    ui = options.get("ui", "auto")
    if ui not in UI_CHOICES:
        raise UsageError(f"ui={ui!r} is not possible; there are: {', '.join(UI_CHOICES)}.")
    retries = options.get("retries", 0)
    if not _is_count(retries) or not 0 <= retries <= _MAX_RETRIES:
        raise UsageError(f"retries={retries!r} is not possible; 0 to {_MAX_RETRIES} are.")
    retry_any = _retries_on_any(options)
    if ("retry_on" in options or retry_any) and not retries:
        raise UsageError("retry_on says when to start again, but not how often: add retries=N.")
    devices = Devices(
        rank_count("gpus" if gpus is not None else "num_gpus", gpus if gpus is not None else num_gpus),
        gpu_type,
        memory_bytes("min_memory", options.get("min_memory")),
        node_count("nodes", options.get("nodes")),
        strategy_of("placement", options.get("placement")),
        bool(options.get("allow_busy")),
    )
    if devices.ranks is not None:
        try:
            check_spread(devices.ranks, devices.nodes, devices.strategy)
        except UsageError as error:
            raise UsageError(in_pythons_words(error.message)) from None
    return CallOptions(
        devices=devices,
        timeout_s=SEVEN_DAYS_S if timeout_s is None else timeout_s,
        wait_s=_seconds("wait", options.get("wait")),
        grace_s=_seconds("grace", options.get("grace")),
        retries=retries,
        retry_any=retry_any,
        variables=_variables(options.get("env")),
        name=options.get("name", ""),
        exclude=_names(options.get("exclude", ())),
        pool="local" if remote is False else options.get("pool", ""),
        ui=ui,
        session=session,
        wishes=wishes_from(
            options.get("env_version"),
            options.get("torch"),
            options.get("allow_build", False),
            options.get("track"),
            options.get("upload", ()),
        ),
        profile=bool(options.get("profile")),
        max_cost=max_cost_from("max_cost", options.get("max_cost")),
    )


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _device_type(value: str | enum.Enum | None) -> str | None:
    if isinstance(value, enum.Enum):
        value = str(value.value)
    return device_type("gpu_type", None if value is None else str(value))


def _retries_on_any(options: SharedOptions) -> bool:
    if "retry_any" in options:
        warnings.warn('retry_any=True is now retry_on="any"', DeprecationWarning, stacklevel=2)
    retry_on = options.get("retry_on", "any" if options.get("retry_any") else _RETRY_ON[0])
    if retry_on not in _RETRY_ON:
        raise UsageError(f"retry_on={retry_on!r} is not possible; there are: {', '.join(_RETRY_ON)}.")
    return retry_on == "any"


def _seconds(option: str, value: Duration | None) -> float | None:
    if isinstance(value, timedelta):
        value = value.total_seconds()
        if value < 0:
            raise UsageError(f"{option} is {value:g} s; less than nothing is not possible.")
    return None if value is None else duration_s(option, value)


def _variables(env: Mapping[str, str] | None) -> dict[str, str]:
    variables = {str(name): str(value) for name, value in (env or {}).items()}
    if any(not name or "=" in name for name in variables):
        # the value may be a secret that was put in the name's place: it is not repeated
        raise UsageError("env takes names of variables and their values, and no name is empty or has a sign in it.")
    return variables


def _names(names: Iterable[str]) -> tuple[str, ...]:
    listed = tuple(names.replace(",", " ").split()) if isinstance(names, str) else tuple(names)
    for name in listed:
        if not name.isidentifier():
            raise UsageError(f"exclude has {name!r}, which is not a variable's name.")
    return listed
