"""Options on command lines: of magics, whose errors are `UsageError`s, and of the `sgpu` command."""

from __future__ import annotations

import argparse
import functools
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from sgpu_magic.errors import UsageError
from sgpu_magic.options import rank_lists, table, values
from sgpu_magic.options.option_records import CellOptions, ReplayOptions, SessionOptions
from sgpu_magic.options.strict_parser import StrictParser
from sgpu_magic.options.table import OF_RANKS_THAT_STAY, OPTIONS, Reader

T = TypeVar("T")

RAY = "%%ray_launch"
NO_SESSION = "none"
"""`--session none`: run outside of any session."""

_IN_CELL = "In the cell: rank, local_rank, world_size, device; the process group is initialised.\n"
_IN_DRIVER = "In the cell: RAY_ADDRESS is set; the cluster has the lease's GPUs.\n"
_VALUE = "The cell's value is a result: .values by rank, .lines, .logs(rank), .directory."
_FIRST_WORD = re.compile(r"\s*(\[[\d,:\s-]*\]|[\d,:\s-]*[\d:])(?=\s|$)(.*)", re.DOTALL)
_SESSION_NAME = re.compile(r"[^\W\d][\w.-]*")
_ABOUT = {
    "%%distributed": "Run the cell on N ranks of a pool, with the notebook's variables, and bring back what it prints, "
    "shows, returns and raises. While a session is connected (%sgpu_connect) it runs on the session's ranks, and "
    "variables that it sets there are kept.",
    "%%rank": "Run the cell on some ranks of the connected session: %%rank 0, %%rank 0,2-3. The same as %%distributed "
    "--ranks, with its further options.",
    RAY: "Run the cell as the driver of a Ray cluster that is started for it on N devices of a pool: ray.init() in "
    "the cell connects to it, and it ends with the cell. Rank 0 runs the cell, with the notebook's variables; the "
    "other ranks only hold their devices.",
}
LINE_PARSERS: dict[str, Callable[[], OptionParser]] = {}
"""Parsers of the line magics decorated with `takes`, by name."""


