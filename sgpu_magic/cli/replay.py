"""`sgpu replay`: a recorded run again, from a shell."""

from __future__ import annotations

import argparse
import threading
from typing import TextIO

from sgpu_magic.client.files_of_run import recorded_directory
from sgpu_magic.config import Settings
from sgpu_magic.errors import UsageError
from sgpu_magic.runs.follow import outcome
from sgpu_magic.runs.option_values import device_type, optional_s
from sgpu_magic.runs.replay.recorded import ReplayOptions, prepare_replay, read_recorded
from sgpu_magic.runs.submit.placing import Devices
from sgpu_magic.runs.submit.submit import let_go, submit
from sgpu_magic.runs.workplace import close_workplace, workplace
from sgpu_magic.wire.states import RunState


def options_from(values: argparse.Namespace) -> ReplayOptions:
    """Read the command's options.

    Raises:
        UsageError: A value means nothing.
    """
    variables: dict[str, str] = {}
    for text in values.env:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError("--env takes KEY=VALUE.")
        variables[name] = value
    return ReplayOptions(
        devices=Devices(values.gpus, device_type("--type", values.type)),
        variables=variables,
        here=values.here,
        timeout_s=optional_s("--timeout", values.timeout) or 0.0,
        detach=values.detach,
        name=values.name,
        ui="text",
    )


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
