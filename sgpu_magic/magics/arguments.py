"""The options of `%%distributed`, as data."""

from __future__ import annotations

import argparse
import keyword
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from sgpu_magic.config import SEVEN_DAYS_S
from sgpu_magic.errors import UsageError
from sgpu_magic.protocol.device_types import canonical_type
from sgpu_magic.protocol.records import OutputName

UI_CHOICES = ("auto", "widget", "text", "none")
RETRY_CHOICES = ("failure", "any")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)?")
_UNITS = {None: 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_RUN = re.compile(r"[0-9a-f]{1,8}")
_MAX_RANKS = 4096
_MAX_RETRIES = 100


@dataclass(frozen=True, slots=True)
class CellOptions:
    """What stands behind `%%distributed`.

    Args:
        ranks: `--gpus`; None when left out.
        device_type: `--type`, canonical; None when left out.
        outputs: `--out`.
        extra: `--in`.
        exclude: `--exclude`.
        variables: `--env`.
        timeout_s: `--timeout` in seconds.
        wait_s: `--wait` in seconds; None queues for as long as it takes.
        name: `--name`.
        pool: `--pool`.
        ui: `--ui`.
        allow_busy: `--allow-busy`.
        grace_s: `--grace` in seconds; None is the pool's default.
        retries: `--retries`.
        retry_any: `--retry-on any`.
        detach: `--detach`.
        help: `-h`.
    """

    ranks: int | None
    device_type: str | None
    outputs: tuple[OutputName, ...]
    extra: tuple[str, ...]
    exclude: tuple[str, ...]
    variables: dict[str, str]
    timeout_s: float
    wait_s: float | None
    name: str
    pool: str
    ui: str
    allow_busy: bool
    grace_s: float | None
    retries: int
    retry_any: bool
    detach: bool
    help: bool


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What stands behind `%sgpu_attach` and its like.

    Args:
        run: The first digits of a run's id, "" when left out.
        ui: `--ui`.
    """

    run: str
    ui: str


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        remedy = f" `{self.prog} -h` shows the options." if self.prog.startswith("%%") else ""
        raise UsageError(f"{self.prog}: {message}.{remedy}")


def parser() -> argparse.ArgumentParser:
    """The parser; its help is the magic's help."""
    made = _Parser(
        prog="%%distributed",
        description="Run the cell on N ranks of a pool, with the notebook's variables, and bring back what it "
        "prints, shows, returns and raises.",
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="In the cell: rank, local_rank, world_size, device; the process group is initialised.\n"
        "The cell's value is a result: .values by rank, .lines, .logs(rank), .directory.",
    )
    add = made.add_argument
    add("-n", "--gpus", type=_ranks, metavar="N", help="ranks, one per GPU (default: 2 on CPU, else all GPUs)")
    add("--type", metavar="TYPE", help="a10, a100, h100, ..., cpu, any (default: what the pool has)")
    add(
        "--out",
        action="append",
        default=[],
        metavar="A,B:all",
        help="bring rank 0's A and every rank's B back",
    )
    add(
        "--in",
        dest="extra",
        action="append",
        default=[],
        metavar="NAMES",
        help="also ship names that only eval uses",
    )
    add("--exclude", action="append", default=[], metavar="NAMES", help="names to leave in the notebook")
    add(
        "--env",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set a variable on the ranks (repeatable)",
    )
    add("--timeout", metavar="90s|30m|2h", help="longest running time (default and most: 7d)")
    add(
        "--wait",
        metavar="10m|0",
        help="longest time in the queue, 0: run now or fail (default: as long as it takes)",
    )
    add(
        "--grace", metavar="60s", help="time between TERM and KILL when it is stopped (default: 5s; 0s after a failure)"
    )
    add(
        "--retries",
        type=_retries,
        metavar="N",
        help="start the ranks again up to N times when a worker or node fails (default: 0)",
    )
    add("--retry-on", choices=RETRY_CHOICES, help="any: also after an error of the cell itself (default: failure)")
    add("--detach", action="store_true", help="return at once; the run goes on without this notebook")
    add("--name", default="", help="the run's name (default: the function or cell)")
    add("--pool", default="", help="the pool (default: local)")
    add("--ui", choices=UI_CHOICES, default="auto", help="how to show it (default: auto)")
    add("--allow-busy", action="store_true", help="also take GPUs that other programs use")
    add("-h", "--help", action="store_true", help="show this")
    return made


def parse(line: str) -> CellOptions:
    """Read the magic's line.

    Raises:
        UsageError: An option is unknown or its value means nothing.
    """
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise UsageError(f"%%distributed: the line can't be read: {error}. Close the quotes.") from None
    values = parser().parse_args(words)
    device_type = None
    if values.type is not None:
        try:
            device_type = canonical_type(values.type)
        except ValueError as error:
            raise UsageError(f"--type: {error}") from None
    if values.retry_on is not None and values.retries is None:
        raise UsageError("--retry-on says when to start again, but not how often: add --retries N.")
    return CellOptions(
        ranks=values.gpus,
        device_type=device_type,
        outputs=_outputs(values.out),
        extra=_names("--in", values.extra),
        exclude=_names("--exclude", values.exclude),
        variables=_variables(values.env),
        timeout_s=_timeout(values.timeout),
        wait_s=None if values.wait is None else duration_s("--wait", values.wait),
        name=values.name,
        pool=values.pool,
        ui=values.ui,
        allow_busy=values.allow_busy,
        grace_s=None if values.grace is None else duration_s("--grace", values.grace),
        retries=values.retries or 0,
        retry_any=values.retry_on == "any",
        detach=values.detach,
        help=values.help,
    )


def parse_run(magic: str, line: str, *, ui: bool = False) -> RunOptions:
    """Read the line of a magic that takes a run.

    Args:
        magic: Its name, such as `%sgpu_attach`.
        line: What stands behind it.
        ui: It also takes `--ui`.

    Raises:
        UsageError: It is no run's id, or there is more than one.
    """
    reader = _Parser(prog=magic, add_help=False, allow_abbrev=False)
    reader.add_argument("run", nargs="?", default="", metavar="RUN")
    if ui:
        reader.add_argument("--ui", choices=UI_CHOICES, default="auto")
    values = reader.parse_args(line.split())
    run = values.run.lower()
    if run and _RUN.fullmatch(run) is None:
        raise UsageError(
            f"{magic}: {values.run[:40]!r} is no run: give the first digits of its id (0-9, a-f), as %sgpu_status "
            "lists them."
        )
    return RunOptions(run, values.ui if ui else "auto")


def duration_s(option: str, text: str) -> float:
    """Read `90s`, `30m`, `2h`, `1d`, `0`; a bare number is seconds.

    Raises:
        UsageError: It is none of these.
    """
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None:
        raise UsageError(f"{option} is {text!r}; write a number with its unit: 90s, 30m, 2h, 1d.")
    return float(found[1]) * _UNITS[found[2]]


def _timeout(text: str | None) -> float:
    if text is None:
        return SEVEN_DAYS_S
    seconds = duration_s("--timeout", text)
    if not 0 < seconds <= SEVEN_DAYS_S:
        raise UsageError(f"--timeout {text} is not possible: a run may take more than 0 s and at most 7 days (7d).")
    return seconds


def _ranks(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= _MAX_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks; 1 to {_MAX_RANKS} is possible")
    return int(text)


def _retries(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > _MAX_RETRIES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of retries; 0 to {_MAX_RETRIES} is possible")
    return int(text)


def _names(option: str, values: Sequence[str]) -> tuple[str, ...]:
    names = [name.strip() for value in values for name in value.split(",") if name.strip()]
    for name in names:
        _check_name(option, name)
    return tuple(dict.fromkeys(names))


def _outputs(values: Sequence[str]) -> tuple[OutputName, ...]:
    found: dict[str, OutputName] = {}
    for item in (part.strip() for value in values for part in value.split(",")):
        if not item:
            continue
        name, colon, which = item.partition(":")
        _check_name("--out", name)
        if colon and which != "all":
            raise UsageError(f"--out {item}: after the colon only `all` is possible, for a list of every rank's value.")
        found[name] = OutputName(name, bool(colon))
    return tuple(found.values())


def _check_name(option: str, name: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(
            f"{option} {name!r}: that is not a variable's name. Write names with commas between: {option} a,b"
        )


def _variables(values: Sequence[str]) -> dict[str, str]:
    variables: dict[str, str] = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or not name:
            # the value may be a secret that was put in the name's place: it is not repeated
            raise UsageError("--env takes KEY=VALUE, with a name before the sign.")
        variables[name] = text
    return variables
