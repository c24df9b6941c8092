"""Settings: defaults, then `config.toml`, then `SGPU_*` variables. Frozen once read.

Also where things lie: state on local disk, sockets in a short runtime directory, both keyed by host, because a
home directory may be shared by many machines.
"""

from __future__ import annotations

import math
import os
import socket
import stat
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import msgspec
from platformdirs import user_config_path, user_state_path

from sgpu_magic.errors import UsageError
from sgpu_magic.wire.costs import is_currency, prices_text, read_prices
from sgpu_magic.wire.user_limits import read_priorities, read_quotas

# what a remedy adds that changes where a pool lives, which a kernel reads when it loads the extension
SET_IN_NOTEBOOK = "(in a notebook with %env, then %reload_ext sgpu_magic)"
SEVEN_DAYS_S = 7 * 24 * 3600.0
_MAX_BUDGET_DAYS = 3660
# these may be tables in the file
_PRICES = ("prices", "reserved_prices")
_WORDS = {"stand_in": ("cpu",), "environments": ("auto", "built"), "ray_select": ("auto", "label", "resource")}
# what a pool has and allows, read when it starts: a notebook that states other values wants a pool with those
POOL_SETTINGS = (
    "simulate", "cpu_slots", "prices", "reserved_prices", "currency", "budget", "budget_days", "environment_dir",
    "environment_limit",
)  # fmt: skip
_TRUTHS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
# as people write them: `yes`, `1_000`, `5e9`
_KINDS: Mapping[str, Callable[[str], object]] = {
    "bool": lambda text: _TRUTHS[text.lower()],
    "int": int,
    "float": float,
    "str": str,
}