class OptionParser(StrictParser):
    """The parser of a magic."""

    pointer = "`{prog} -h` shows the options."

    def __init__(self, prog: str, description: str = "", epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            add_help=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def offer_help(self) -> None:
        self.add_argument("-h", "--help", action="store_true", help="show this help")

    def read(self, line: str) -> argparse.Namespace:
        """Parse the magic's line.

        Raises:
            UsageError: An option is unknown, or its value is invalid.
        """
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise UsageError(f"{self.prog}: the line can't be read: {error}. Close the quotes.") from None
        return self.parse_args(words)

    def read_or_help(self, line: str) -> argparse.Namespace | None:
        """As `read`; if the line asks for help, print it and return None."""
        found = self.read(line)
        if not found.help:
            return found
        print(self.format_help())  # noqa: T201  help is output
        return None


def takes(
    about: str, add: Callable[[OptionParser], object], epilog: str = ""
) -> Callable[[Callable[[Any, argparse.Namespace], T]], Callable[..., T | None]]:
    """Decorate a line magic's method to take the parsed values of its line. `-h` prints the help instead.

    Args:
        about: Description of the magic for its help.
        add: Adds the magic's arguments to its parser.
        epilog: Text below the options.
    """

    def decorate(method: Callable[[Any, argparse.Namespace], T]) -> Callable[..., T | None]:
        def line_parser() -> OptionParser:
            made = OptionParser(f"%{method.__name__}", about, epilog)
            add(made)
            made.offer_help()
            return made

        @functools.wraps(method)
        def magic(self: Any, line: str = "") -> T | None:
            found = line_parser().read_or_help(line)
            return None if found is None else method(self, found)

        LINE_PARSERS[method.__name__] = line_parser
        return magic

    return decorate


def add_option(parser: argparse.ArgumentParser, name: str, **own: Any) -> None:
    """Add an option of the table to a parser.

    Args:
        parser: The parser.
        name: The option's name.
        own: Keyword arguments of `add_argument` that replace the table's.
    """
    option = OPTIONS[name]
    parser.add_argument(*filter(None, [option.short]), f"--{name}", **option.arguments() | own)


def fields(
    found: argparse.Namespace, names: Iterable[str], readers: Mapping[str, Reader] | None = None
) -> dict[str, Any]:
    """Convert parsed options to the fields of a record of `option_records`.

    Args:
        found: The parsed line.
        names: The options to convert.
        readers: Readers that replace those of the table, by option.

    Raises:
        UsageError: A value is invalid.
    """
    given = {name: getattr(found, name.replace("-", "_")) for name in names}
    return table.read(given, lambda name: f"--{name}", readers or {})


# ---------------------------------------------------------------- cells


@functools.cache
def parser(prog: str = "%%distributed") -> OptionParser:
    """Return the parser of a magic that runs a cell."""
    made = OptionParser(prog, _ABOUT[prog], (_IN_DRIVER if prog == RAY else _IN_CELL) + _VALUE)
    if prog == "%%rank":
        made.add_argument("list", nargs="?", metavar="RANKS", help="ranks, such as 0,2-3")
    for name in table.CELL:
        if prog == RAY and name in OF_RANKS_THAT_STAY:
            made.add_argument(f"--{name}", nargs="?", const=True, help=argparse.SUPPRESS)
        else:
            add_option(made, name)
    made.offer_help()
    return made


def parse(line: str, prog: str = "%%distributed") -> CellOptions | None:
    """Parse the line of a magic that runs a cell; None if it asks for help.

    Args:
        line: The text after the magic's name.
        prog: `%%distributed`, `%%rank` or `%%ray_launch`.

    Raises:
        UsageError: An option is unknown, or its value is invalid.
    """
    return _parse(line, prog) if line.strip() else _without_options(prog)


@functools.cache
def _without_options(prog: str) -> CellOptions | None:
    """Return what most cells of a session request."""
    return _parse("", prog)


def _parse(line: str, prog: str) -> CellOptions | None:
    if prog == "%%rank" and (ranks := _FIRST_WORD.match(line)) is not None:
        # a list of ranks such as `0, 2` becomes one word
        line = re.sub(r"\s", "", ranks[1]) + ranks[2]
    found = parser(prog).read(line)
    if found.help:
        return None
    names: Iterable[str] = table.CELL
    if prog == RAY:
        _check_for_ray(found)
        names = [name for name in names if name not in OF_RANKS_THAT_STAY]
    if found.retry_on is not None and found.retries is None:
        raise UsageError("--retry-on says when to start again, but not how often: add --retries N.")
    readers: dict[str, Reader] = {}
    if prog == "%%rank":
        if found.list is None or found.ranks is not None:
            raise UsageError("%%rank takes the ranks as its first word, not as --ranks: %%rank 0, or %%rank 0,2-3.")
        if found.fresh:
            raise UsageError("%%rank runs on existing ranks, and --fresh starts new ones. Leave one of them out.")
        found.ranks = found.list
        readers["ranks"] = lambda _, given: rank_lists.parse_ranks(prog, given)
    if found.detach and found.nowait:
        raise UsageError(
            "--nowait keeps the run with this notebook, and --detach lets it go on without. Leave one of them out."
        )
    if found.ranks is not None and found.fresh:
        raise UsageError("--ranks names existing ranks, and --fresh starts new ones. Leave one of them out.")
    asked = fields(found, names, readers)
    if prog == RAY:
        asked |= {"session": NO_SESSION, "ray": True}
    options = CellOptions(**asked)
    table.check_devices(options.devices)
    return options


def _check_for_ray(found: argparse.Namespace) -> None:
    """Reject options that `%%ray_launch` does not support, with the reason.

    Raises:
        UsageError: Such an option was given.
    """
    for name in OF_RANKS_THAT_STAY:
        if getattr(found, name) is not None:
            raise UsageError(
                f"{RAY} has no --{name}: its Ray cluster starts on new ranks, never on a session's, and only rank "
                f"0 runs the cell. Leave --{name} out; the connected session is not affected."
            )
    for output in values.outputs_from(found.out, "--out"):
        if output.all_ranks:
            raise UsageError(
                f"--out {output.name}:all brings every rank's value back, and with {RAY} only rank 0 runs the cell. "
                "Leave :all out; ray.get returns the results of Ray's tasks."
            )


# ---------------------------------------------------------------- sessions and replays


def add_session(made: OptionParser) -> None:
    """Add the options of `%sgpu_connect` to a parser."""
    own = {
        "name": {"metavar": "S", "default": "main", "help": "name of the session (default: main)"},
        "wait": {"help": "maximum time in the queue; 0: connect now or fail (default: unlimited)"},
        "timeout": {"metavar": "8h", "help": "time limit of the session (default and maximum: 7d)"},
    }
    for name in table.SESSION:
        add_option(made, name, **own.get(name, {}))
    add_option(made, "profile", help=argparse.SUPPRESS)


def read_session(found: argparse.Namespace) -> SessionOptions:
    """Convert the parsed options of `%sgpu_connect`.

    Raises:
        UsageError: A value is invalid.
    """
    if _SESSION_NAME.fullmatch(found.name) is None or found.name == NO_SESSION:
        raise UsageError(f"--name {found.name!r}: a session's name must begin with a letter and contain no spaces.")
    if found.profile:
        raise UsageError("--profile records a trace of one cell, not of a session: put it on the %%distributed line.")
    options = SessionOptions(**fields(found, table.SESSION))
    table.check_devices(options.devices)
    return options


def add_replay(made: argparse.ArgumentParser, own: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Add the options of a replay to a parser; `own` has keyword arguments for `add_option` by name."""
    differs: dict[str, Mapping[str, Any]] = {
        "gpus": {"help": "ranks (default: as many as it had)"},
        "type": {"help": "a10, h100, ..., cpu, any (default: what it asked for)"},
        "here": {"help": "use this notebook's packages instead of those that the run had"},
        "timeout": {"help": "longest running time (default: its own)"},
        "name": {"help": "the run's name (default: its own)"},
    }
    differs |= own or {}
    for name in table.REPLAY:
        add_option(made, name, **differs.get(name, {}))


def read_replay(found: argparse.Namespace, ui: str, **readers: Reader) -> ReplayOptions:
    """Convert the parsed options of a replay.

    Args:
        found: The parsed line.
        ui: How the run is shown.
        readers: Readers that replace those of the table, by option.

    Raises:
        UsageError: A value is invalid.
    """
    return ReplayOptions(**fields(found, table.REPLAY, {"timeout": values.duration_s, **readers}), ui=ui)
