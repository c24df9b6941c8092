"""Shows a sample run of `stories` in a kernel's live view, for tests in a browser."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from unittest import mock

import msgspec
import stories

from sgpu_magic.runs.kernel_context import kernel_context
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.live.live_views import Buttons
from sgpu_magic.wire.events import Event
from sgpu_magic.wire.rank_events import OutputWritten
from sgpu_magic.wire.run import RunSpec


def reported(name: str) -> tuple[RunSpec, list[Event]]:
    """Return the run of a story, and its events with times shifted so that the last one is now."""
    events: list[Event] = []
    apply = RunView.apply

    def record(view: RunView, event: Event, *frames: object) -> None:
        events.append(event)
        apply(view, event)

    with mock.patch.object(RunView, "apply", record):
        run = stories.FORMS[name]()
    now = time.time()
    last = events[-1].at
    return run.view.spec, [msgspec.structs.replace(event, at=event.at - last + now) for event in events]


def play(name: str, go: Path, ended: str = "") -> None:
    """Show a story until the file `go` exists, then its final form.

    Args:
        name: The story.
        go: The file.
        ended: A longer story of the same run, whose further events follow then; "" for none.
    """
    spec, events = reported(name)
    directory = Path.cwd() / f"log-{name}"
    directory.mkdir(exist_ok=True)
    view = RunView(spec, pool="team")
    buttons = Buttons(directory, lambda: "it is being stopped", lambda _: None, lambda: ["rank 0   is in train"])
    publisher = kernel_context().live_views.publisher_for("widget", view, sys.stdout, buttons)

    def apply(event: Event) -> None:
        if isinstance(event.body, OutputWritten):
            with open(directory / f"rank-{event.body.rank}.log", "a") as log:
                log.write(event.body.text)
        view.apply(event)

    for event in events:
        apply(event)
    while not go.exists():
        publisher.tick(time.monotonic())
        time.sleep(0.05)
    for event in reported(ended)[1][len(events) :] if ended else ():
        apply(event)
    publisher.tick(time.monotonic(), final=True)