class Settings(msgspec.Struct, frozen=True):
    """All settings; each may stand in `config.toml` by its name or in the environment as `SGPU_<NAME>`.

    Args:
        state_dir: Run directories, logs and the ledger; "" is the platform's state directory.
        runtime_dir: Sockets; "" is `$XDG_RUNTIME_DIR/sgpu` or `/tmp/sgpu-<uid>`.
        lock_dir: Machine-wide directory of the device locks.
        pool: The pool of runs that name none; "" chooses one: a reserved pool of `pools.toml` that has the type, else
            an on-demand one, else `local`, this machine's own. Of a pool service: its own name, "" is `local`.
        simulate: Simulated devices, `a10:4,h100:8`.
        stand_in: `cpu` runs types that the pool lacks on CPU.
        cpu_slots: CPU ranks that fit at once; 0 is max(16, cores).
        standby: Keep a standby group of the last-used size.
        standby_idle_s: Idle seconds after which it is dropped.
        zygote_idle_s: Idle seconds after which a zygote is retired.
        pool_idle_s: Seconds without runs after which the local pool gives its processes back.
        status_idle_s: Seconds for which `%sgpu_status` is kept up to date after the last run has ended.
        grace_s: Seconds from TERM to KILL when a run is cancelled.
        adopt_timeout_s: Seconds for which ranks outlive a killed pool service.
        stall_s: Seconds without any progress after which a run's view says where its ranks wait; 0 never says it.
        idle_gpu_s: Seconds under 5 % after which a run's view names a GPU as idle; 0 never does.
        detach_on_restart: Runs go on when their kernel is restarted.
        keep_runs: Ended runs whose directories are kept; as many cells of sessions are kept beside them.
        keep_days: Days for which they are kept.
        keep_bytes: Bytes that they may have together.
        keep_payload: Largest payload in bytes that is kept in the run's directory.
        keep_results: Bytes of a run's results that are kept there although its notebook has them.
        session_idle_s: Seconds without a cell after which a session ends; 0 never ends it.
        pass_over_s: Seconds a run may be passed over before freed devices are reserved for it.
        output_limit: Bytes of output that a cell shows; the rest is in the log.
        cache_dir: The node's cache for data (`runtime.cache_dir()`); "" is the platform's cache directory.
        cache_bytes: Bytes that it may have.
        env_version: Packages of runs that do not say `--env-version`: as that takes them; "" is the notebook's own.
        environments: `auto` runs a kernel's own Python where a node sees it and builds its packages elsewhere;
            `built` always builds them.
        environment_dir: Where a node keeps the environments that it has built; "" is in the state directory.
        environments_bytes: Bytes that they may have together before the least recently used one goes.
        environment_limit: Largest environment in bytes that is built.
        variables: Environment variables that travel to nodes of other machines beside those of libraries: names and,
            ending in `*`, beginnings of names, with commas between.
        code_warn_bytes: Local code that travels to such nodes is told of from this size on.
        code_limit_bytes: More does not travel.
        lock_environments: `pylock.toml` is made for each environment that runs had; else `requirements.txt` alone.
        index_url: Where uv looks packages up and fetches them, passed on as its own; "" is uv's and pip's own choice.
        track: Which runs become MLflow runs: "auto" (that last over 5 s, fail, are profiled, use MLflow or are asked
            for), "all" or "off".
        tracking_uri: Store for runs whose notebook names none; "" is SQLite in the state directory.
        keep_tracked: MLflow runs of the default store stay when the runs' directories are removed. Without it those
            stay in which the user's code has logged something.
        prices: Price of one device for an hour by type, `a10=1.20,h100=4.50`; of one pool `team/h100=3.90`. In the file
            a table does as well.
        reserved_prices: The same for reserved devices, to compare with.
        currency: Of all prices.
        budget: What the pool's runs may cost together in `budget_days`; 0 is no limit.
        budget_days: Days that the budget is for.
        link_timeout_s: Seconds of silence after which a pool gives up a client on another machine and cancels those of
            its runs that are not detached, and after which a client gives up such a pool.
        listen: Where a served pool listens for clients of other machines, `tcp://0.0.0.0:8700`; "" does not.
        ray_dashboard: `@ray_launch` runs have Ray's dashboard, which takes a gigabyte of memory and some seconds.
        ray_object_bytes: Most memory that the objects of a `@ray_launch` run take on a node, in bytes; 0 is the lease's
            share of 30 % of the node's memory, and more than 30 % it never is.
        blobs_bytes: Bytes that a user's uploads may take at a pool, for each user; the longest unused go first.
        run_files_bytes: Largest file that a node brings back to a pool on another machine when a run is over.
        ray_address: The Ray cluster of a pool with `--engine ray`; "" is `RAY_ADDRESS`, else this machine's.
        ray_agent_idle_s: Seconds without a run after which a pool leaves a Ray node.
        ray_cpus_per_gpu: CPUs that are asked of Ray with each GPU.
        ray_elastic: Devices of each type that Ray's autoscaler can bring at most, `a10:16,h100:64`; `cpu:32` CPUs.
        ray_node_listen: Where such a pool listens for its agents; port 0 is one that is free, and the same each time.
        ray_same_files: The nodes see the notebooks' files and run the same Pythons: nothing has to be built there.
        user_priorities: Whose runs get devices first where several users share a pool, `alice=10,*=0`: the higher.
        user_quotas: Devices that a user may have at once, `alice=8,alice:h100=4,*=16`.
        fair_half_life_s: Seconds after which devices that a user had count half for the next turn.
        ray_select: How types are asked of Ray: by `label` (`ray.io/accelerator-type`), by `resource`
            (`accelerator_type:X`, all that version 1 of the autoscaler knows), or `auto`: as the nodes have it.
    """

    state_dir: str = ""
    runtime_dir: str = ""
    lock_dir: str = ""
    pool: str = ""
    simulate: str = ""
    stand_in: str = ""
    cpu_slots: int = 0
    standby: bool = True
    standby_idle_s: float = 60.0
    zygote_idle_s: float = 600.0
    pool_idle_s: float = 3600.0
    status_idle_s: float = 60.0
    grace_s: float = 5.0
    adopt_timeout_s: float = 30.0
    stall_s: float = 30.0
    idle_gpu_s: float = 60.0
    detach_on_restart: bool = False
    keep_runs: int = 500
    keep_days: float = 30.0
    keep_bytes: int = 20_000_000_000
    keep_payload: int = 2_000_000_000
    keep_results: int = 100_000_000
    session_idle_s: float = 3600.0
    pass_over_s: float = 600.0
    output_limit: int = 200_000
    cache_dir: str = ""
    cache_bytes: int = 50_000_000_000
    env_version: str = ""
    environments: str = "auto"
    environment_dir: str = ""
    environments_bytes: int = 50_000_000_000
    environment_limit: int = 15_000_000_000
    variables: str = ""
    code_warn_bytes: int = 25_000_000
    code_limit_bytes: int = 250_000_000
    lock_environments: bool = True
    index_url: str = ""
    track: str = "auto"
    tracking_uri: str = ""
    keep_tracked: bool = False
    prices: str = ""
    reserved_prices: str = ""
    currency: str = "USD"
    budget: float = 0.0
    budget_days: float = 30.0
    link_timeout_s: float = 900.0
    listen: str = ""
    ray_dashboard: bool = True
    ray_object_bytes: int = 0
    blobs_bytes: int = 50_000_000_000
    run_files_bytes: int = 10_000_000_000
    ray_address: str = ""
    ray_agent_idle_s: float = 60.0
    ray_cpus_per_gpu: float = 1.0
    ray_elastic: str = ""
    ray_node_listen: str = "tcp://0.0.0.0:0"
    ray_same_files: bool = False
    user_priorities: str = ""
    user_quotas: str = ""
    fair_half_life_s: float = 3600.0
    ray_select: str = "auto"

    @property
    def state_path(self) -> Path:
        if self.state_dir:
            return Path(self.state_dir)
        return user_state_path("sgpu-magic", appauthor=False) / host_name()

    @property
    def runs_path(self) -> Path:
        return self.state_path / "runs"

    @property
    def default_store_uri(self) -> str:
        """The MLflow store of runs whose notebook and settings name none."""
        return f"sqlite:///{self.state_path / 'mlflow' / 'mlflow.db'}"

    @property
    def environments_path(self) -> Path:
        return Path(self.environment_dir) if self.environment_dir else self.state_path / "environments"

    @property
    def runtime_path(self) -> Path:
        if self.runtime_dir:
            return Path(self.runtime_dir)
        base = os.environ.get("XDG_RUNTIME_DIR", "")
        if base and os.access(base, os.W_OK):
            return Path(base) / "sgpu"
        return Path(tempfile.gettempdir()) / f"sgpu-{os.getuid()}"

    @property
    def lock_path(self) -> Path:
        return Path(self.lock_dir) if self.lock_dir else Path(tempfile.gettempdir()) / "sgpu-device-locks"

    @property
    def cpu_slot_count(self) -> int:
        return self.cpu_slots or max(16, os.cpu_count() or 1)


