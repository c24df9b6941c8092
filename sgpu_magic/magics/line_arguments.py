"""The options of the line magics, as data."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass

from sgpu_magic.errors import UsageError
from sgpu_magic.magics.parsing import (
    Parser,
    add_devices,
    add_place,
    add_session,
    add_ui,
    add_variables,
    add_wishes,
    names,
    outputs,
    read_devices,
    read_wishes,
    variables,
)
from sgpu_magic.runs.option_values import optional_s, parse_ranks, timeout_s
from sgpu_magic.runs.package_options import max_cost_from
from sgpu_magic.runs.sessions.connecting import DEFAULT_NAME, Ask
from sgpu_magic.wire.records import OutputName

_RUN = re.compile(r"[0-9a-f]{1,8}")
_NAME = re.compile(r"[^\W\d][\w.-]*")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What stands behind `%sgpu_attach` and its like.

    Args:
        run: The first digits of a run's id, "" when left out.
        ui: `--ui`.
        pool: `--pool`, "" when left out.
    """

    run: str
    ui: str
    pool: str = ""


@dataclass(frozen=True, slots=True)
class ConnectOptions:
    """What stands behind `%sgpu_connect`: what is asked for, and how it is shown."""

    ask: Ask
    ui: str


@dataclass(frozen=True, slots=True)
class NameOptions:
    """What stands behind `%sgpu_pull` and `%sgpu_push`.

    Args:
        names: The names; `all_ranks` only for a pull.
        only: `--ranks`; empty when left out.
        session: `--session`; "" when left out.
        ui: `--ui`.
    """

    names: tuple[OutputName, ...]
    only: tuple[int, ...]
    session: str
    ui: str


def run_parser(magic: str, about: str, *, ui: bool = False, sessions: bool = False) -> Parser:
    """The options of a magic that takes a run."""
    made = Parser(magic, about)
    what = "the first digits of its id, or a session's name" if sessions else "the first digits of its id"
    made.add_argument("run", nargs="?", default="", metavar="RUN", help=what)
    if sessions:
        made.add_argument("--pool", default="", metavar="NAME", help="of this pool only (default: all)")
    if ui:
        add_ui(made)
    made.offer_help()
    return made


def read_run(parser: Parser, line: str, session: Callable[[str], str]) -> RunOptions | None:
    """Read the line of a magic that takes a run; None when it asked for help.

    Args:
        parser: The magic's.
        line: What stands behind it.
        session: Returns a session's run, "" when there is no session of that name.

    Raises:
        UsageError: It is no run's id, or there is more than one.
    """
    values = parser.asked(line)
    if values is None:
        return None
    run = session(values.run)
    if not run and values.run and _RUN.fullmatch(run := values.run.lower()) is None:
        raise UsageError(
            f"{parser.prog}: {values.run[:40]!r} is no run: give the first digits of its id (0-9, a-f), as "
            "%sgpu_status lists them."
        )
    return RunOptions(run, getattr(values, "ui", "auto"), getattr(values, "pool", ""))


def connect_parser() -> Parser:
    """The options of `%sgpu_connect`."""
    made = Parser(
        "%sgpu_connect",
        "Connect: take devices and start ranks that stay. From then on %%distributed cells run in them, and models, "
        "process groups and imports stay. %sgpu_disconnect ends it.",
        "The magic returns at once; its value is the session: s = %sgpu_connect --gpus 4.",
    )
    add = made.add_argument
    add_devices(made)
    add("--name", default=DEFAULT_NAME, metavar="S", help=f"the session's name (default: {DEFAULT_NAME})")
    add("--idle", metavar="60m", help="end it after so long without a cell, 0: never (default: 60m)")
    add("--wait", metavar="10m|0", help="longest time in the queue, 0: now or fail (default: as long as it takes)")
    add("--timeout", metavar="8h", help="longest time that it may last (default and most: 7d)")
    add_variables(made)
    add_wishes(made)
    add("--profile", action="store_true", help=argparse.SUPPRESS)
    add_place(made)
    made.offer_help()
    return made


def read_connect(parser: Parser, line: str) -> ConnectOptions | None:
    """Read the line of `%sgpu_connect`; None when it asked for help.

    Raises:
        UsageError: An option is unknown or its value means nothing.
    """
    values = parser.asked(line)
    if values is None:
        return None
    if _NAME.fullmatch(values.name) is None or values.name == "none":
        raise UsageError(f"--name {values.name!r}: a session's name begins with a letter and has no space in it.")
    if values.profile:
        raise UsageError("--profile keeps a trace of one cell, not of a session: put it on the %%distributed line.")
    ask = Ask(
        devices=read_devices(values),
        name=values.name,
        idle_s=optional_s("--idle", values.idle),
        wait_s=optional_s("--wait", values.wait),
        timeout_s=timeout_s("--timeout", values.timeout),
        variables=variables(values.env),
        wishes=read_wishes(values),
        max_cost=max_cost_from("--max-cost", values.max_cost),
        pool=values.pool,
    )
    return ConnectOptions(ask, values.ui)


def disconnect_parser() -> Parser:
    """The options of `%sgpu_disconnect`."""
    made = Parser(
        "%sgpu_disconnect", "End a session: its ranks go with all that they have, and its devices are free again."
    )
    made.add_argument("name", nargs="?", default="", metavar="NAME", help="the session (default: the current one)")
    made.offer_help()
    return made


def names_parser(magic: str, about: str, *, pulls: bool) -> Parser:
    """The options of `%sgpu_pull` and `%sgpu_push`."""
    made = Parser(magic, about)
    metavar = "NAME[:all]" if pulls else "NAME"
    what = "rank 0's value, or with :all a list of every rank's" if pulls else "names of the notebook"
    made.add_argument("names", nargs="*", metavar=metavar, help=what)
    made.add_argument("--ranks", metavar="0,2-3", help="these ranks only (default: all)")
    add_session(made)
    add_ui(made)
    made.offer_help()
    return made


def read_names(parser: Parser, line: str, *, pulls: bool) -> NameOptions | None:
    """Read the line of `%sgpu_pull` or `%sgpu_push`; None when it asked for help.

    Raises:
        UsageError: It names nothing, or what is no name.
    """
    values = parser.asked(line)
    if values is None:
        return None
    if pulls:
        found = outputs(parser.prog, values.names)
    else:
        found = tuple(OutputName(name) for name in names(parser.prog, values.names))
    if not found:
        raise UsageError(f"{parser.prog} takes names, such as {parser.prog} {'history loss:all' if pulls else 'cfg'}.")
    only = () if values.ranks is None else parse_ranks("--ranks", values.ranks)
    return NameOptions(found, only, values.session, values.ui)


def restart_parser() -> Parser:
    """The options of `%sgpu_restart`."""
    made = Parser(
        "%sgpu_restart",
        "Replace ranks of the session by new processes. What the notebook had shipped to them is sent again; what "
        "cells had set there is lost, and said.",
    )
    made.add_argument("--rank", "--ranks", dest="ranks", metavar="1,2", help="which (default: all)")
    add_session(made)
    made.offer_help()
    return made


def auto_parser() -> Parser:
    """The options of `%sgpu_auto`."""
    made = Parser(
        "%sgpu_auto",
        "Send every plain cell to the ranks of the current session until it is switched off. Cells that begin with %% "
        "stay here, and those of nothing but %sgpu_ magics, %pip, %conda, %env and %load_ext.",
    )
    made.add_argument("switch", nargs="?", choices=("on", "off"), help="on or off (default: says which it is)")
    made.offer_help()
    return made
