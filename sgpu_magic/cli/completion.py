"""Shell completion of the `sgpu` command with argcomplete: commands, options, runs, jobs, pools, device types, pages.

Candidates are read from files. No pool is asked or started, because a shell waits for them at each press of Tab.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping

import argcomplete
from argcomplete.io import warn

from sgpu_magic.cli.main import CommandParser, command_parser
from sgpu_magic.config import load_settings
from sgpu_magic.errors import SgpuError
from sgpu_magic.wire.base import short
from sgpu_magic.wire.devices import ANY, CPU, KNOWN_TYPES

# of the newest runs and jobs, so many are candidates
_MOST = 100
# these commands take active runs only
_OF_ACTIVE = ("cancel", "detach", "stacks", "port-forward")

Candidates = Iterable[str] | Mapping[str, str]
"""Candidates, or candidates with the description that zsh and fish show."""


def complete() -> None:
    """Write the candidates for the command line that the shell has put into `COMP_LINE`, and exit."""
    words = os.environ["COMP_LINE"].split()[1:]
    parser = command_parser(words)
    _add_completers(parser)
    argcomplete.autocomplete(parser, always_complete_options=False)


def _add_completers(parser: CommandParser) -> None:
    for prog, action in parser.arguments():
        candidates = _CANDIDATES.get(f"{prog} {action.dest}") or _CANDIDATES.get(action.dest)
        if candidates is not None:
            # argcomplete's name for it
            setattr(action, "completer", _completer(candidates))  # noqa: B010


def _completer(candidates: Callable[[argparse.Namespace], Candidates]) -> Callable[..., Candidates]:
    def complete_word(parsed_args: argparse.Namespace, **_: object) -> Candidates:
        try:
            return candidates(parsed_args)
        except SgpuError as error:
            # below the command line, where the shell has a place for it
            warn(error.message)
            return ()

    return complete_word


def _runs(parsed: argparse.Namespace) -> Candidates:
    from sgpu_magic.client.ledger import recent_runs
    from sgpu_magic.views import ansi

    runs = recent_runs(load_settings(), _MOST)
    if parsed.command in _OF_ACTIVE:
        runs = [run for run in runs if not run.state.is_final]
    return {short(run.run_id): ansi.plain(f"{run.name or run.kind}, {run.state}") for run in runs}


def _jobs(parsed: argparse.Namespace) -> Candidates:
    from sgpu_magic.cli.jobs import all_jobs

    return {short(job.job_id): f"{job.source}, {job.state}" for job in all_jobs(load_settings())[:_MOST]}


def _pools(parsed: argparse.Namespace) -> Candidates:
    from sgpu_magic.client.pools_file import LOCAL

    return [LOCAL, *_listed_pools(parsed)]


def _listed_pools(parsed: argparse.Namespace) -> list[str]:
    from sgpu_magic.client.pools_file import read_pools

    return [entry.name for entry in read_pools()]


def _types(parsed: argparse.Namespace) -> Candidates:
    return [*KNOWN_TYPES, CPU, ANY]


def _topics(parsed: argparse.Namespace) -> Candidates:
    from sgpu_magic.views.help import topics

    return topics()


# by the name of an argument in every parser, or in one
_CANDIDATES: Mapping[str, Callable[[argparse.Namespace], Candidates]] = {
    "run": _runs,
    "job": _jobs,
    "pool": _pools,
    "sgpu pool remove name": _listed_pools,
    "type": _types,
    "topic": _topics,
}
