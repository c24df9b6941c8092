"""How the magics' lines are read: argparse that raises a UsageError, and the values of options."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import NoReturn

from sgpu_magic.errors import UsageError
from sgpu_magic.runs.option_values import (
    MOST_RANKS,
    STRATEGIES,
    UI_CHOICES,
    check_spread,
    device_type,
    memory_bytes,
    node_count,
    strategy_of,
)
from sgpu_magic.runs.package_options import TORCH_CHOICES, Wishes, wishes_from
from sgpu_magic.runs.submit.cell_source import check_name
from sgpu_magic.runs.submit.placing import Devices


class Parser(argparse.ArgumentParser):
    """A magic's options; its help is the magic's help."""

    def __init__(self, prog: str, description: str = "", epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            add_help=False,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}. `{self.prog} -h` shows the options.")

    def offer_help(self) -> None:
        self.add_argument("-h", "--help", action="store_true", help="show this")

    def read(self, line: str) -> argparse.Namespace:
        """Read the magic's line.

        Raises:
            UsageError: An option is unknown or its value means nothing.
        """
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise UsageError(f"{self.prog}: the line can't be read: {error}. Close the quotes.") from None
        return self.parse_args(words)

    def asked(self, line: str) -> argparse.Namespace | None:
        """Read the magic's line as `read` does; None when it asks for help, which is printed."""
        values = self.read(line)
        if not values.help:
            return values
        print(self.format_help())  # noqa: T201  help is output
        return None


def add_devices(parser: Parser) -> None:
    """Add how many ranks on which devices."""
    add = parser.add_argument
    add("-n", "--gpus", type=rank_count, metavar="N", help="ranks, one per GPU (default: 2 on CPU, else all GPUs)")
    add("--type", metavar="TYPE", help="a10, a100, h100, ..., cpu, any (default: what the pool has)")
    add("--min-memory", metavar="40GB", help="of each device; without --type: the cheapest type that has it")
    add("--nodes", metavar="N", help="spread the ranks evenly over N nodes (default: the pool's choice)")
    add("--placement", metavar="|".join(STRATEGIES), help="on as few nodes as can be, on one, on many (default: pack)")


def add_variables(parser: Parser) -> None:
    """Add the ranks' variables."""
    parser.add_argument(
        "--env", action="append", default=[], metavar="KEY=VALUE", help="set a variable on the ranks (repeatable)"
    )


def add_place(parser: Parser) -> None:
    """Add the pool, the view, and whether GPUs may be shared."""
    parser.add_argument(
        "--pool",
        default="",
        metavar="NAME|reserved|on-demand",
        help="the pool (default: the setting pool, else a reserved one that has the type, on-demand, local)",
    )
    add_ui(parser)
    parser.add_argument("--allow-busy", action="store_true", help="also take GPUs that other programs use")


def add_ui(parser: Parser) -> None:
    """Add how it is shown."""
    parser.add_argument("--ui", choices=UI_CHOICES, default="auto", help="how to show it (default: auto)")


def add_session(parser: Parser) -> None:
    """Add which session is meant."""
    parser.add_argument("--session", default="", metavar="NAME", help="the session (default: the one connected last)")


def add_wishes(parser: Parser) -> None:
    """Add the options about packages, tracking and cost."""
    add = parser.add_argument
    add(
        "--env-version",
        metavar="4|ai-4|none|FILE|NAME",
        help="the ranks' packages: of a base environment, a requirements or pylock file, or one that %%sgpu_env has "
        "saved; none: the notebook's own (default: the setting env_version, else none)",
    )
    add(
        "--torch",
        choices=TORCH_CHOICES,
        help="where packages are installed for the run, mine: also the notebook's torch (default: node, its own)",
    )
    add("--allow-build", action="store_true", help="packages without a wheel may be built from source for the run")
    add(
        "--upload",
        action="append",
        default=[],
        metavar="PATH",
        help="a folder or file that the ranks find there too: sgpu_magic.runtime.upload_path(PATH) (repeatable)",
    )
    add("--no-track", action="store_true", help="do not make it an MLflow run")
    add("--max-cost", metavar="5", help="stop it before it costs more, by the prices of the settings")


def read_devices(values: argparse.Namespace) -> Devices:
    """Read the options that `add_devices` has added, and `--allow-busy`.

    Raises:
        UsageError: One means nothing, or they contradict each other.
    """
    nodes = node_count("--nodes", values.nodes)
    strategy = strategy_of("--placement", values.placement)
    if values.gpus is not None or strategy == "strict_pack":
        check_spread(values.gpus, nodes, strategy)
    return Devices(
        ranks=values.gpus,
        device_type=device_type("--type", values.type),
        min_memory_bytes=memory_bytes("--min-memory", values.min_memory),
        nodes=nodes,
        strategy=strategy,
        allow_busy=values.allow_busy,
    )


def read_wishes(values: argparse.Namespace) -> Wishes:
    """Read the options that `add_wishes` has added, but the cost."""
    track = False if values.no_track else None
    return wishes_from(values.env_version, values.torch, values.allow_build, track, values.upload)


def rank_count(text: str) -> int:
    """Read `--gpus`."""
    if not text.isdigit() or not 1 <= int(text) <= MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks; 1 to {MOST_RANKS} is possible")
    return int(text)


def names(option: str, values: Sequence[str]) -> tuple[str, ...]:
    """Read names with commas between."""
    found = [name.strip() for value in values for name in value.split(",") if name.strip()]
    for name in found:
        check_name(option, name)
    return tuple(dict.fromkeys(found))
