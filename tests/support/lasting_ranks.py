"""Cells whose ranks outlive SIGKILL, as those do whose driver still frees memory or that wait for a file system."""

from __future__ import annotations

from pathlib import Path

# PTRACE_SEIZE with PTRACE_O_TRACEEXIT: a killed process stops before it frees anything, until its tracer lets it go
_LASTING = """
import ctypes, os, time
if rank in {ranks} and os.fork() == 0:
    os.setsid()
    trace = ctypes.CDLL(None, use_errno=True).ptrace
    trace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if trace(0x4206, os.getppid(), None, 0x40) == 0:
        os.write(os.open({seized!r}, os.O_CREAT | os.O_WRONLY), b"x")
    while not os.path.exists({release!r}):
        time.sleep(0.02)
    os._exit(0)
while rank in {ranks} and not os.path.exists({seized!r}):
    time.sleep(0.02)
print('lasts', os.getpid(), flush=True)
"""


class Lasting:
    """Makes ranks that stay after SIGKILL until `release`. Linux only.

    Args:
        directory: The folder of the files with which the cell and the test synchronize.
    """

    def __init__(self, directory: Path) -> None:
        self._seized, self._release = directory / "seized", directory / "release"

    def code(self, ranks: tuple[int, ...], then: str = "") -> str:
        """Return a cell whose ranks with these numbers outlive SIGKILL; each prints `lasts` and its process id."""
        return _LASTING.format(ranks=ranks, seized=str(self._seized), release=str(self._release)) + then

    def release(self) -> None:
        """Let the killed ranks end."""
        self._release.touch()
