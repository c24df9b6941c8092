"""The options of `%%distributed` and `%%rank`, as data."""

from __future__ import annotations

import argparse
import functools
import re
from dataclasses import dataclass

from sgpu_magic.errors import UsageError
from sgpu_magic.magics.parsing import (
    Parser,
    add_devices,
    add_place,
    add_variables,
    add_wishes,
    names,
    read_devices,
    read_wishes,
)
from sgpu_magic.runs.option_values import key_values, optional_s, parse_ranks, timeout_s
from sgpu_magic.runs.package_options import max_cost_from
from sgpu_magic.runs.submit.cell_source import outputs_from
from sgpu_magic.runs.submit.spec import RunOptions

RAY = "%%ray_launch"
RETRY_CHOICES = ("failure", "any")
NO_SESSION = "none"
"""`--session none`: outside of every session."""

_OF_RANKS_THAT_STAY = ("--ranks", "--fresh", "--reload", "--session", "--profile")

_MAX_RETRIES = 100
_IN_CELL = "In the cell: rank, local_rank, world_size, device; the process group is initialised.\n"
_IN_DRIVER = "In the cell: RAY_ADDRESS is set; the cluster has the lease's GPUs.\n"
_VALUE = "The cell's value is a result: .values by rank, .lines, .logs(rank), .directory."
_FIRST_WORD = re.compile(r"\s*([\d,\s-]*\d)(?=\s|$)(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOptions(RunOptions):
    """What stands behind `%%distributed`.

    Args:
        session: `--session`; "" when left out.
        help: `-h`.
    """

    session: str = ""
    help: bool = False


@functools.cache
def parser(prog: str = "%%distributed") -> Parser:
    """The parser; its help is the magic's help."""
    if prog == "%%rank":
        made = Parser(
            prog,
            "Run the cell on some ranks of the connected session: %%rank 0, %%rank 0,2-3. The same as %%distributed "
            "--ranks, with its further options.",
            _IN_CELL + _VALUE,
        )
        made.add_argument("list", nargs="?", metavar="RANKS", help="the ranks: 0,2-3")
    elif prog == RAY:
        made = Parser(
            prog,
            "Run the cell as the driver of a Ray cluster that is made for it on N devices of a pool: ray.init() in the "
            "cell finds it, and it ends with the cell. Rank 0 runs the cell, with the notebook's variables; the other "
            "ranks hold their devices.",
            _IN_DRIVER + _VALUE,
        )
    else:
        made = Parser(
            prog,
            "Run the cell on N ranks of a pool, with the notebook's variables, and bring back what it prints, shows, "
            "returns and raises. While a session is connected (%sgpu_connect) it runs in the session's ranks, and what "
            "it leaves there stays.",
            _IN_CELL + _VALUE,
        )
    add = made.add_argument
    add_devices(made)
    add("--out", action="append", default=[], metavar="A,B:all", help="bring rank 0's A and every rank's B back")
    add("--in", dest="extra", action="append", default=[], metavar="NAMES", help="also ship names that only eval uses")
    add("--exclude", action="append", default=[], metavar="NAMES", help="names to leave in the notebook")
    add_variables(made)
    add("--timeout", metavar="90s|30m|2h", help="longest running time (default and most: 7d)")
    add("--wait", metavar="10m|0", help="longest time in the queue, 0: run now or fail (default: as long as it takes)")
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
    if prog == RAY:
        for option in _OF_RANKS_THAT_STAY:
            made.add_argument(option, nargs="?", const=True, help=argparse.SUPPRESS)
    else:
        _add_sessions(made)
    add_wishes(made)
    add("--name", default="", help="the run's name (default: the function or cell)")
    add_place(made)
    made.offer_help()
    return made


def parse(line: str, prog: str = "%%distributed") -> CellOptions:
    """Read the magic's line.

    Args:
        line: What stands behind it.
        prog: `%%distributed`, `%%rank` or `%%ray_launch`.

    Raises:
        UsageError: An option is unknown or its value means nothing.
    """
    values = parser(prog).read(_ranks_in_one_word(line) if prog == "%%rank" else line)
    if prog == RAY:
        _check_for_ray(values)
    if values.retry_on is not None and values.retries is None:
        raise UsageError("--retry-on says when to start again, but not how often: add --retries N.")
    listed = getattr(values, "list", None)
    if prog == "%%rank" and not values.help:
        if listed is None or values.ranks is not None:
            raise UsageError("%%rank takes the ranks as its first word, and no --ranks: %%rank 0, or %%rank 0,2-3.")
        if values.fresh:
            raise UsageError("%%rank runs in ranks that stay, and --fresh starts new ones. Leave one of them out.")
    if values.ranks is not None and values.fresh:
        raise UsageError("--ranks names ranks that stay, and --fresh starts new ones. Leave one of them out.")
    ranks = listed if listed is not None else values.ranks
    return CellOptions(
        devices=read_devices(values),
        outputs=outputs_from(values.out, "--out"),
        extra=names("--in", values.extra),
        exclude=names("--exclude", values.exclude),
        variables=key_values(values.env),
        timeout_s=timeout_s("--timeout", values.timeout),
        wait_s=optional_s("--wait", values.wait),
        name=values.name,
        pool=values.pool,
        ui=values.ui,
        grace_s=optional_s("--grace", values.grace),
        retries=values.retries or 0,
        retry_any=values.retry_on == "any",
        detach=values.detach,
        only=() if ranks is None else parse_ranks("%%rank" if listed is not None else "--ranks", ranks),
        fresh=values.fresh,
        reload=values.reload,
        session=values.session,
        wishes=read_wishes(values),
        profile=values.profile,
        max_cost=max_cost_from("--max-cost", values.max_cost),
        ray=prog == RAY,
        help=values.help,
    )


def _add_sessions(made: Parser) -> None:
    """Add what only ranks that execute the cell themselves can do."""
    add = made.add_argument
    add("--ranks", metavar="0,2-3", help="in a session: these ranks only (default: all)")
    add("--fresh", action="store_true", help="in a session: new processes on its devices, beside its ranks")
    add("--reload", action="store_true", help="in a session: load edited local modules anew first")
    add("--session", default="", metavar="NAME|none", help="the session (default: the one connected last)")
    add("--profile", action="store_true", help="keep a trace of torch's profiler from every rank")


def _check_for_ray(values: argparse.Namespace) -> None:
    """Say of what `%%ray_launch` does not take why it does not, and fill in what it means instead.

    Raises:
        UsageError: It was asked for.
    """
    for option in _OF_RANKS_THAT_STAY:
        if getattr(values, option.removeprefix("--")) is not None:
            raise UsageError(
                f"{RAY} has no {option}: its Ray cluster is started on new ranks, never in a session's, and only rank "
                f"0 runs the cell. Leave {option} out; the connected session stays as it is."
            )
    for output in outputs_from(values.out, "--out"):
        if output.all_ranks:
            raise UsageError(
                f"--out {output.name}:all brings every rank's value back, and with {RAY} only rank 0 runs the cell. "
                "Leave :all out; what Ray's tasks return comes with ray.get."
            )
    values.ranks, values.fresh, values.reload, values.session, values.profile = None, False, False, NO_SESSION, False


def _ranks_in_one_word(line: str) -> str:
    """People write `0, 2`: ranks are one word."""
    found = _FIRST_WORD.match(line)
    return re.sub(r"\s", "", found[1]) + found[2] if found is not None else line


def _retries(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > _MAX_RETRIES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of retries; 0 to {_MAX_RETRIES} is possible")
    return int(text)
