"""What signals a process handles itself, from /proc. Linux; elsewhere nothing is known."""

from __future__ import annotations

from pathlib import Path


def catches(pid: int, number: int) -> bool | None:
    """Whether the process has a handler for the signal; None where the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False if Path("/proc/self/status").exists() else None
    except OSError:
        return False
    for line in status.splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return None
