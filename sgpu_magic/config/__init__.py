"""Settings: defaults, then `config.toml`, then `SGPU_*` variables. They are frozen once read.

Also the locations of files: state on local disk, in a directory for each host because machines may share a home
directory, and sockets in a runtime directory with a short path.

pool_terms         a pool's terms: parsers of prices, priorities, quotas and simulated devices
submission_checks  why no pool accepts a submission
"""

from __future__ import annotations

import functools
import getpass
import hashlib
import math
import os
import shlex
import socket
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import msgspec
from platformdirs import user_config_path, user_state_path

from sgpu_magic.config.pool_terms import prices_text, read_prices, read_priorities, read_quotas, read_simulated
from sgpu_magic.errors import UsageError
from sgpu_magic.wire.costs import is_currency
from sgpu_magic.wire.decoding import decode_toml

# suffix of remedies that change a pool's directories: a kernel reads these settings when it loads the extension
SET_IN_NOTEBOOK = "(in a notebook with %env, then %reload_ext sgpu_magic)"
SEVEN_DAYS_S = 7 * 24 * 3600.0
_MAX_BUDGET_DAYS = 3660
# settings that may be tables in the file
_PRICES = ("prices", "reserved_prices")
_WORDS = {
    "stand_in": ("", "cpu", "cpu,cuda"),
    "environments": ("auto", "built"),
    "ray_select": ("auto", "label", "resource"),
    "track": ("auto", "all", "off"),
    "files": ("off", "auto"),
}
# a pool's resources and limits, read when it starts: a client with other values needs a pool started with those
POOL_SETTINGS = (
    "state_dir", "simulate", "cpu_slots", "prices", "reserved_prices", "currency", "budget", "budget_days",
    "environment_dir", "environment_limit",
)  # fmt: skip
_TRUTHS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
# parsers of values, including forms such as `yes`, `1_000` and `5e9`
_KINDS: Mapping[str, Callable[[str], object]] = {
    "bool": lambda text: _TRUTHS[text.lower()],
    "int": int,
    "float": float,
    "str": str,
}
# the longest name of a socket in a runtime directory; a socket's path has at most 107 bytes
_LONGEST_NAME = "/01234567/pool.sock"
_LONGEST_PATH = 107


