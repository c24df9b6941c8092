"""Describes this process to pools and ranks, and finds and starts the local pool."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import site
import subprocess
import sys
import threading
import time
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
    settings_in_file,
    user_name,
)
from sgpu_magic.errors import PoolError
from sgpu_magic.files.atomic_file import read_json
from sgpu_magic.files.locks import is_locked
from sgpu_magic.files.run_directory import why_no_run
from sgpu_magic.packages.local_code import installed_entries
from sgpu_magic.system.process_settings.notebook_settings import read_settings
from sgpu_magic.system.processes import (
    Peer,
    boot_id,
    flock_holder,
    is_running,
    listener_of,
    pid_namespace,
    process_start,
)
from sgpu_magic.wire import codec
from sgpu_magic.wire.client import Warm
from sgpu_magic.wire.pool_status import (
    MAX_SOCKET_PATH_BYTES,
    PROTOCOL_VERSION,
    Hello,
    PoolAddress,
    address_file,
    agent_socket_file,
    lock_file,
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
# variables by which a launcher assigns a process its rank; a rank would mistake them for its own
_OF_LAUNCHERS = (
    "PMI_", "PMI2_", "PMIX_", "PRTE_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_SIZE", "OMPI_APP_CTX_", "OMPI_MCA_orte_",
    "OMPI_MCA_ess", "OMPI_MCA_pmix", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_", "HYDI_", "PALS_RANKID",
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASK", "SLURM_STEP",
    "SLURM_GTIDS", "SLURM_SRUN_COMM_", "SLURM_LAUNCH_NODE_", "SLURM_PMI",
)  # fmt: skip
_umask_lock = threading.Lock()
_NOT_OURS = ("PYTHONSAFEPATH", "PYTHON_PS1")
_START_TIMEOUT_S = 30.0
# time limit for a pool to exit, or for the address of a pool that another client starts
_EXIT_S = 10.0
# a pool that is starting writes its address within this time
_STARTING_S = 3.0
_PAUSE_S = 0.01
# a pool recreates a removed directory at its next check
_RESTORED_S = 3.0


def this_interpreter(environ: Mapping[str, str] | None = None) -> Interpreter:
    """Describe this process's interpreter. Takes a few `stat` calls.

    The key depends on the executable, the modification time of each site directory (which every `%pip install`
    changes) and the variables that are read at import.
    """
    environ = os.environ if environ is None else environ
    at_import = {name: value for name, value in environ.items() if _begins(name, _READ_AT_IMPORT)}
    digest = hashlib.blake2b(digest_size=16)
    for part in (sys.executable, sys.prefix, *_site_times(), *(f"{k}={v}" for k, v in sorted(at_import.items()))):
        digest.update(os.fsencode(part) + b"\0")
    needed = {name: value for name, value in environ.items() if _begins(name, _ALWAYS)}
    return Interpreter(executable=sys.executable, key=digest.hexdigest(), variables=needed | at_import)


def this_context(environ: Mapping[str, str], key: bytes) -> RankContext:
    """Describe this process's context for the ranks: directory, `sys.path`, umask, settings, and `environ`."""
    try:
        cwd = os.getcwd()
        # "" in sys.path means the current directory
        path = tuple(entry or cwd for entry in sys.path)
    except FileNotFoundError:
        # the directory was removed, and relative entries have no meaning
        cwd, path = "", tuple(filter(os.path.isabs, sys.path))
    # the variables of settings don't travel to another machine
    settings = load_settings({**os.environ, **environ})
    return RankContext(
        maps_cuda=settings.stand_in == "cpu,cuda",
        cpu_stands_in=bool(settings.stand_in),
        lone_training=settings.lone_training,
        cwd=cwd,
        sys_path=path,
        umask=this_umask(),
        environ={name: value for name, value in environ.items() if not _is_of_launcher(name, value)},
        key=key,
        installed=installed_entries(path),
        settings=read_settings(),
    )


def _is_of_launcher(name: str, value: str) -> bool:
    """Whether this process has the variable from the launcher that started it; one of `--env` has another value."""
    return name.startswith(_OF_LAUNCHERS) and os.environ.get(name) == value


