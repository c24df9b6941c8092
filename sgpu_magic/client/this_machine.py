"""Describes this process to pools and ranks, and finds and starts the local pool."""

from __future__ import annotations

import contextlib
import functools
import getpass
import hashlib
import os
import select
import site
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from sgpu_magic import __version__
from sgpu_magic.config import (
    SET_IN_NOTEBOOK,
    Settings,
    config_path,
    host_name,
    load_settings,
    pool_settings,
    private_dir,
)
from sgpu_magic.errors import PoolError
from sgpu_magic.files.run_directory import why_no_run
from sgpu_magic.files.whole_file import read_json
from sgpu_magic.packages.local_code import installed_entries
from sgpu_magic.system.processes import is_running, process_start
from sgpu_magic.wire import codec
from sgpu_magic.wire.client import Warm
from sgpu_magic.wire.pool_status import (
    MAX_SOCKET_PATH_BYTES,
    PROTOCOL_VERSION,
    Hello,
    PoolAddress,
    address_file,
    socket_file,
)
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
        # "" in sys.path means the current directory
        path = tuple(entry or cwd for entry in sys.path)
    except FileNotFoundError:
        # the directory was removed, and relative entries have no meaning
        cwd, path = "", tuple(filter(os.path.isabs, sys.path))
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


def own_key_path() -> Path:
    """Return the path of the user's key, beside the settings file."""
    return config_path().parent / "client.key"


@functools.cache
def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def this_umask() -> int:
    """Return the process's umask. Where `/proc` has it, reading it does not disturb other threads."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
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


# ---------------------------------------------------------------- the local pool

_START_TIMEOUT_S = 30.0
# for a pool to exit, or for the address of one that another client starts
_EXIT_S = 10.0


def find_pool(settings: Settings) -> PoolAddress | None:
    """Return the address of the running pool, or None. The files of a killed pool are ignored."""
    address = read_json(address_file(settings.runtime_path), PoolAddress)
    return address if address is not None and is_running(address.pid, address.process_start) else None


def start_pool(settings: Settings, warm: Warm | None = None) -> PoolAddress:
    """Start the local pool and return its address once it listens. Another client may start it at the same time.

    Args:
        settings: Settings, with the pool's directories.
        warm: The interpreter whose zygote is started with the pool.

    Raises:
        PoolError: The pool did not start; the message contains its last output.
    """
    try:
        _start(settings, warm)
    except OSError as error:
        raise PoolError(why_no_run(settings.runs_path, str(error))) from error
    deadline = time.monotonic() + _EXIT_S
    while time.monotonic() < deadline:
        if (address := find_pool(settings)) is not None:
            return address
        # another client's pool is about to write its address
        time.sleep(0.01)
    raise PoolError("the local pool ended right after its start; `sgpu doctor` looks for the reason.")


def _start(settings: Settings, warm: Warm | None) -> None:
    runtime = private_dir(settings.runtime_path)
    socket_path = socket_file(runtime)
    if len(os.fsencode(socket_path)) > MAX_SOCKET_PATH_BYTES:
        raise PoolError(
            f"the local pool can't be started: its socket's path {socket_path} is longer than the system's "
            f"{MAX_SOCKET_PATH_BYTES} bytes. Set SGPU_RUNTIME_DIR to a shorter directory {SET_IN_NOTEBOOK}."
        )
    log_path = private_dir(settings.state_path) / "pool.log"
    # a pool started by a rank must not be taken for a process of the rank's run
    environ = {name: value for name, value in os.environ.items() if name != "SGPU_RUN_ID"} | {"PYTHONSAFEPATH": "1"}
    with open(log_path, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sgpu_magic.pool"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environ,
            cwd="/",
            start_new_session=True,
        )
    if (answer := _first_line(process, codec.encode(warm) if warm else b"")) is None:
        raise PoolError(
            f"the local pool did not start within {_START_TIMEOUT_S:.0f} s. Its log is {log_path}; `sgpu doctor` "
            "looks for the reason."
        )
    if answer.strip() not in (b"ready", b"already running"):
        said = answer.decode(errors="replace").strip() or _last_line(log_path)
        raise PoolError(f"the local pool could not be started: {said} Its log is {log_path}.")


def wait_for_exit(pid: int) -> None:
    """Wait until the process has exited.

    Raises:
        PoolError: It did not exit within 10 s.
    """
    deadline = time.monotonic() + _EXIT_S
    started = process_start(pid)
    while time.monotonic() < deadline:
        if not is_running(pid, started):
            return
        time.sleep(0.01)
    raise PoolError(f"the local pool (process {pid}) did not end within {_EXIT_S:.0f} s; end it with `kill -9 {pid}`.")


def stated_settings() -> dict[str, str]:
    """Return the pool settings that are set explicitly, in an environment variable or in the settings file.

    Raises:
        UsageError: As `load_settings`.
    """
    file = config_path()
    settings = load_settings()
    in_file = tomllib.loads(file.read_text()) if file.is_file() else {}
    return {
        name: value
        for name, value in pool_settings(settings).items()
        if name in in_file or f"SGPU_{name.upper()}" in os.environ
    }


def _first_line(process: subprocess.Popen[bytes], order: bytes) -> bytes | None:
    """Write the order to the process and return the first line of its output, None on timeout.

    It does not read to the end: a descendant that inherits the pipe would keep it open.
    """
    stdin, stdout = process.stdin, process.stdout
    if stdin is None or stdout is None:
        raise ValueError("the pool is started with both pipes")
    # closing writes what is left, which fails as well if the process has ended
    with contextlib.suppress(BrokenPipeError), stdin:
        stdin.write(order)
        stdin.flush()
    answer = b""
    deadline = time.monotonic() + _START_TIMEOUT_S
    with stdout:
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                process.kill()
                process.wait()
                return None
            if not (chunk := os.read(stdout.fileno(), 4096)):
                break
            answer += chunk
    # this process has forked the pool and exits at once
    process.wait()
    return answer


def _last_line(path: Path) -> str:
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = path.read_text(errors="replace").strip().splitlines()
    return f"{lines[-1]}." if lines else "it printed nothing."
