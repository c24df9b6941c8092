"""What a run asks for of devices beside their number and type: memory, nodes, and how it is spread over them."""

from __future__ import annotations

import re

from sgpu_magic.errors import UsageError

STRATEGIES = ("pack", "strict_pack", "spread")
"""How ranks are spread over nodes: on as few as can be, on one, over as many as can be."""

MOST_NODES = 4096
_PYTHONS = (
    ("--gpus N --type TYPE", "gpus=N, gpu_type=TYPE"),
    ("--gpus ", "gpus="),
    ("--gpus", "gpus"),
    ("--type ", "gpu_type="),
    ("--type", "gpu_type"),
    ("--min-memory ", "min_memory="),
    ("--min-memory", "min_memory"),
    ("--nodes ", "nodes="),
    ("--nodes", "nodes"),
    ("--placement ", "placement="),
    ("--placement", "placement"),
    ("--pool", "pool"),
)
_MEMORY = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>[kMGT]i?)?B?", re.IGNORECASE)
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}
# less is a number whose unit was forgotten
_LEAST_BYTES = 10**6
_MOST_BYTES = 10**15


def memory_bytes(option: str, value: str | float | None) -> int:
    """Return memory in bytes: `"40GB"` is 40,000,000,000, `"40GiB"` 2**30 times 40, a number is bytes; None is 0.

    Raises:
        UsageError: It is no memory; `option` is named in the message.
    """
    if value is None or value == "":
        return 0
    if isinstance(value, str):
        match = _MEMORY.fullmatch(value.strip())
        found = float(match["number"]) * _UNITS[(match["unit"] or "").lower()] if match is not None else -1.0
    else:
        found = float(value) if not isinstance(value, bool) else -1.0
    if not _LEAST_BYTES <= found <= _MOST_BYTES:
        raise UsageError(f"{option} {value!r} is no memory of a device: give a number and its unit, such as 40GB.")
    return int(found)


def node_count(option: str, value: object) -> int:
    """Check a number of nodes; None is 0, the pool's choice.

    Raises:
        UsageError: It is none.
    """
    if value is None:
        return 0
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_NODES:
        raise UsageError(f"{option} {value!r} is not a number of nodes; 1 to {MOST_NODES} is possible.")
    return value


def strategy_of(option: str, value: str | None) -> str:
    """Check how the ranks are spread; None is "", which is `pack` in the end.

    Raises:
        UsageError: There is no such way.
    """
    if value is None:
        return ""
    asked = value.lower().replace("-", "_")
    if asked not in STRATEGIES:
        raise UsageError(f"{option} {value!r} is not possible; there are: {', '.join(STRATEGIES)}.")
    return asked


def in_pythons_words(text: str) -> str:
    """Return what is said of the magics' options as it is said of Python's."""
    for option, word in _PYTHONS:
        text = text.replace(option, word)
    return text


def check_spread(ranks: int | None, nodes: int, strategy: str) -> None:
    """Check that ranks can be spread over nodes evenly.

    Args:
        ranks: None when left out.
        nodes: 0 when left out.
        strategy: One of `STRATEGIES`; "" when left out.

    Raises:
        UsageError: They can't.
    """
    if nodes > 1 and strategy == "strict_pack":
        raise UsageError(
            f"--nodes {nodes} spreads the ranks over {nodes} nodes, and --placement strict_pack keeps them on one. "
            "Leave one of them out."
        )
    if not nodes:
        return
    if ranks is None:
        raise UsageError(f"--nodes {nodes} needs the number of ranks too: add --gpus N, a multiple of {nodes}.")
    if ranks % nodes:
        near = max(1, round(ranks / nodes)) * nodes
        raise UsageError(
            f"{ranks} ranks can't be spread evenly over {nodes} nodes. Ask for a multiple of {nodes}, such as "
            f"--gpus {near}, or leave --nodes out."
        )
