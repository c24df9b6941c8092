"""`sgpu replay`: launch a run again from its directory."""

from __future__ import annotations

import sys
import threading
from typing import TextIO

from sgpu_magic.cli.main import CommandParser, positive
from sgpu_magic.client.run_files import recorded_directory
from sgpu_magic.config import Settings, load_settings
from sgpu_magic.options.argparse_form import add_replay, read_replay
from sgpu_magic.options.option_records import ReplayOptions
from sgpu_magic.wire.base import RunState


def replay(settings: Settings, run: str, options: ReplayOptions, out: TextIO) -> bool:
    """Launch a run again from its directory, and show it until it ends unless it is detached.

    The ranks' results stay in the new run's directory: nothing is unpickled here.

    Args:
        settings: Gives the runs' directory.
        run: Prefix of the run's id.
        options: What to change.
        out: Stream for messages of a detached run.

    Returns:
        Whether the run succeeded, or was detached.

    Raises:
        UsageError: There is no such run, or it can't be replayed.
        SgpuError: The pool refuses the run.
    """
    # slow to import, and not needed by `sgpu run`, whose kernel submits the runs
    from sgpu_magic.runs.follow import outcome
    from sgpu_magic.runs.kernel_context import close_kernel_context, kernel_context
    from sgpu_magic.runs.replay.recorded import prepare_replay, read_recorded
    from sgpu_magic.runs.submit.submit import release, submit

    with recorded_directory(settings, run) as directory:
        recorded = read_recorded(directory)
    context = kernel_context()
    try:
        started = submit(context.pool, prepare_replay(context, recorded, options))
        if options.detach:
            for note in started.spec.shipped.notes:
                print(note, file=out)
            print(outcome.detached_note(started.spec), file=out)
            context.pool.give_payload_up(started.run_id)
            started.close()
            return True
        followed = context.followed(started, options.ui, error_follows=False)
        try:
            outcome.show(followed, RunState.QUEUED, threading.Event())
        except KeyboardInterrupt:
            started.cancel("`sgpu replay` was interrupted")
            outcome.show(followed, RunState.QUEUED, threading.Event())
        finally:
            release(context.pool, started)
        ended = followed.view.ended
        return ended is not None and ended.state is RunState.SUCCEEDED
    finally:
        close_kernel_context()


def _options(parser: CommandParser) -> None:
    parser.add_argument("run", metavar="RUN", help="ID of the run, or its first digits")
    own = {
        "gpus": {"type": positive, "help": "ranks (default: as many as it had)"},
        "env": {"help": "set a variable on the ranks"},
        "here": {"help": "with this Python's packages, whatever it had"},
        "detach": {"help": "return at once; the run goes on by itself"},
    }
    add_replay(parser, own)
    parser.does(lambda it: 0 if replay(load_settings(), it.run, read_replay(it, "text"), sys.stdout) else 1)


COMMANDS = {"replay": _options}
