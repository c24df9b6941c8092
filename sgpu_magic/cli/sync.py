"""`sgpu sync`: sends to MLflow what could not be sent because a server was down or slow, or lists it.

One process per store sends, with the variables of this shell. User name, password and token are only passed to the
store that `MLFLOW_TRACKING_URI` or the setting `tracking_uri` names; if neither is set, to the only server there is.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from sgpu_magic.cli.main import CommandParser
from sgpu_magic.client import ledger
from sgpu_magic.client.find_run import find_directory
from sgpu_magic.client.this_machine import find_pool
from sgpu_magic.config import Settings, load_settings
from sgpu_magic.errors import PoolError, UsageError
from sgpu_magic.files.run_directory import read_spec
from sgpu_magic.files.tracking_progress import Progress, load_progress, unsent
from sgpu_magic.tracking.store import SYNC, Sent, Unsent
from sgpu_magic.views.run_notes import run_name
from sgpu_magic.views.units import aligned
from sgpu_magic.wire.base import short
from sgpu_magic.wire.decoding import decode_json
from sgpu_magic.wire.tracking import without_user

_CREDENTIALS = ("MLFLOW_TRACKING_", "MLFLOW_AUTH", "DATABRICKS_")
_DEFAULT = "the default store"

Left = tuple[Path, Progress]


def sync(settings: Settings, run: str = "", *, only_list: bool = False) -> tuple[str, bool]:
    """Send what is unsent, of one run or of all runs that have ended.

    Args:
        settings: Gives the runs' directory.
        run: Prefix of a run's id; "" for all.
        only_list: List what is unsent without sending it.

    Returns:
        The text to print, and whether nothing of an ended run is left unsent. Active runs are written by their pool.

    Raises:
        UsageError: There is no such run, or it is not tracked.
    """
    left = _remaining(settings, run)
    going = _going(settings, left)
    ready = [item for item in left if item[0].name not in going]
    if not left:
        return "everything is in MLflow", True
    if only_list or not ready:
        return _table(left, going), not ready
    found = _send_all(settings, ready)
    failed = {sent.run_id: sent.problem for sent in found if sent.problem}
    sent = [item for item in ready if item[0].name not in failed]
    lines = [f"sent: {', '.join(short(directory.name) for directory, _ in sent)}"] if sent else []
    for problem in dict.fromkeys(failed.values()):
        names = ", ".join(short(run_id) for run_id, why in failed.items() if why == problem)
        lines.append(f"not sent: {names}: {problem}")
    if going:
        lines.append(f"still active, and written by their pool: {', '.join(short(run_id) for run_id in sorted(going))}")
    return "\n".join(lines), not failed


def _remaining(settings: Settings, run: str) -> list[Left]:
    if not run:
        return list(unsent(settings.runs_path))
    directory = settings.runs_path / find_directory(settings, run)
    found = load_progress(directory)
    if found is None:
        raise UsageError(
            f"run {short(directory.name)} is not tracked: it was submitted with --no-track or SGPU_TRACK=off, or it "
            "succeeded within 5 seconds without using MLflow. SGPU_TRACK=all tracks every run."
        )
    return [] if found.complete else [(directory, found)]


def _going(settings: Settings, left: Sequence[Left]) -> Collection[str]:
    """Return the ids of the active runs among them, which their pool writes."""
    if not left or find_pool(settings) is None:
        return ()
    rows = {row.run_id: row for row in ledger.recent_runs(settings, None)}
    return {path.name for path, _ in left if path.name in rows and not rows[path.name].state.is_final}


def _send_all(settings: Settings, left: Sequence[Left]) -> list[Sent]:
    by_store: dict[str, list[Left]] = {}
    for item in left:
        by_store.setdefault(item[1].uri, []).append(item)
    servers = [uri for uri in by_store if uri.startswith(("http:", "https:", "databricks"))]
    found: list[Sent] = []
    for uri, items in by_store.items():
        named = os.environ.get("MLFLOW_TRACKING_URI", "") or settings.tracking_uri
        mine = without_user(named) == uri if named else servers == [uri]
        environ = {name: value for name, value in os.environ.items() if mine or not name.startswith(_CREDENTIALS)}
        # a session before its cells
        items.sort(key=lambda item: bool(item[1].parent_run))
        found += _send(settings, named if named and mine else uri, items, environ)
    return found


def _send(settings: Settings, uri: str, items: Sequence[Left], environ: dict[str, str]) -> list[Sent]:
    order = Unsent(settings, uri, tuple(str(directory) for directory, _ in items))
    command = [sys.executable, "-m", "sgpu_magic.tracking", SYNC]
    environ |= {"PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, input=msgspec.json.encode(order), capture_output=True, env=environ)
    found = [decode_json(line, type=Sent) for line in done.stdout.splitlines() if line.startswith(b"{")]
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise PoolError(
            f"the process that sends to {uri or _DEFAULT} failed: {lines[-1] if lines else done.returncode}"
        )
    return found


def _table(left: Sequence[Left], going: Collection[str]) -> str:
    rows = [("run", "name", "store", "")]
    for directory, found in left:
        spec = read_spec(directory)
        why = "still active" if directory.name in going else found.problem or "unsent"
        name = run_name(spec) if spec is not None else ""
        rows.append((short(directory.name), name, found.uri or _DEFAULT, why[:200]))
    return "\n".join(aligned(rows))


def _sync_options(parser: CommandParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", default="", help="only this run")
    parser.add_argument("--list", action="store_true", help="only list what is unsent")
    parser.does(_sync)


def _sync(options: argparse.Namespace) -> int:
    text, complete = sync(load_settings(), options.run, only_list=options.list)
    sys.stdout.write(f"{text}\n")
    return 0 if complete else 1


COMMANDS = {"sync": _sync_options}