def this_owner(notebook: str = "", kernel: str = "", cell: str = "") -> Owner:
    """Describe the owner of runs that this process submits.

    Args:
        notebook: Path of the notebook.
        kernel: The kernel's id.
        cell: The cell's id.
    """
    return Owner(
        pid=os.getpid(),
        host=host_name(),
        user=user_name(),
        notebook=notebook,
        kernel=kernel,
        cell=cell,
        namespace=pid_namespace(),
    )


def this_hello(instance: str = "", *, same_files: bool = False) -> Hello:
    """Return the greeting of this process; arguments as in `Hello`."""
    owner = this_owner()
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        package_version=__version__,
        pid=owner.pid,
        host=owner.host,
        user=owner.user,
        instance=instance,
        same_files=same_files,
    )


def own_key_path() -> Path:
    """Return the path of the user's key, beside the settings file."""
    return config_path().parent / "client.key"


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


def find_pool(settings: Settings) -> PoolAddress | None:
    """Return the address of the running pool of the state directory, or None. What a killed pool left is ignored.

    A pool runs while it holds its lock, wherever its process is and whether or not it can be seen from here.
    """
    for directory in _directories(settings):
        if is_locked(lock_file(directory)) and (address := read_json(address_file(directory), PoolAddress)) is not None:
            return address
    return None


def _directories(settings: Settings) -> tuple[Path, Path]:
    """Return where a pool's lock and address may be: the state directory, or the runtime directory in its place."""
    return settings.state_path, settings.runtime_path


def agent_path(settings: Settings) -> Path:
    """Return where the agent of the state directory's pool listens, also when the pool was killed."""
    left = read_json(address_file(settings.state_path), PoolAddress)
    return agent_socket_file(Path(left.runtime) if left is not None and left.runtime else settings.runtime_path)


def left_by_pool(settings: Settings) -> tuple[Path, Path]:
    """Return the files that a pool leaves when it is killed: its address, and its socket."""
    left = read_json(address_file(settings.state_path), PoolAddress)
    runtime = Path(left.runtime) if left is not None and left.runtime else settings.runtime_path
    return address_file(settings.state_path), socket_file(runtime)


def listener_at(settings: Settings, address: PoolAddress) -> Peer | None:
    """Return the process of a running pool as this process sees it; None if the system does not report it.

    Its pid is 0 where it can't be seen, in another PID namespace.

    Raises:
        PoolError: Its socket can't be reached from here; the message says what differs.
    """
    path = socket_file(Path(address.runtime) if address.runtime else settings.runtime_path)
    began = time.monotonic()
    while True:
        try:
            return listener_of(path)
        except OSError as error:
            problem = error
        if address.boot and (boot := boot_id()) and boot != address.boot:
            raise _unreachable(settings, address, f"it runs on the machine {address.host}, and this is {host_name()}")
        waited_s = time.monotonic() - began
        if waited_s > _RESTORED_S and not os.path.isdir(path.parent):
            why = f"its sockets are in {path.parent}, which is not there for this process"
            raise _unreachable(settings, address, f"{why} (in another container, or with another {_top_of(path)})")
        # the pool may be ending, or replacing its socket
        if find_pool(settings) != address:
            return None
        if waited_s > _EXIT_S:
            raise _unreachable(settings, address, f"its socket {path} can't be used: {problem.strerror or problem}")
        time.sleep(_PAUSE_S)


def _top_of(path: Path) -> str:
    return "/".join(path.parts[:2]).replace("//", "/")


def _unreachable(settings: Settings, address: PoolAddress, why: str) -> PoolError:
    return PoolError(
        f"the pool of the state directory {settings.state_path} is running (process {address.pid} on {address.host}) "
        f"and can't be reached from here: {why}. Use it, or stop it with `sgpu pool stop`, where it was started; or "
        f"set SGPU_STATE_DIR to another directory, which has a pool of its own {SET_IN_NOTEBOOK}."
    )


def agent_pid(path: Path) -> int:
    """Return the pid of the agent that listens at a path, even if it hangs; 0 if there is none, or it can't be seen."""
    try:
        peer = listener_of(path)
    except OSError:
        return 0
    return 0 if peer is None else peer.pid


