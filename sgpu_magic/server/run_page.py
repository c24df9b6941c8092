"""A run's page: its code, options, phases and environment, from its events and the records in its directory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from sgpu_magic.client import ledger
from sgpu_magic.client.run_environment import changes_between, read_circumstances
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError
from sgpu_magic.server.page_schema import (
    CodePart,
    EnvironmentChanges,
    NamedText,
    PageChange,
    PagePhase,
    RunPage,
    ShippedName,
)
from sgpu_magic.views.chosen_options import chosen_options
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.format_run import format_placement
from sgpu_magic.views.format_summary import billed_text, cost_text
from sgpu_magic.views.metrics import format_value
from sgpu_magic.views.phases import RunPhases
from sgpu_magic.wire.base import RunKind, short
from sgpu_magic.wire.run import RunSpec

# runs of the ledger among which the previous run of a notebook is searched
_LOOKED_AT = 500
_SHOWN_KINDS = (RunKind.CELL, RunKind.CALL)


def run_page(view: RunView, phases: RunPhases, started_at: float | None) -> RunPage:
    """Return a run's page without its MLflow run and the differences of its environment.

    Args:
        view: The run.
        phases: Its phases.
        started_at: When its ranks had started, in seconds since the epoch; None before.
    """
    spec = view.spec
    sizes = dict(spec.shipped.sizes)
    listed = phases.in_order(time.time())
    return RunPage(
        run_id=spec.run_id,
        name=view.name,
        kind=spec.kind.value,
        state=view.state.value,
        magic_line=spec.cell.magic_line,
        code=tuple(_code(spec)),
        options=_named_texts(chosen_options(spec)),
        parameters=_named_texts(spec.parameters),
        metrics=_named_texts((metric.name, format_value(metric.last)) for metric in view.metrics.kept),
        devices=tuple(format_placement(view)),
        submitted_at=spec.submitted_at,
        started_at=started_at,
        phases=tuple(PagePhase(name=one.name, seconds=one.seconds, current=one.current) for one in listed),
        shipped=tuple(ShippedName(name=name, size=sizes.get(name)) for name in spec.shipped.names),
        shipped_bytes=spec.shipped.total_bytes,
        cost=billed_text(view) or cost_text(view),
        mlflow=None,
        environment=None,
    )


def environment_changes(settings: Settings, spec: RunSpec) -> EnvironmentChanges | None:
    """Return what differs from the environment of the previous run of the same notebook on this machine.

    None if there is no such run, or one of the two has no record of its environment.
    """
    after = read_circumstances(settings.runs_path / spec.run_id)
    previous = _previous_run(settings, spec) if after is not None else None
    before = read_circumstances(settings.runs_path / previous) if previous is not None else None
    if after is None or previous is None or before is None:
        return None
    found = (
        PageChange(name=each.name, before=each.before, after=each.after) for each in changes_between(before, after)
    )
    return EnvironmentChanges(run=short(previous), changes=tuple(found))


def _previous_run(settings: Settings, spec: RunSpec) -> str | None:
    """Return the id of the last run of a cell or function that the notebook submitted before."""
    if not spec.owner.notebook:
        return None
    try:
        rows = ledger.recent_runs(settings, _LOOKED_AT)
    except PoolError:
        return None
    earlier = (
        row.run_id
        for row in rows
        if row.notebook == spec.owner.notebook and row.kind in _SHOWN_KINDS and row.submitted_at < spec.submitted_at
    )
    return next(earlier, None)


def _code(spec: RunSpec) -> Iterator[CodePart]:
    cell = spec.cell
    # the body of a call is not the user's
    if spec.kind is not RunKind.CALL and cell.body:
        title = Path(cell.file).name or _cell_title(cell.execution_count)
        yield CodePart(title=title, text=cell.body)
    for file, source, number in cell.linecache:
        yield CodePart(title=Path(file).name if number is None else _cell_title(number), text=source)


def _cell_title(number: int | None) -> str:
    return "cell" if number is None else f"cell {number}"


def _named_texts(pairs: Iterable[tuple[str, str]]) -> tuple[NamedText, ...]:
    return tuple(NamedText(name=name, value=value) for name, value in pairs)
