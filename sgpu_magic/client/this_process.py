"""Describes this process to the pool and the ranks: interpreter, context, owner; keys and current settings."""

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

# read at startup or import by Python, torch, numpy or the loader: other values need another zygote
_READ_AT_IMPORT = (
    "PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "TORCH", "PYTORCH_", "CUDA_HOME", "CUBLAS_",
    "NVIDIA_", "GLIBC_", "MALLOC_", "NUMEXPR_", "GLOO_", "NCCL_", "TRITON_", "DYLD_",
)  # fmt: skip
# needed by most programs; not part of the key
_ALWAYS = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "LC_", "TMPDIR", "TZ", "VIRTUAL_ENV", "CONDA_", "XDG_",
)  # fmt: skip
_umask_lock = threading.Lock()
_NOT_OURS = ("PYTHONSAFEPATH", "PYTHON_PS1")


def this_interpreter(environ: Mapping[str, str] | None = None) -> Interpreter:
    """Describe this process's interpreter. Takes a few `stat` calls.

    The key depends on the executable, the modification time of each site directory (which every `%pip install`
    changes) and the variables that are read at import.
    """
    environ = os.environ if environ is None else environ
    at_import = {name: value for name, value in environ.items() if _begins(name, _READ_AT_IMPORT)}
    digest = hashlib.blake2b(digest_size=16)
    for part in (sys.executable, sys.prefix, *_site_times(), *(f"{k}={v}" for k, v in sorted(at_import.items()))):
        digest.update(part.encode() + b"\0")
    needed = {name: value for name, value in environ.items() if _begins(name, _ALWAYS)}
    return Interpreter(executable=sys.executable, key=digest.hexdigest(), variables=needed | at_import)


def this_context(environ: Mapping[str, str], key: bytes) -> RankContext:
    """Describe this process's context for the ranks: working directory, `sys.path`, umask, and `environ`."""
    try:
        cwd = os.getcwd()
    except FileNotFoundError:
        cwd = ""
    # "" in sys.path means the current directory
    path = tuple(entry or cwd for entry in sys.path)
    settings = load_settings(environ)
    return RankContext(
        widgets=True,
        maps_cuda=settings.stand_in == "cpu,cuda",
        lone_training=settings.lone_training,
        cwd=cwd,
        sys_path=path,
        umask=this_umask(),
        environ=dict(environ),
        key=key,
        installed=installed_entries(path),
    )


def this_owner(notebook: str = "", kernel: str = "", cell: str = "") -> Owner:
    """Describe the owner of runs that this process submits.

    Args:
        notebook: Path of the notebook.
        kernel: The kernel's id.
        cell: The cell's id.
    """
    return Owner(pid=os.getpid(), host=host_name(), user=_user_name(), notebook=notebook, kernel=kernel, cell=cell)


def this_hello(instance: str = "") -> Hello:
    """Return the greeting of this process; `instance` is the same for every connection of one link."""
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
    """Return the process's umask. Where `/proc` has it, reading it does not disturb other threads."""
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


# ---------------------------------------------------------------- the user's key


def own_key_path() -> Path:
    """Return the path of the user's key, beside the settings file."""
    return config_path().parent / "client.key"


def own_keys(path: Path, pool: str) -> KeyPair:
    """Read the user's key pair.

    Args:
        path: The key file.
        pool: Name of the pool that the key is for, used in the error message.

    Raises:
        PoolError: There is no key.
        UsageError: The file can't be trusted.
    """
    try:
        return read_key_pair(path)
    except FileNotFoundError:
        raise PoolError(
            f"the pool {pool} admits listed keys only, and you have no key on this machine ({path}). Create one with "
            "`sgpu pool keygen` and send the public half, which it prints, to the pool's operator."
        ) from None


# ---------------------------------------------------------------- settings that follow %env


class CurrentSettings:
    """Settings whose per-run values follow the environment; the pool's directories do not change.

    `%env SGPU_TRACK=off` in a running kernel applies from the next run on. Thread-safe.

    Args:
        settings: The settings just read from the environment.
    """

    _OF_RUNS = ("env_version", "variables", "track", "tracking_uri", "code_warn_bytes", "code_limit_bytes")
    _VARIABLES = tuple(f"SGPU_{name.upper()}" for name in _OF_RUNS)

    def __init__(self, settings: Settings) -> None:
        self._read = (self._variables(), settings)

    def now(self) -> Settings:
        """Return the current settings. Takes microseconds while the variables are unchanged.

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