def start_pool(settings: Settings, warm: Warm | None = None) -> tuple[PoolAddress, bool]:
    """Start the local pool, or wait for one that another client is starting.

    Returns the pool's address once it listens, and whether it was started here.

    Args:
        settings: Settings, with the pool's directories.
        warm: The interpreter whose zygote is started with the pool.

    Raises:
        PoolError: The pool did not start; the message contains its last output.
    """
    deadline = time.monotonic() + _EXIT_S
    while True:
        try:
            is_own = _start(settings, warm)
        except OSError as error:
            raise PoolError(why_no_run(settings.runs_path, str(error))) from error
        if (address := _wait_for_address(settings, deadline, is_own)) is not None:
            return address, is_own
        if is_own or time.monotonic() > deadline:
            break
        # the other client's pool was ending: try again
    _raise_for_lock_holder(settings)
    raise PoolError("the local pool ended right after its start; `sgpu doctor` looks for the reason.")


def _wait_for_address(settings: Settings, deadline: float, is_own: bool) -> PoolAddress | None:
    """Return the pool's address once it is written; None on timeout, or if another client's pool has ended."""
    while time.monotonic() < deadline:
        if (address := find_pool(settings)) is not None:
            return address
        if not is_own and not has_pool(settings):
            return None
        # another client's pool is about to write its address
        time.sleep(_PAUSE_S)
    return None


def running_pool(settings: Settings) -> PoolAddress | None:
    """Return the address of the local pool, also of one that is starting; None if there is none.

    Raises:
        PoolError: A process holds the lock of the state directory, but publishes no address.
    """
    if (address := _wait_for_address(settings, time.monotonic() + _STARTING_S, is_own=False)) is not None:
        return address
    if has_pool(settings):
        _raise_for_lock_holder(settings)
    return None


def _raise_for_lock_holder(settings: Settings) -> None:
    """Raise a `PoolError` that names the process holding the lock of the state directory; return if none is found."""
    holder = flock_holder(lock_file(settings.state_path))
    if not holder:
        return
    raise PoolError(
        f"process {holder} holds the lock of the state directory {settings.state_path}, and no pool answers there. "
        f"It may be ending; if it stays, it hangs or is of another version: end it with `kill {holder}`."
    )


def has_pool(settings: Settings) -> bool:
    """Whether a pool runs on this state directory, also one that can't be reached: its lock is held."""
    return any(is_locked(lock_file(directory)) for directory in _directories(settings))


def _start(settings: Settings, warm: Warm | None) -> bool:
    """Start a pool; returns False if another is already running, or is about to be."""
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
    now = load_settings(environ)
    if (now.state_path, now.runtime_path) != (settings.state_path, settings.runtime_path):
        # the variables have changed since this client was created, but it looks for the pool in its own directories
        environ |= {"SGPU_STATE_DIR": str(settings.state_path), "SGPU_RUNTIME_DIR": str(settings.runtime_path)}
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
        text = answer.decode(errors="replace").strip() or _last_line(log_path)
        raise PoolError(f"the local pool could not be started: {text} Its log is {log_path}.")
    return answer.strip() == b"ready"


def wait_for_exit(settings: Settings, pid: int, timeout_s: float = _EXIT_S) -> None:
    """Wait until the pool has given its lock back and its process has exited.

    Args:
        settings: Settings, with the pool's directories.
        pid: Its process ID here; 0 if it can't be seen.
        timeout_s: How long to wait, in seconds.

    Raises:
        PoolError: It did not exit in time.
    """
    deadline = time.monotonic() + timeout_s
    started = process_start(pid) if pid else 0
    while time.monotonic() < deadline:
        if not has_pool(settings) and not (pid and is_running(pid, started)):
            return
        time.sleep(_PAUSE_S)
    if not pid:
        raise PoolError(
            f"the local pool did not end within {timeout_s:.0f} s, and its process can't be seen from here, since it "
            "is in another PID namespace. End it where it was started: `sgpu pool stop --force`."
        )
    raise PoolError(
        f"the local pool (process {pid}) did not end within {timeout_s:.0f} s; end it with `kill -9 {pid}`."
    )


def stated_settings() -> dict[str, str]:
    """Return the pool settings that are set explicitly, in an environment variable or in the settings file.

    Raises:
        UsageError: As `load_settings`.
    """
    settings = load_settings()
    in_file = settings_in_file(config_path())
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
    # closing flushes the buffer, which also fails if the process has ended
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
