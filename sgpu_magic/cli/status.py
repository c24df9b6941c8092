"""`sgpu status`: the pools' devices, queue and runs, as `%sgpu_status` shows them."""

from __future__ import annotations

import argparse
import time
from contextlib import closing

from sgpu_magic.cli.json_form import status_document
from sgpu_magic.cli.json_records import encode
from sgpu_magic.cli.main import CommandParser, add_json, terminal_width
from sgpu_magic.client.pools import Pools, PoolStatusReply
from sgpu_magic.client.pools_file import LOCAL
from sgpu_magic.config import Settings, host_name, load_settings
from sgpu_magic.runs import pools_status


def ask(settings: Settings, name: str = "") -> list[PoolStatusReply]:
    """Ask one pool, or all listed pools, for their status. Never starts a pool.

    Args:
        settings: The settings.
        name: Only this pool; "" for all.

    Raises:
        PoolError: The only pool asked does not answer, or has an incompatible version.
        UsageError: There is no pool of that name, or the list can't be read.
    """
    with closing(Pools(settings)) as pools:
        return pools_status.ask(pools, name, start=False)


def status_text(answers: list[PoolStatusReply]) -> str:
    """Return the text of `%sgpu_status` for the pools; in a terminal, as wide as that."""
    if [answer.name for answer in answers] == [LOCAL] and answers[0].status is None:
        return f"no local pool is running on {host_name()}; the first %%distributed cell starts one"
    return pools_status.render(answers, {}, width=terminal_width())["text/plain"]


def add_options(parser: CommandParser) -> None:
    """Add the options of `sgpu status` to its parser, and to that of `sgpu pool status`."""
    parser.add_argument("--pool", default="", metavar="NAME", help="only this pool (default: all in the list)")
    add_json(parser)
    parser.does(_show)


def _show(options: argparse.Namespace) -> str:
    answers = ask(load_settings(), options.pool)
    return encode(status_document(answers, time.time())) if options.json else status_text(answers)


COMMANDS = {"status": add_options}
