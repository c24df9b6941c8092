"""`sgpu replay`: a recorded run again, from a shell."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterable
from typing import TextIO

from sgpu_magic.cli.arguments import Parser, positive
from sgpu_magic.client.files_of_run import recorded_directory
from sgpu_magic.config import Settings, load_settings
from sgpu_magic.errors import UsageError
from sgpu_magic.options.argparse_form import add_replay, read_replay
from sgpu_magic.options.asked import ReplayOptions
from sgpu_magic.runs.follow import outcome
from sgpu_magic.runs.replay.recorded import prepare_replay, read_recorded
from sgpu_magic.runs.submit.submit import let_go, submit
from sgpu_magic.runs.workplace import close_workplace, workplace
from sgpu_magic.wire.states import RunState


def variables(_: str, given: Iterable[str]) -> dict[str, str]:
    """Read `--env`.

    Raises:
        UsageError: It means nothing.
    """
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError("--env takes KEY=VALUE.")
        found[name] = value
    return found


def options_from(values: argparse.Namespace) -> ReplayOptions:
    """Read the command's options.

    Raises:
        UsageError: A value means nothing.
    """
    return read_replay(values, "text", env=variables)


def replay(settings: Settings, run: str, options: ReplayOptions, out: TextIO) -> bool:
    """Launch a run again from its directory and show it until it ends, or until it is detached.

    What its ranks return stays in the new run's directory: nothing is unpickled here.

    Args:
        settings: Where runs lie.
        run: The first digits of its id.
        options: What may differ.
        out: Takes what is said when nothing is shown.

    Returns:
        Whether it succeeded, or was detached.

    Raises:
        UsageError: There is no such run, or it can't be replayed.
        SgpuError: The pool does not take it.
    """
    with recorded_directory(settings, run) as directory:
        recorded = read_recorded(directory)
    place = workplace()
    try:
        started = submit(place.pool, prepare_replay(place, recorded, options))
        if options.detach:
            for note in started.spec.shipped.notes:
                print(note, file=out)
            print(outcome.goes_on(started.spec), file=out)
            place.pool.run_left(started.run_id)
            started.close()
            return True
        followed = place.followed(started, options.ui, error_follows=False)
        try:
            outcome.show(followed, RunState.QUEUED, threading.Event())
        except KeyboardInterrupt:
            started.cancel("`sgpu replay` was interrupted")
            outcome.show(followed, RunState.QUEUED, threading.Event())
        finally:
            let_go(place.pool, started)
        ended = followed.view.ended
        return ended is not None and ended.state is RunState.SUCCEEDED
    finally:
        close_workplace()


def _options(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN")
    own = {
        "gpus": {"type": positive, "help": "ranks (default: as many as it had)"},
        "env": {"help": "set a variable on the ranks"},
        "here": {"help": "with this Python's packages, whatever it had"},
        "detach": {"help": "return at once; the run goes on by itself"},
    }
    add_replay(parser, own)
    parser.does(_do)


def _do(options: argparse.Namespace) -> int:
    return 0 if replay(load_settings(), options.run, options_from(options), sys.stdout) else 1


COMMANDS = {"replay": _options}
