"""Names of files in a run's directory that more than one program knows."""

from __future__ import annotations

PAYLOAD = "payload.bin"
KEY = "key"
EVENTS = "events.msgpack"
TRACKING = "tracking.json"
REQUIREMENTS = "requirements.txt"
WORK = "work"


def work_folders(node: int) -> tuple[str, ...]:
    """Where the working directory of a node's ranks is in a run's directory at its pool, the likelier first.

    Nodes of other machines have one each; those that see the pool's files have the same.

    Args:
        node: The node's number in the run, from 0.
    """
    return (f"node-{node}/{WORK}", WORK) if node else (WORK,)