def host_name() -> str:
    return socket.gethostname().split(".")[0] or "localhost"


def config_path(environ: Mapping[str, str] | None = None) -> Path:
    """Return the settings' file; keys and the list of pools lie beside it."""
    environ = os.environ if environ is None else environ
    return Path(environ.get("SGPU_CONFIG") or user_config_path("sgpu-magic", appauthor=False) / "config.toml")


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings.

    Args:
        environ: Variables to read `SGPU_*` from; the process's own when left out.

    Raises:
        UsageError: A file or variable has a name or value that means nothing.
    """
    environ = os.environ if environ is None else environ
    file = config_path(environ)
    known: dict[str, str] = Settings.__annotations__
    values: dict[str, object] = {}
    try:
        from_file = tomllib.loads(file.read_text()) if file.is_file() else {}
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"the settings file {file} can't be read: {error}. Mend it or move it away.") from error
    for name, value in from_file.items():
        if name not in known:
            raise UsageError(
                f"the settings file {file} has {name!r}, which is no setting. There are: {', '.join(known)}."
            )
        values[name] = _read(name, name, known[name], value, str(file))
    for name, kind in known.items():
        variable = f"SGPU_{name.upper()}"
        if environ.get(variable, "") != "":
            values[name] = _read(name, variable, kind, _unquoted(environ[variable]), "the environment")
    settings = Settings(**values)  # pyright: ignore[reportArgumentType]
    _check(settings)
    return settings


def pool_settings(settings: Settings) -> dict[str, str]:
    """Return by name the settings that a pool reads when it starts."""
    return {name: str(getattr(settings, name)) for name in POOL_SETTINGS}


def _read(setting: str, name: str, kind: str, value: object, where: str) -> object:
    """Read a setting that is given as `name` in `where`."""
    text = str(value)
    try:
        if setting in _PRICES:
            # as text, or in the file as a table
            text = prices_text(cast("dict[str, object]", value)) if isinstance(value, dict) else text
            read_prices(text)
            return text
        if setting in _WORDS and text and text not in _WORDS[setting]:
            raise ValueError(f"it can be {', '.join(_WORDS[setting])}")
        if setting == "track":
            # true and false, of earlier versions, are all and none
            word = text.lower()
            return word if word in ("auto", "all") else "all" if _TRUTHS[word] else "off"
        return _KINDS[kind](text)
    except (KeyError, ValueError) as error:
        why = f"is {value!r}; a value of type {kind} is needed"
        if setting in _PRICES:
            why = f"can't be read: {error}"
        elif setting == "track":
            why = f"is {value!r}; it can be auto, all or off"
        elif setting in _WORDS:
            why = f"is {value!r}; {error}"
        raise UsageError(f"{name} in {where} {why}.") from None


def _unquoted(value: str) -> str:
    """Take off the quotes that a shell would: `%env NAME="value"` keeps them."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value


