"""Measure this package and its peers, and write the table.

    python -m tests.benchmarks [--only NAME ...] [--quick] [--peers-python PATH] [--results PATH]

Times depend on the machine and on what else runs there, so nothing here fails when a limit is missed:
the table says so.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the repository's root takes the place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.benchmarks.environment import HERE, Bench, make_peers
from tests.benchmarks.measure import MeasurementFailed, Row
from tests.benchmarks.processes import adopt_orphans, end_descendants
from tests.benchmarks.report import markdown
from tests.benchmarks.rows import (
    attach,
    failure,
    imports,
    launch,
    on_ray,
    output,
    over_ssh,
    payload,
    rehydration,
    remote,
    resources,
    scale,
    session,
    snapshot,
    tracking,
    training,
)

ROWS: dict[str, Callable[[Bench], Row]] = {
    "fresh": launch.fresh_group,
    "standby": launch.standby_group,
    "many": launch.many_in_a_row,
    "first": launch.first_cell,
    "first-at-once": launch.first_cell_at_once,
    "payload": payload.to_all_ranks,
    "return": payload.back_from_each,
    "remote": remote.there_and_back,
    "ssh-first": over_ssh.first_cell,
    "ssh-cells": over_ssh.cells,
    "ssh-data": over_ssh.there_and_back,
    "ray": on_ray.all_reduce,
    "output": output.numbered_lines,
    "attach": attach.million_lines,
    "failure": failure.one_rank_raises,
    "ranks64": launch.many_ranks,
    "ranks256": launch.most_ranks,
    "imports": imports.of_later_cells,
    "session": session.empty_cell,
    "session-print": session.printing_cell,
    "session-fresh": session.fresh_on_lease,
    "training": training.step_loop,
    "tracking": tracking.overhead,
    "tracking-short": tracking.launches,
    "snapshot": snapshot.of_this_environment,
    "rehydration": rehydration.of_a_lock,
    "processor": resources.processor,
    "idle": resources.idle,
    "scale": scale.placement,
    "scale-events": scale.events,
}
"""Rows by the name that `--only` takes, in the table's order."""

_PEERS = ("accelerate", "cloudpickle", "ipyparallel", "nbdistributed", "ray", "torch")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks; the exit status is 0 unless nothing at all could be measured."""
    options = _parse(arguments)
    adopt_orphans()
    try:
        peers_python = options.peers_python or make_peers()
    except (MeasurementFailed, subprocess.CalledProcessError) as reason:
        print(f"no peers: {reason}", flush=True)
        peers_python = None
    load_before = os.getloadavg()[0]
    scratch = Path(tempfile.mkdtemp(prefix="sb", dir="/tmp"))
    bench = Bench(peers_python, scratch, quick=options.quick)
    rows: list[Row] = []
    try:
        for name in options.only or ROWS:
            rows.append(_measure(name, bench))
    finally:
        end_descendants()
        shutil.rmtree(scratch, ignore_errors=True)
    text = markdown(
        rows,
        command=" ".join(["python -m tests.benchmarks", *(["--quick"] if options.quick else [])]),
        load_before=load_before,
        load_after=os.getloadavg()[0],
        peers=_versions(peers_python),
    )
    print(text)
    if options.results:
        options.results.write_text(text)
        print(f"written to {options.results}")
    return 0 if any(row.ours for row in rows) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(ROWS), metavar="NAME", help=f"rows: {', '.join(ROWS)}")
    parser.add_argument("--quick", action="store_true", help="few samples: to see that everything works")
    parser.add_argument("--peers-python", type=Path, help="interpreter of an environment that has peers.txt")
    parser.add_argument(
        "--results", type=Path, help="where the table goes; RESULTS.md beside this file, nowhere with --only"
    )
    options = parser.parse_args(arguments)
    if options.results is None and not options.only:
        options.results = HERE / "RESULTS.md"
    return options


def _measure(name: str, bench: Bench) -> Row:
    """Measure a row; one that breaks says why instead of ending the run."""
    started = time.monotonic()
    print(f"{name} ...", flush=True)
    try:
        row = ROWS[name](bench)
    except MeasurementFailed as reason:
        row = Row(name, notes=[f"Could not be measured: {reason}"])
    except Exception as error:
        traceback.print_exc()
        row = Row(
            name,
            notes=[f"Could not be measured, the benchmark itself failed: {type(error).__name__}: {error}"],
        )
    finally:
        end_descendants()
    print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    return row


def _versions(python: Path | None) -> str:
    if python is None:
        return "none could be installed"
    printing = f"print(*(name + ' ' + version(name) for name in {_PEERS!r}), sep=', ')"
    code = f"from importlib.metadata import version\n{printing}"
    finished = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return finished.stdout.strip() or "versions unknown"


if __name__ == "__main__":
    sys.exit(main())
