"""Files of a run that become artifacts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from html import escape
from pathlib import Path

import msgspec

from sgpu_magic.files.atomic_file import read_json
from sgpu_magic.files.run_directory import EventFile
from sgpu_magic.tracking.client import PLAIN_FILES
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.html import render_html
from sgpu_magic.views.run_notes import run_name
from sgpu_magic.wire.events import Submitted
from sgpu_magic.wire.run import RUN_RECORD

_OWN = "artifacts"
# fields of run.json that only make sense on this machine
_LEFT_OUT = ("payload_layout",)
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>
<body style="font-family:system-ui,sans-serif;margin:16px">
{body}
</body></html>
"""


def files_of(directory: Path, scratch: Path, pool: str) -> Iterator[tuple[str, Path]]:
    """Yield each file to log, with its path among the artifacts: never the payload, the run's key or its results.

    Those of `PLAIN_FILES`, `run.json`, `run.html`, `logs/`, `profile/` and artifacts that ranks could not log.
    Generated files are written just before they are yielded.

    Args:
        directory: The run's directory.
        scratch: An empty directory for generated files.
        pool: The pool's name, shown in `run.html`.
    """
    yield from ((name, path) for name in PLAIN_FILES if (path := directory / name).is_file())
    if _write_record(directory / RUN_RECORD, scratch / RUN_RECORD):
        yield RUN_RECORD, scratch / RUN_RECORD
    if _write_page(directory, scratch / "run.html", pool):
        yield "run.html", scratch / "run.html"
    # skip empty logs, of ranks that printed nothing
    yield from ((f"logs/{path.name}", path) for path in sorted(directory.glob("rank-*.log")) if path.stat().st_size)
    for top, base in ((directory / "profile", directory), (directory / _OWN, directory / _OWN)):
        files = (path for path in sorted(top.rglob("*")) if path.is_file() and not path.name.startswith("."))
        yield from ((path.relative_to(base).as_posix(), path) for path in files)


def _write_record(source: Path, target: Path) -> bool:
    """Copy `run.json` without fields of this machine. Returns False if there is none."""
    record = read_json(source, dict[str, msgspec.Raw])
    if record is None:
        return False
    kept = {name: value for name, value in record.items() if name not in _LEFT_OUT}
    target.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=2))
    return True


def _write_page(directory: Path, target: Path, pool: str) -> bool:
    """Render the run's final view as HTML, as its notebook shows it. Returns False if the event log has no run."""
    view: RunView | None = None
    with contextlib.suppress(OSError, ValueError):
        for event, _ in EventFile(directory).new_events():
            if view is None and isinstance(event.body, Submitted):
                view = RunView(event.body.spec, pool=pool)
            if view is not None:
                view.apply(event)
    if view is None:
        return False
    body = render_html(view)
    target.write_text(_PAGE.format(title=escape(run_name(view.spec)), body=body), encoding="utf-8")
    return True
