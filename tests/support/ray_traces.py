"""Checks of what a run's own Ray cluster leaves behind on a machine."""

from __future__ import annotations

from pathlib import Path

from homes import Home
from process_table import listening
from waiting import eventually

_NAMES = ("/gcs_server", "/raylet", "worker.ray.node", "/ray/dashboard/", "/log_monitor.py", "/runtime_env/", "ray::")
_SHM = Path("/dev/shm")
_LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def ray_processes(home: Home, name: str = "") -> dict[int, str]:
    """Return pid and command of living Ray processes in this home.

    Args:
        home: The pool's home.
        name: Only processes with this in their command.
    """
    return {
        pid: process.command
        for pid, process in home.processes().items()
        if process.state != "Z" and any(known in process.command for known in _NAMES) and name in process.command
    }


def pid_of(home: Home, name: str) -> int:
    """Return the pid of the one process with this in the first word of its command."""
    return eventually(
        lambda: next(
            (pid for pid, command in ray_processes(home).items() if command.split()[0].endswith(name)),
            0,
        ),
        90,
        lambda: f"no {name} among {ray_processes(home)}",
    )


def open_to_others(home: Home) -> list[str]:
    """Return the sockets of Ray's processes that other machines can reach, as `address:port` in hexadecimal."""
    return [where for where in listening(ray_processes(home)).values() if not where.startswith(_LOOPBACK)]


def object_files() -> set[str]:
    """Return the names of Ray's object stores in shared memory."""
    return {entry.name for entry in _SHM.iterdir() if entry.name.startswith("plasma")}


def directories(home: Home) -> list[str]:
    """Return the directories of Ray clusters in the home."""
    found = [
        *home.runtime.glob("ray-*"),
        *(home.path / "tmp").glob("*ray*"),
        # only directories: a pool on Ray also keeps files there
        *(path for path in home.state.glob("ray/*") if path.is_dir()),
        *home.state.glob("nodes/*/ray/*"),
    ]
    return [str(path.relative_to(home.path)) for path in found]


def check_gone(home: Home, ports: dict[int, str] | None = None) -> None:
    """Wait until no process, directory or port of a Ray cluster is left on this machine.

    Args:
        home: The pool's home.
        ports: The sockets that listened during the run, by inode.
    """
    eventually(lambda: not ray_processes(home), 20, lambda: f"Ray's processes are left: {ray_processes(home)}")
    eventually(lambda: not directories(home), 10, lambda: f"directories are left: {directories(home)}")
    left = (ports or {}).keys() & listening().keys()
    assert not left, f"ports are still open: {[(ports or {})[inode] for inode in left]}"
