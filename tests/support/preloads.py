"""Waits until a pool has executed imports ahead."""

from __future__ import annotations

import json

from homes import Home
from waiting import eventually


def wait_for_preload(home: Home, *packages: str, before: int = 0, timeout_s: float = 60) -> int:
    """Wait until one zygote has executed imports of all these packages, and return its process id.

    Args:
        home: The pool's home.
        packages: Their top-level names.
        before: A zygote that does not count.
        timeout_s: Seconds to wait.
    """
    report = home.state / "preload.json"

    def zygotes() -> list[int]:
        rows = json.loads(report.read_text()) if report.exists() else []
        tops = {row["pid"]: {root.partition(".")[0] for root in row["roots"]} for row in rows}
        return [pid for pid, found in tops.items() if found.issuperset(packages) and pid != before]

    return eventually(zygotes, timeout_s, "the imports were executed ahead")[0]
