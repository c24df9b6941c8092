"""The kernel's process as a pool and its ranks see it: its Python, where it stands, whose it is, its settings now."""

from __future__ import annotations

import functools
import getpass
import hashlib
import os
import site
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec.structs import replace

from sgpu_magic import __version__
from sgpu_magic.config import Settings, config_path, host_name, load_settings
from sgpu_magic.errors import PoolError
from sgpu_magic.packages.local_code import installed_entries
from sgpu_magic.system.secure_sockets import KeyPair, read_key_pair
from sgpu_magic.wire.pool_status import PROTOCOL_VERSION, Hello
from sgpu_magic.wire.run import Interpreter, Owner, RankContext

# read at import by Python, torch, numpy or the loader: a zygote that had others would be another environment
_READ_AT_IMPORT = (
    "PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "TORCH", "PYTORCH_", "CUDA_HOME", "CUBLAS_",
    "NVIDIA_", "GLIBC_", "MALLOC_", "NUMEXPR_", "GLOO_", "NCCL_", "TRITON_", "DYLD_",
)  # fmt: skip
# what any program may need to start; not part of the key
_ALWAYS = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "LC_", "TMPDIR", "TZ", "VIRTUAL_ENV", "CONDA_", "XDG_",
)  # fmt: skip
_umask_lock = threading.Lock()
_NOT_OURS = ("PYTHONSAFEPATH", "PYTHON_PS1")


def this_interpreter(environ: Mapping[str, str] | None = None) -> Interpreter:
    """Describe this process's interpreter. Costs a few `stat` calls.

    The key changes with the executable, with each site directory's time of change (so with every `%pip install`)
    and with the variables that are read at import.
    """
    environ = os.environ if environ is None else environ
    at_import = {name: value for name, value in environ.items() if _begins(name, _READ_AT_IMPORT)}
    digest = hashlib.blake2b(digest_size=16)
    for part in (sys.executable, sys.prefix, *_site_times(), *(f"{k}={v}" for k, v in sorted(at_import.items()))):
        digest.update(part.encode() + b"\0")
    needed = {name: value for name, value in environ.items() if _begins(name, _ALWAYS)}
    return Interpreter(executable=sys.executable, key=digest.hexdigest(), variables=needed | at_import)


def this_context(environ: Mapping[str, str], key: bytes) -> RankContext:
    """Describe where this process stands: directory, path, umask, and `environ` for the ranks."""
    try:
        cwd = os.getcwd()
    except FileNotFoundError:
        cwd = ""
    # "" is the directory of the moment
    path = tuple(entry or cwd for entry in sys.path)
    return RankContext(
        widgets=True,
        cwd=cwd,
        sys_path=path,
        umask=this_umask(),
        environ=dict(environ),
        key=key,
        installed=installed_entries(path),
    )


def this_owner(notebook: str = "", kernel: str = "", cell: str = "") -> Owner:
    """Describe who submits a run from this process.

    Args:
        notebook: The notebook's file.
        kernel: The kernel's id.
        cell: The cell's id.
    """
    return Owner(pid=os.getpid(), host=host_name(), user=_user_name(), notebook=notebook, kernel=kernel, cell=cell)


def this_hello(instance: str = "") -> Hello:
    """Say who this process is; `instance` is the same in each connection that one link makes."""
    owner = this_owner()
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        package_version=__version__,
        pid=owner.pid,
        host=owner.host,
        user=owner.user,
        instance=instance,
    )


@functools.cache
def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def this_umask() -> int:
    """Return the process's umask. Reading it changes nothing for other threads where the system tells it."""
    try:
        with open("/proc/self/status", "rb") as status:
            for line in status:
                if line.startswith(b"Umask:"):
                    return int(line.split()[1], 8)
    except (OSError, ValueError):
        pass
    with _umask_lock:
        umask = os.umask(0o077)
        os.umask(umask)
        return umask


def _site_times() -> Iterable[str]:
    for directory in (*site.getsitepackages(), site.getusersitepackages()):
        try:
            yield f"{directory} {os.stat(directory).st_mtime_ns}"
        except OSError:
            yield f"{directory} -"


def _begins(name: str, prefixes: Iterable[str]) -> bool:
    return name not in _NOT_OURS and name.startswith(tuple(prefixes))


# ---------------------------------------------------------------- this user's own key


def own_key_path() -> Path:
    """Return where the key lies: beside the settings' file."""
    return config_path().parent / "client.key"


def own_keys(path: Path, pool: str) -> KeyPair:
    """Return this user's keys.

    Args:
        path: Where they lie.
        pool: The pool that they are for, for the error.

    Raises:
        PoolError: There are none.
        UsageError: Their file can't be trusted.
    """
    try:
        return read_key_pair(path)
    except FileNotFoundError:
        raise PoolError(
            f"the pool {pool} admits listed keys only, and you have no key on this machine ({path}). Make one with "
            "`sgpu pool keygen` and send the public half, which it prints, to who runs the pool."
        ) from None


# ---------------------------------------------------------------- settings that follow %env


class CurrentSettings:
    """Settings of which those that are read for each run follow the environment; where the pool lives stays.

    `%env SGPU_TRACK=off` in a running kernel counts from the next run on. May be asked by any thread.

    Args:
        settings: As they were read from the environment a moment ago.
    """

    _OF_RUNS = ("env_version", "variables", "track", "tracking_uri", "code_warn_bytes", "code_limit_bytes")
    _VARIABLES = tuple(f"SGPU_{name.upper()}" for name in _OF_RUNS)

    def __init__(self, settings: Settings) -> None:
        self._read = (self._variables(), settings)

    def now(self) -> Settings:
        """Return them; some microseconds as long as those variables are as they were.

        Raises:
            UsageError: As `load_settings`.
        """
        read, settings = self._read
        variables = self._variables()
        if variables != read:
            anew = load_settings()
            settings = replace(settings, **{name: getattr(anew, name) for name in self._OF_RUNS})
            self._read = (variables, settings)
        return settings

    def _variables(self) -> list[str | None]:
        return [os.environ.get(name) for name in self._VARIABLES]