class Settings(msgspec.Struct, frozen=True):
    """All settings: each is a name in `config.toml`, or `SGPU_<NAME>` in the environment, which takes precedence.

    Args:
        state_dir: Directory of runs, logs and the ledger; "" is the platform's state directory.
        runtime_dir: Directory of sockets; "" is one for each state directory in `$XDG_RUNTIME_DIR/sgpu` or
            `/tmp/sgpu-<uid>`. A pool is found by its state directory, which records where its sockets are.
        lock_dir: Directory of the device locks, the same for all pools that share GPUs and run in containers with
            networks of their own; "" uses names in the kernel, which all other processes of a machine share.
        pool: Pool for runs that name none; "" chooses a reserved pool of `pools.toml` that has the type, else an
            on-demand one, else `local`, this machine's own. In a pool service: its own name, "" is `local`.
        simulate: Simulated devices, such as `a10:4,h100:8`.
        stand_in: `cpu` runs on CPU when the pool lacks the type, or when torch can't use the GPUs of the ranks;
            `cpu,cuda` also maps `cuda` to the CPU on ranks without a GPU.
        cpu_slots: CPU ranks that can run at once; 0 is max(16, cores).
        standby: Keep a standby group: started ranks for another run of the last size.
        standby_idle_s: Idle seconds after which the standby group is dropped.
        zygote_idle_s: Idle seconds after which a zygote, the process that forks ranks, is closed.
        preload: What runs of a notebook import is executed ahead, so that their later runs import it in milliseconds:
            `auto` (what has taken long before), `off`, or names of modules, separated by commas.
        preload_bytes: Memory in bytes above which no further module is executed ahead.
        pool_idle_s: Seconds without runs after which the local pool exits.
        status_idle_s: Seconds for which `%sgpu_status` keeps updating after the last run has ended.
        grace_s: Seconds from SIGTERM to SIGKILL when a run is cancelled.
        finish_timeout_s: Seconds that ranks have after their cell, or at the end of a session, to finish what it has
            started, such as threads and exit functions. What takes longer is cut off, and the run says so.
        adopt_timeout_s: Seconds for which ranks outlive a killed pool service; `sgpu pool serve` uses 600 by default.
        stall_s: Seconds without progress after which a run's view reports where its ranks wait; 0 turns it off.
        idle_gpu_s: Seconds below 5 % utilization after which a run's view reports a GPU as idle; 0 turns it off.
        detach_on_restart: Runs continue when their kernel is restarted.
        keep_runs: Ended runs whose directories are kept, and as many cells of sessions beside them.
        keep_days: Days for which directories of ended runs are kept.
        keep_bytes: Maximum total size of the directories of ended runs in bytes.
        keep_payload: Largest payload (a run's variables) in bytes that is kept in the run's directory.
        keep_results: Largest results in bytes that a run's directory keeps after the notebook has received them.
        session_idle_s: Seconds without a cell after which a session ends; 0 never ends it.
        pass_over_s: Seconds for which later runs may pass a waiting run before freed devices are reserved for it.
        output_limit: Bytes of output that a cell shows, as HTML and as text together; the log has the rest.
        cache_dir: Directory of the node's data cache (`runtime.cache_dir()`); "" is the platform's cache directory.
        cache_bytes: Maximum size of the data cache in bytes.
        notify: Command line that is run once when a run ends that took at least `notify_after_s`, without a shell and
            for at most 10 s; "" runs none. It gets the run's facts as `SGPU_ENDED_ID`, `SGPU_ENDED_NAME`,
            `SGPU_ENDED_STATE`, `SGPU_ENDED_SECONDS`, `SGPU_ENDED_REASON`, `SGPU_ENDED_POOL` and `SGPU_ENDED_NOTEBOOK`.
        notify_after_s: Seconds from a run's submission to its end from which on `notify` is run.
        lone_training: Say so at a run's end when a rank of several has trained without the others.
        volumes_dir: Folder that holds `Volumes/...` and `dbfs/...` of notebooks that were written for Databricks.
        env_version: Packages for runs without `--env-version`, in the same form; "" is the notebook's own.
        files: `auto` takes small files along that a cell names to ranks which can't read the notebook's folder; `off`
            takes those of `--upload` only.
        environments: `auto` runs the kernel's own Python on nodes that see it and builds its packages on others;
            `built` always builds them.
        environment_dir: Directory of the environments that a node has built; "" is in the state directory.
        environments_bytes: Maximum total size of built environments in bytes; the least recently used are removed.
        environment_limit: Largest download in bytes for which an environment is built.
        variables: Environment variables sent to nodes on other machines, in addition to those sent by default:
            comma-separated names, or prefixes that end in `*`.
        code_warn_bytes: Size in bytes above which a run reports the local code that it sends to other machines.
        code_limit_bytes: Size in bytes above which local code is not sent, and the run is refused.
        lock_environments: Write `pylock.toml` for each environment of a run; otherwise only `requirements.txt`.
        index_url: Package index that uv uses by default; "" leaves the choice to uv's and pip's configuration.
        track: Runs that become MLflow runs: `auto` (those that last over 5 s, fail, are profiled, use MLflow or are
            asked for), `all` or `off`.
        tracking_uri: MLflow store for runs whose notebook names none; "" is SQLite in the state directory.
        keep_tracked: Keep MLflow runs of the default store when the runs' directories are removed. Otherwise only those
            are kept in which user code has logged something.
        prices: Price of one device per hour by type, `a10=1.20,h100=4.50`, or by pool and type, `team/h100=3.90`. In
            `config.toml` also a table.
        reserved_prices: Prices of reserved devices in the same form, for comparison.
        currency: Currency of all prices.
        budget: Maximum cost of the pool's runs within `budget_days`; 0 is no limit.
        budget_days: Length of the budget's sliding window in days.
        link_timeout_s: Seconds of silence after which a link between machines is given up. The pool then cancels the
            client's runs that are not detached.
        ssh_command: The ssh that logs in to machines of `sgpu pool add NAME ssh://HOST`, perhaps with options.
        listen: Address where a served pool listens for clients on other machines, such as `tcp://0.0.0.0:8700`; ""
            accepts none.
        bulk_port: A served pool's second port, for variables and files: 0 is `listen`'s + 1000, -1 opens none.
        ray_dashboard: Start Ray's dashboard in `@ray_launch` runs, which takes a gigabyte of memory and some seconds.
        ray_object_bytes: Size in bytes of a `@ray_launch` run's object store on a node, at most 30 % of the node's
            memory; 0 is the lease's share of those 30 %.
        blobs_bytes: Bytes that each user's uploads may take at a pool; the least recently used are removed first.
        run_files_bytes: Largest file in bytes that a node copies back to a pool on another machine after a run.
        ray_address: Ray cluster of a pool with `--engine ray`; "" is `RAY_ADDRESS`, else this machine's.
        ray_agent_idle_s: Seconds without a run after which a pool's agent leaves a Ray node.
        ray_cpus_per_gpu: CPUs requested from Ray with each GPU.
        ray_elastic: Maximum devices of each type that Ray's autoscaler can provide, `a10:16,h100:64,cpu:32`.
        ray_node_listen: Address where a Ray pool listens for its agents; port 0 is a free port, the same each time.
        ray_same_files: Ray nodes see the notebooks' files and run the same Pythons, so no environments are built there.
        user_priorities: Priorities of users who share a pool, `alice=10,*=0`; the highest gets devices first.
        user_quotas: Devices that a user may have at once, in total or by type, `alice=8,alice:h100=4,*=16`.
        fair_half_life_s: Seconds after which past use of devices counts half in the order between users.
        ray_select: How device types are requested from Ray: by `label` (`ray.io/accelerator-type`), by `resource`
            (`accelerator_type:X`, the only one in version 1 of the autoscaler), or `auto`, as the nodes have it.
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
    preload: str = "auto"
    preload_bytes: int = 4_000_000_000
    pool_idle_s: float = 3600.0
    status_idle_s: float = 60.0
    grace_s: float = 5.0
    finish_timeout_s: float = 300.0
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
    output_limit: int = 100_000
    cache_dir: str = ""
    cache_bytes: int = 50_000_000_000
    notify: str = ""
    notify_after_s: float = 60.0
    lone_training: bool = True
    volumes_dir: str = ""
    env_version: str = ""
    files: str = "off"
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
    ssh_command: str = "ssh"
    listen: str = ""
    bulk_port: int = 0
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
        """MLflow store of runs for which neither notebook nor settings name one."""
        return f"sqlite:///{self.state_path / 'mlflow' / 'mlflow.db'}"

    @property
    def environments_path(self) -> Path:
        return Path(self.environment_dir) if self.environment_dir else self.state_path / "environments"

    @property
    def runtime_path(self) -> Path:
        """Directory of the sockets of a pool that is started here."""
        return Path(self.runtime_dir) if self.runtime_dir else _runtime_of(self.state_path)

    @property
    def lock_path(self) -> Path | None:
        """Directory of the device locks; None where the kernel has names for them, which only Linux does."""
        if self.lock_dir:
            return Path(self.lock_dir)
        return None if sys.platform == "linux" else Path("/tmp/sgpu-device-locks")

    @property
    def cpu_slot_count(self) -> int:
        return self.cpu_slots or max(16, os.cpu_count() or 1)


def _runtime_of(state: Path) -> Path:
    """Return the directory of the sockets of a state directory's pool: the first place that this user can have.

    The state directory itself is the last one. It may be long, and on a file system without sockets.
    """
    key = hashlib.blake2b(os.fsencode(os.path.abspath(state)), digest_size=4).hexdigest()
    own = f"sgpu-{os.getuid()}"
    folders = [os.environ.get("XDG_RUNTIME_DIR", ""), os.environ.get("TMPDIR", ""), "/tmp"]
    bases = [Path(folder, own if at else "sgpu") for at, folder in enumerate(folders) if os.path.isabs(folder)]
    base = next((base for base in bases if _can_be_ours(base)), state)
    return base / key


def _can_be_ours(base: Path) -> bool:
    """Whether a directory for sockets belongs to this user alone, or can be made."""
    if len(os.fsencode(base)) + len(_LONGEST_NAME) > _LONGEST_PATH or not _is_text(base):
        return False
    try:
        found = os.lstat(base)
    except FileNotFoundError:
        return os.access(base.parent, os.W_OK | os.X_OK)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and os.access(base, os.W_OK | os.X_OK)


def _is_text(path: Path) -> bool:
    """Whether a path can be written into a text file. It may have bytes that are not UTF-8."""
    return str(path).encode("utf-8", "replace") == os.fsencode(path)


def host_name() -> str:
    return socket.gethostname().split(".")[0] or "localhost"


@functools.cache
def user_name() -> str:
    """Return the name of the user whose process this is; its number where it has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def config_path(environ: Mapping[str, str] | None = None) -> Path:
    """Return the path of the settings file; keys and the list of pools are in the same directory."""
    environ = os.environ if environ is None else environ
    return Path(environ.get("SGPU_CONFIG") or user_config_path("sgpu-magic", appauthor=False) / "config.toml")


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings.

    Args:
        environ: Variables to read `SGPU_*` from; by default the process's own.

    Raises:
        UsageError: The file can't be read or has an unknown setting, or a value is invalid.
    """
    environ = os.environ if environ is None else environ
    file = config_path(environ)
    try:
        content = _content(file)
    except OSError as error:
        raise _unreadable(file, error) from error
    # looking each setting up in `os.environ` takes three times as long
    return _parse(file, content, tuple((name, environ[name]) for name in environ if name.startswith("SGPU_")))


# a cell reads the settings several times
@functools.lru_cache(maxsize=4)
def _parse(file: Path, content: bytes, variables: tuple[tuple[str, str], ...]) -> Settings:
    known: dict[str, str] = Settings.__annotations__
    values: dict[str, object] = {}
    try:
        from_file = decode_toml(content)
    except msgspec.DecodeError as error:
        raise _unreadable(file, error) from error
    for name, value in from_file.items():
        if name not in known:
            raise UsageError(
                f"the settings file {file} has {name!r}, which is not a setting. The settings are: {', '.join(known)}."
            )
        values[name] = _read(name, name, known[name], value, str(file))
    given = dict(variables)
    for name, kind in known.items():
        variable = f"SGPU_{name.upper()}"
        if given.get(variable):
            _check_text(variable, given[variable])
            values[name] = _read(name, variable, kind, _unquoted(given[variable]), "the environment")
    settings = Settings(**values)  # pyright: ignore[reportArgumentType]
    _check(settings)
    return settings


def settings_in_file(file: Path) -> dict[str, object]:
    """Return what the settings file has, {} if there is none. TOML is UTF-8, whatever the locale's encoding is.

    Raises:
        OSError: It can't be read.
        msgspec.DecodeError: It is not TOML.
    """
    return decode_toml(_content(file))


def _content(file: Path) -> bytes:
    """Return what is in the settings file; b"" if there is no file."""
    try:
        if stat.S_ISREG(os.stat(file).st_mode):
            return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        pass
    return b""


def _unreadable(file: Path, error: Exception) -> UsageError:
    return UsageError(f"the settings file {file} can't be read: {error}. Fix it or move it away.")


def pool_settings(settings: Settings) -> dict[str, str]:
    """Return the settings that a pool reads when it starts, by name."""
    return {name: str(getattr(settings, name)) for name in POOL_SETTINGS}


def _read(setting: str, name: str, kind: str, value: object, where: str) -> object:
    """Parse the value of a setting, given as `name` in `where`."""
    text = str(value)
    try:
        if setting in _PRICES:
            # a text, or a table in the file
            text = prices_text(cast("dict[str, object]", value)) if isinstance(value, dict) else text
            read_prices(text)
            return text
        if setting == "preload" and isinstance(value, list):
            text = ",".join(map(str, cast("list[object]", value)))
        if setting in _WORDS and text not in _WORDS[setting]:
            *others, last = filter(None, _WORDS[setting])
            raise ValueError(f"it can be {', '.join(others)} or {last}")
        return _KINDS[kind](text)
    except (KeyError, ValueError) as error:
        why = f"is {value!r}; a value of type {kind} is needed"
        if setting in _PRICES:
            why = f"can't be read: {error}"
        elif setting in _WORDS:
            why = f"is {value!r}; {error}"
        raise UsageError(f"{name} in {where} {why}.") from None


def _check_text(variable: str, text: str) -> None:
    """Reject bytes that are not text: settings are written to files and messages."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(
            f"{variable} in the environment is {os.fsencode(text)!r}, which is not UTF-8. Set it to a text that "
            "is, such as the path of a link to that directory."
        ) from None


