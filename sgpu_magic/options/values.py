"""Parsers of option values: durations, devices, names, variables, paths, amounts."""

from __future__ import annotations

import enum
import keyword
import math
import os
import re
from collections.abc import Iterable
from datetime import timedelta

from sgpu_magic.config import SEVEN_DAYS_S
from sgpu_magic.errors import UsageError
from sgpu_magic.wire.devices import canonical_type
from sgpu_magic.wire.option_text import OptionName, text_of
from sgpu_magic.wire.run import RANK_VARIABLES, OutputName

Upload = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""A folder or file, or several."""

Duration = float | str | timedelta
"""Seconds, a string such as `"30m"`, or a `datetime.timedelta`."""

TORCH_CHOICES = ("node", "mine")

# ---------------------------------------------------------------- durations

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)?")
_SECONDS = {None: 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
STRATEGIES = ("pack", "strict_pack", "spread")
"""How ranks are placed on nodes: on as few as possible, on exactly one, on as many as possible."""
MOST_RANKS = 4096
"""Largest number of ranks, and of nodes, of a run; also the smallest invalid rank."""
_MEMORY = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>[kMGT]i?)?B?", re.IGNORECASE)
_MEMORY_UNITS = {unit: 1000**power for power, unit in enumerate(("", *"kmgt"))} | {
    f"{unit}i": 1024**power for power, unit in enumerate("kmgt", 1)
}
# a smaller number probably lacks its unit
_LEAST_BYTES = 10**6
_MOST_BYTES = 10**15


def duration_s(option: str, value: Duration) -> float:
    """Parse a duration: `90s`, `30m`, `2h`, `1d`, `0`; a bare number is in seconds.

    Args:
        option: The option's name for error messages, such as `--timeout`.
        value: The text, number or `timedelta`.

    Raises:
        UsageError: It is not a duration.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
        if value < 0:
            raise UsageError(f"{option} is {value:g} s; it can't be negative.")
        return value
    found = _DURATION.fullmatch(str(value).strip().lower())
    if found is None:
        raise UsageError(f"{option} is {value!r}; write a number with its unit: 90s, 30m, 2h, 1d.")
    return float(found[1]) * _SECONDS[found[2]]


def timeout_s(option: str, value: Duration | None) -> float:
    """Parse a run's longest running time; 7 days if it is not given, which is also the maximum.

    Raises:
        UsageError: It is not a duration, or not between 0 and 7 days.
    """
    if value is None:
        return SEVEN_DAYS_S
    seconds = duration_s(option, value)
    if not 0 < seconds <= SEVEN_DAYS_S:
        raise UsageError(f"{option} {value} is not possible: it must be more than 0 s and at most 7 days (7d).")
    return seconds


# ---------------------------------------------------------------- devices


def memory_bytes(option: str, value: str | float | None) -> int:
    """Parse an amount of memory into bytes: `"40GB"` is 40,000,000,000, `"40GiB"` is 40 * 2**30; None is 0.

    Raises:
        UsageError: It is not an amount of memory; the message names `option`.
    """
    if value is None or value == "":
        return 0
    if isinstance(value, str):
        match = _MEMORY.fullmatch(value.strip())
        found = float(match["number"]) * _MEMORY_UNITS[(match["unit"] or "").lower()] if match is not None else -1.0
    else:
        found = float(value) if not isinstance(value, bool) else -1.0
    if not _LEAST_BYTES <= found <= _MOST_BYTES:
        raise UsageError(f"{option} {value!r} is not a memory size: give a number and its unit, such as 40GB.")
    return int(found)


