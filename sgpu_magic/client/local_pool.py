"""Finds and starts the user's local pool, and waits for its exit."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import msgspec

from sgpu_magic.config import (
    SET_IN_NOTEBOOK,
    Settings,
    config_path,
    is_linux,
    load_settings,
    pool_settings,
    private_dir,
)
from sgpu_magic.errors import PoolError
from sgpu_magic.files.run_directory import why_no_run
from sgpu_magic.wire import codec
from sgpu_magic.wire.client import Warm
from sgpu_magic.wire.pool_status import MAX_SOCKET_PATH_BYTES, PoolAddress, address_file, process_start, socket_file

_START_TIMEOUT_S = 30.0
# for a pool to exit, or for the address of one that another client starts
_EXIT_S = 10.0


def find_pool(settings: Settings) -> PoolAddress | None:
    """Return the address of the running pool, or None. The files of a killed pool are ignored."""
    try:
        address = msgspec.json.decode(address_file(settings.runtime_path).read_bytes(), type=PoolAddress)
    except (OSError, msgspec.DecodeError):
        return None
    try:
        os.kill(address.pid, 0)
    except OSError:
        return None
    return address if process_start(address.pid) == address.process_start else None


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
        address = find_pool(settings)
        if address is not None:
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
    answer = _first_line(process, codec.encode(warm) if warm else b"")
    if answer is None:
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
        try:
            os.kill(pid, 0)
        except OSError:
            return
        if process_start(pid) != started or (is_linux() and not started):
            # a zombie, or another process with the same pid
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
    with stdin, contextlib.suppress(BrokenPipeError):
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
            chunk = os.read(stdout.fileno(), 4096)
            if not chunk:
                break
            answer += chunk
    # this process has forked the pool and exits at once
    process.wait()
    return answer


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").strip().splitlines()
    except OSError:
        return "it printed nothing."
    return f"{lines[-1]}." if lines else "it printed nothing."