def _unquoted(value: str) -> str:
    """Strip the quotes that a shell would strip: `%env NAME="value"` keeps them."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value


def _check(settings: Settings) -> None:
    """Reject amounts, devices, priorities, quotas and times with which a pool would not start."""
    budget, days, half_life_s = settings.budget, settings.budget_days, settings.fair_half_life_s
    if not 0 <= budget < math.inf:
        raise UsageError(f"the setting budget is {budget:g}; an amount of 0 or more is needed, and 0 means no limit.")
    if not 0 < days <= _MAX_BUDGET_DAYS:
        raise UsageError(f"the setting budget_days is {days:g}; it must be more than 0 and at most {_MAX_BUDGET_DAYS}.")
    if not is_currency(settings.currency):
        raise UsageError(
            f"the setting currency is {settings.currency[:40]!r}; a word or sign such as USD or € is needed."
        )
    readers = {
        "simulate": read_simulated,
        "user_priorities": read_priorities,
        "user_quotas": read_quotas,
        "notify": shlex.split,
        "preload": read_preload,
    }
    for name, read in readers.items():
        try:
            read(getattr(settings, name))
        except ValueError as error:
            raise UsageError(f"the setting {name} can't be read: {error}.") from None
    if not (math.isfinite(half_life_s) and half_life_s > 0):
        raise UsageError(f"the setting fair_half_life_s is {half_life_s:g}; it must be more than 0 seconds.")


def read_preload(text: str) -> tuple[str, ...] | None:
    """Return the modules that the setting `preload` names; None for `auto`, none for `off`.

    Raises:
        ValueError: A name is not that of a module.
    """
    if text == "auto":
        return None
    names = () if text == "off" else tuple(filter(None, (name.strip() for name in text.split(","))))
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"{name[:80]!r} is neither the name of a module nor `auto` or `off`")
    return names


def with_directories_of(settings: Settings, kind: str, name: str) -> Settings:
    """Return settings whose directories for state and sockets are below the user's own.

    Args:
        settings: The user's settings.
        kind: The folder in the state directory: `pools` or `nodes`.
        name: The pool or node.
    """
    return msgspec.structs.replace(
        settings,
        state_dir=str(settings.state_path / kind / name),
        # by default each state directory has its own runtime directory
        runtime_dir=str(Path(settings.runtime_dir) / name) if settings.runtime_dir else "",
    )


def private_dir(path: Path) -> Path:
    """Create `path` and its parents, make it private (mode 0700), and return it.

    Raises:
        UsageError: It belongs to another user, or is a link.
    """
    # `parents=True` would give the parents the umask's mode, which may let others replace what is in them
    for parent in reversed(path.parents):
        if not parent.exists():
            parent.mkdir(mode=0o700, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UsageError(
            f"{path} is not a directory that you own, so private files can't be kept there. "
            f"Remove it, or set SGPU_RUNTIME_DIR and SGPU_STATE_DIR to directories that you own {SET_IN_NOTEBOOK}."
        )
    if stat.S_IMODE(status.st_mode) != 0o700:
        path.chmod(0o700)
    return path