def _check(settings: Settings) -> None:
    """Refuse amounts, priorities, quotas and times with which a pool would not start."""
    budget, days, half_life_s = settings.budget, settings.budget_days, settings.fair_half_life_s
    if not (math.isfinite(budget) and budget >= 0):
        raise UsageError(f"the setting budget is {budget:g}; an amount of 0 or more is needed, and 0 is no limit.")
    if not 0 < days <= _MAX_BUDGET_DAYS:
        raise UsageError(f"the setting budget_days is {days:g}; more than 0 and at most {_MAX_BUDGET_DAYS} are needed.")
    if not is_currency(settings.currency):
        currency = settings.currency[:40]
        raise UsageError(f"the setting currency is {currency!r}; a word or sign such as USD or € is needed.")
    for name, read in (("user_priorities", read_priorities), ("user_quotas", read_quotas)):
        try:
            read(getattr(settings, name))
        except ValueError as error:
            raise UsageError(f"the setting {name} can't be read: {error}.") from None
    if not (math.isfinite(half_life_s) and half_life_s > 0):
        raise UsageError(f"the setting fair_half_life_s is {half_life_s:g}; more than 0 seconds are needed.")


def private_dir(path: Path) -> Path:
    """Make `path` (and parents) and return it as a directory of mode 0700 that is ours.

    Raises:
        UsageError: It belongs to somebody else or is a link: nothing of ours may lie there.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UsageError(
            f"{path} is not a directory of yours, so nothing private can be kept there. "
            f"Remove it or set SGPU_RUNTIME_DIR and SGPU_STATE_DIR to directories that are {SET_IN_NOTEBOOK}."
        )
    if stat.S_IMODE(status.st_mode) != 0o700:
        path.chmod(0o700)
    return path


def is_linux() -> bool:
    return sys.platform == "linux"
