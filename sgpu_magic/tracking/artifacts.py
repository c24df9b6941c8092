"""The files of a run's directory that are logged to MLflow as artifacts.

    cell.py  requirements.txt  pylock.toml  run.json  run.html
    logs/rank-0.log ...     profile/...     and artifacts that the ranks could not log (`artifacts/`), at their paths

Never the payload, the run's key or its results.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from html import escape
from pathlib import Path

import msgspec

from sgpu_magic.files.run_directory import EventFile
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.html import render_html
from sgpu_magic.views.run_notes import run_name
from sgpu_magic.wire.events import Submitted

MAX_BYTES = 200_000_000
"""Larger files are not logged."""

_PLAIN = ("cell.py", "requirements.txt", "pylock.toml")
OWN_NAMES = frozenset((*_PLAIN, "run.json", "run.html", "logs", "profile"))
"""Names of sgpu-magic's own files at the top of a run's artifacts; all others are the user's."""
_OWN = "artifacts"
# fields of run.json that only make sense on this machine
_LEFT_OUT = ("payload_layout",)
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>
<body style="font-family:system-ui,sans-serif;margin:16px">
{body}
</body></html>
"""


class ArtifactFile(msgspec.Struct, frozen=True):
    """A file to log.

    Args:
        path: Path on disk.
        folder: Folder among the artifacts, "" for the top.
    """

    path: Path
    folder: str = ""

    @property
    def name(self) -> str:
        """Its path among the artifacts."""
        return f"{self.folder}/{self.path.name}" if self.folder else self.path.name


def files_of(directory: Path, scratch: Path, pool: str) -> Iterator[ArtifactFile]:
    """Yield the files to log. Generated files are written just before they are yielded.

    Args:
        directory: The run's directory.
        scratch: An empty directory for generated files.
        pool: The pool's name, shown in `run.html`.
    """
    for name in _PLAIN:
        if (directory / name).is_file():
            yield ArtifactFile(directory / name)
    if _write_record(directory / "run.json", scratch / "run.json"):
        yield ArtifactFile(scratch / "run.json")
    if _write_page(directory, scratch / "run.html", pool):
        yield ArtifactFile(scratch / "run.html")
    # skip empty logs, of ranks that printed nothing
    logs = [path for path in sorted(directory.glob("rank-*.log")) if path.stat().st_size]
    yield from (ArtifactFile(path, "logs") for path in logs)
    for top, prefix in ((directory / "profile", "profile"), (directory / _OWN, "")):
        for folder, _, names in os.walk(top):
            inner = Path(folder).relative_to(top).as_posix()
            place = "/".join(part for part in (prefix, inner) if part not in ("", "."))
            yield from (ArtifactFile(Path(folder, name), place) for name in sorted(names) if not name.startswith("."))


def _write_record(source: Path, target: Path) -> bool:
    """Copy `run.json` without fields of this machine. Returns False if there is none."""
    try:
        record = msgspec.json.decode(source.read_bytes(), type=dict[str, msgspec.Raw])
    except (OSError, msgspec.DecodeError):
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
