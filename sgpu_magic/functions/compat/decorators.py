"""The documented decorators: this package's decorators, with the pool chosen by the documented environment variables.

`DATABRICKS_REMOTE_GPU_POOL_ID` names a pool, `DATABRICKS_USE_RESERVED_GPU_POOL` selects a reserved pool, and
`DATABRICKS_USE_POOL` an on-demand pool. The first one that is set counts, in this order.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, Unpack

from msgspec.structs import replace

from sgpu_magic.client.pools_file import LOCAL, pools_path, read_pools
from sgpu_magic.config import load_settings
from sgpu_magic.errors import UsageError
from sgpu_magic.functions import decorator
from sgpu_magic.functions.decorator import DistributedFunction
from sgpu_magic.options.job_form import read_accelerator
from sgpu_magic.options.option_records import CallOptions
from sgpu_magic.options.python_form import Options, checked

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_noted: set[str] = set()
POOL_ID = "DATABRICKS_REMOTE_GPU_POOL_ID"
RESERVED = "DATABRICKS_USE_RESERVED_GPU_POOL"
ON_DEMAND = "DATABRICKS_USE_POOL"
_NO = frozenset({"", "0", "false", "no", "off", "none"})


class _ChoosesPool:
    """Chooses the pool by the documented variables, which are read at each call, not when the function is defined."""

    _options: CallOptions

    def _options_now(self) -> CallOptions:
        return with_chosen_pool(self._options)


class ChoosingFunction(_ChoosesPool, DistributedFunction[P, R, T]):
    """A distributed function whose pool is chosen by the documented variables."""


class ChoosingRayFunction(_ChoosesPool, decorator.RayFunction[P, R]):
    """A Ray driver whose pool is chosen by the documented variables."""


def with_chosen_pool(options: CallOptions) -> CallOptions:
    """Return the options, with the pool chosen by the documented variables if the options name none.

    Raises:
        UsageError: The settings or the list of pools can't be read.
    """
    if options.pool:
        return options
    pool, note = chosen_pool(os.environ)
    if note and note not in _noted:
        _noted.add(note)
        sys.stderr.write(f"sgpu: {note}\n")
    return replace(options, pool=pool)


def distributed(
    function: Callable[..., Any] | None = None, /, *, run_async: bool = False, **options: Unpack[Options]
) -> Any:
    """Run a function on every rank: `sgpu_magic.distributed` under its documented name, with the same options.

    Raises:
        UsageError: An option's value is invalid or contradicts another option.
        TypeError: There is no option of that name.
    """
    # errors in the options are raised where the function is decorated
    checked(**options)
    decorate = functools.partial(ChoosingFunction[..., Any, Any], options=options, run_async=run_async)
    return decorate if function is None else decorate(function)


def ray_launch(function: Callable[..., Any] | None = None, /, **options: Unpack[Options]) -> Any:
    """Run a function as the driver of a Ray cluster: `sgpu_magic.ray_launch` under its documented name.

    Raises:
        UsageError: An option's value is invalid or contradicts another option.
        TypeError: There is no option of that name.
    """
    decorator.check_ray_options(options)
    decorate = functools.partial(ChoosingRayFunction[..., Any], options=options)
    return decorate if function is None else decorate(function)


def air_distributed(
    function: Callable[..., Any] | None = None,
    /,
    *,
    num_accelerators: int | None = None,
    accelerator_type: str = "",
    run_async: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Run a function on every rank, as `distributed`, with the accelerators named as in `databricks.air`.

    Args:
        function: The function.
        num_accelerators: Their number in total; by default that of one node of the type.
        accelerator_type: Number per node and type, such as `GPU_8xH100`.
        run_async: As in `distributed`.
        options: As in `distributed`.

    Raises:
        UsageError: As `distributed`, or the number is not a multiple of the type's.
        TypeError: There is no option of that name.
    """
    return distributed(function, run_async=run_async, **_with_accelerators(options, num_accelerators, accelerator_type))


def air_ray_launch(
    function: Callable[..., Any] | None = None,
    /,
    *,
    num_accelerators: int | None = None,
    accelerator_type: str = "",
    **options: Unpack[Options],
) -> Any:
    """Run a function as the driver of a Ray cluster: `ray_launch` with the arguments of `air_distributed`."""
    return ray_launch(function, **_with_accelerators(options, num_accelerators, accelerator_type))


def _with_accelerators(options: Options, number: int | None, name: str) -> Options:
    if not name:
        return options if number is None else {**options, "gpus": number}
    in_node, gpu_type = read_accelerator(name, "accelerator_type")
    gpus = in_node if number is None else number
    if gpus < 1 or gpus % in_node:
        raise UsageError(f"num_accelerators is {gpus}, but {name} has {in_node} per node; use a multiple of {in_node}.")
    return {**options, "gpus": gpus, "gpu_type": gpu_type}


def chosen_pool(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the pool that the variables choose, and a note for the user.

    Args:
        environ: Environment variables.

    Returns:
        A pool's name, `reserved` or `on-demand`, or "" for the default choice; and a sentence if they choose a pool
        that is not known, else "".

    Raises:
        UsageError: The settings or the list of pools can't be read.
    """
    setting = load_settings(environ).pool
    entries = read_pools(pools_path(environ))
    name = environ.get(POOL_ID, "")
    if name:
        if name in (LOCAL, setting, *(entry.name for entry in entries)):
            return name, ""
        text = f"{POOL_ID} names the pool {name!r}, which is not known here"
    elif _is_set(environ, RESERVED):
        if any(entry.reserved for entry in entries):
            return "reserved", ""
        text = f"{RESERVED} asks for a reserved pool, and none is known here"
    elif _is_set(environ, ON_DEMAND):
        if any(not entry.reserved for entry in entries):
            return "on-demand", ""
        text = f"{ON_DEMAND} asks for an on-demand pool, and none is known here"
    else:
        return "", ""
    instead = f"the pool {setting or LOCAL!r}" if setting or not entries else "the pool that fits best"
    return "", f"{text}; the run goes to {instead}. `sgpu pool add` lists others."


def _is_set(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() not in _NO