def rank_count(option: str, value: object) -> int | None:
    """Check a number of ranks; None leaves it to the pool.

    Raises:
        UsageError: It is not a number from 1 to 4096.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_RANKS:
        raise UsageError(f"{option}={value!r} is not a number of ranks from 1 to {MOST_RANKS}.")
    return value


def device_type(option: str, value: object) -> str | None:
    """Return the canonical name of a device type; None leaves it to the pool.

    Args:
        option: The option's name for error messages.
        value: A string, or an enum member whose value is a string.

    Raises:
        UsageError: There is no such type.
    """
    if isinstance(value, enum.Enum):
        value = value.value
    try:
        return None if value is None else canonical_type(str(value))
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def node_count(option: str, value: object) -> int:
    """Check a number of nodes.

    Raises:
        UsageError: It is not a number from 1 to 4096.
    """
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_RANKS:
        raise UsageError(f"{option} {value!r} is not a number of nodes from 1 to {MOST_RANKS}.")
    return value


def strategy_of(option: str, value: str) -> str:
    """Check a placement strategy.

    Raises:
        UsageError: There is no such strategy.
    """
    asked = value.lower().replace("-", "_")
    if asked not in STRATEGIES:
        raise UsageError(f"{option} {value!r} is not possible; it can be {', '.join(STRATEGIES)}.")
    return asked


def check_spread(ranks: int | None, nodes: int, strategy: str) -> None:
    """Check that ranks can be spread over nodes evenly.

    Args:
        ranks: Number of ranks; None if not given.
        nodes: Number of nodes; 0 if not given.
        strategy: One of `STRATEGIES`; "" if not given.

    Raises:
        UsageError: The ranks can't be spread that way.
    """
    if nodes > 1 and strategy == "strict_pack":
        raise UsageError(
            text_of(
                OptionName("nodes", nodes),
                f" spreads the ranks over {nodes} nodes, and ",
                OptionName("placement", "strict_pack"),
                " keeps them on one. Leave one of them out.",
            )
        )
    if not nodes:
        return
    if ranks is None:
        raise UsageError(
            text_of(
                OptionName("nodes", nodes),
                " needs the number of ranks too: add ",
                OptionName("gpus", "N"),
                f", a multiple of {nodes}.",
            )
        )
    if ranks % nodes:
        near = max(1, round(ranks / nodes)) * nodes
        raise UsageError(
            text_of(
                f"{ranks} ranks can't be spread evenly over {nodes} nodes. Ask for a multiple of {nodes}, such as ",
                OptionName("gpus", near),
                ", or leave ",
                OptionName("nodes"),
                " out.",
            )
        )


# ---------------------------------------------------------------- names, variables, paths, amounts


def check_name(option: str, name: str) -> None:
    """Raise UsageError if `name` is not a variable's name; the message names `option`."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(f"{option} {name!r}: that is not a variable's name. Separate names with commas: {option} a,b")


def names(option: str, values: Iterable[str]) -> tuple[str, ...]:
    """Parse comma-separated names, without duplicates."""
    found = [name.strip() for value in values for name in value.split(",") if name.strip()]
    for name in found:
        check_name(option, name)
    return tuple(dict.fromkeys(found))


def outputs_from(names: str | Iterable[str], option: str = "") -> tuple[OutputName, ...]:
    """Parse names to bring back: `"a"`, `"a,b:all"` or `["a", "b:all"]`.

    Args:
        names: The names.
        option: The option's name for error messages; "" in a call from Python.

    Raises:
        UsageError: One of them is not a name.
    """
    found: dict[str, OutputName] = {}
    for value in [names] if isinstance(names, str) else names:
        for item in filter(None, map(str.strip, value.split(","))):
            name, colon, which = item.partition(":")
            check_name(option or "the name to bring back", name)
            if colon and which != "all":
                where = f"{option} {item}".strip()
                raise UsageError(f"{where}: only `all` can follow the colon, for a list of every rank's value.")
            found[name] = OutputName(name, bool(colon))
    return tuple(found.values())


def key_values(values: Iterable[str]) -> dict[str, str]:
    """Parse the `KEY=VALUE` of each `--env`.

    Raises:
        UsageError: One has no name.
    """
    found: dict[str, str] = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or not name:
            # the text may be a secret in place of the name, so the message does not repeat it
            raise UsageError("--env takes KEY=VALUE, with a name before the equals sign.")
        found[name] = text
    return found


def for_ranks(variables: dict[str, str]) -> dict[str, str]:
    """Return the variables if all of them take effect on ranks.

    Raises:
        UsageError: The pool sets one of them for each rank.
    """
    if own := sorted(variables.keys() & RANK_VARIABLES):
        raise UsageError(
            text_of(
                OptionName("env"),
                f" can't set {', '.join(own)}: the pool gives each rank its own. `",
                OptionName("gpus"),
                "` is the number of ranks, `",
                OptionName("type"),
                "` their devices. Code on a rank may still change what it finds in `os.environ`.",
            )
        )
    return variables


def paths(upload: Upload) -> tuple[str, ...]:
    """Return the paths to upload."""
    # a path object is one path, even if its class can be iterated
    several = (upload,) if isinstance(upload, str | os.PathLike) else upload
    return tuple(os.fspath(path) for path in several)


def is_torch_mine(value: str) -> bool:
    """Return whether the ranks get the notebook's torch (`mine`) instead of the node's (`node`).

    Raises:
        UsageError: It is neither.
    """
    if value not in TORCH_CHOICES:
        raise UsageError(
            f"torch={value!r} is not possible: `node` uses the torch of the machine that the ranks run on, `mine` "
            "installs the notebook's own there."
        )
    return value == "mine"


def cost_limit(option: str, value: str | float | None) -> float | None:
    """Parse a run's cost limit, in the currency of the settings; None if not given.

    Raises:
        UsageError: It is not an amount above 0.
    """
    if value is None:
        return None
    try:
        cost = float(value)
    except ValueError:
        cost = math.nan
    if isinstance(value, bool) or not 0 < cost < math.inf:
        raise UsageError(f"{option} is {value!r}; give an amount above 0 in the currency of the prices, such as 5.")
    return cost
