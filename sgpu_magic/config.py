"""Settings: defaults, then `config.toml`, then `SGPU_*` variables. Frozen once read.

Also where things lie: state on local disk, sockets in a short runtime directory, both keyed by host, because a
home directory may be shared by many machines.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from platformdirs import user_config_path, user_state_path

from sgpu_magic.errors import UsageError

SEVEN_DAYS_S = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings; each may stand in `config.toml` by its name or in the environment as `SGPU_<NAME>`.

    Args:
        state_dir: Run directories, logs and the ledger; "" is the platform's state directory.
        runtime_dir: Sockets; "" is `$XDG_RUNTIME_DIR/sgpu` or `/tmp/sgpu-<uid>`.
        lock_dir: Machine-wide directory of the device locks.
        pool: Default pool's name.
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
        keep_runs: Ended runs whose directories are kept.
        keep_days: Days for which they are kept.
        keep_bytes: Bytes that they may have together.
        keep_payload: Largest payload in bytes that is kept in the run's directory.
        keep_results: Bytes of a run's results that are kept there although its notebook has them.
        pass_over_s: Seconds a run may be passed over before freed devices are reserved for it.
        output_limit: Bytes of output that a cell shows; the rest is in the log.
    """

    state_dir: str = ""
    runtime_dir: str = ""
    lock_dir: str = ""
    pool: str = "local"
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
    pass_over_s: float = 600.0
    output_limit: int = 200_000

    @property
    def state_path(self) -> Path:
        if self.state_dir:
            return Path(self.state_dir)
        return user_state_path("sgpu-magic", appauthor=False) / host_name()

    @property
    def runs_path(self) -> Path:
        return self.state_path / "runs"

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


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings.

    Args:
        environ: Variables to read `SGPU_*` from; the process's own when left out.

    Raises:
        UsageError: A file or variable has a name or value that means nothing.
    """
    environ = os.environ if environ is None else environ
    file = Path(environ.get("SGPU_CONFIG") or user_config_path("sgpu-magic", appauthor=False) / "config.toml")
    known = {field.name: field.type for field in fields(Settings)}
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
        values[name] = _convert(name, str(known[name]), value, str(file))
    for name, kind in known.items():
        variable = f"SGPU_{name.upper()}"
        if environ.get(variable, "") != "":
            values[name] = _convert(variable, str(kind), environ[variable], "the environment")
    return Settings(**values)  # pyright: ignore[reportArgumentType]


def _convert(name: str, kind: str, value: object, where: str) -> object:
    try:
        match kind:
            case "bool":
                if isinstance(value, bool):
                    return value
                return {
                    "1": True,
                    "true": True,
                    "yes": True,
                    "on": True,
                    "0": False,
                    "false": False,
                    "no": False,
                    "off": False,
                }[str(value).lower()]
            case "int":
                return int(str(value))
            case "float":
                return float(str(value))
            case _:
                return str(value)
    except (KeyError, ValueError):
        raise UsageError(f"{name} in {where} is {value!r}; a value of type {kind} is needed.") from None


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
            "Remove it or set SGPU_RUNTIME_DIR and SGPU_STATE_DIR to directories that are."
        )
    if stat.S_IMODE(status.st_mode) != 0o700:
        path.chmod(0o700)
    return path


def is_linux() -> bool:
    return sys.platform == "linux"
