"""What the notebook saves about a run: each segment as text and as a MIME bundle, and the run as a record."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sgpu_magic.formatting import format_elapsed, format_span
from sgpu_magic.views import ansi
from sgpu_magic.views.failure import failure_lines
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.format_run import (
    attempt_text,
    failed_line,
    header_line,
    packages_text,
    returned_bytes,
    returned_text,
    state_word,
    tracked_text,
)
from sgpu_magic.views.format_summary import (
    billed_text,
    busy_text,
    cost_text,
    idle_lines,
    is_quiet,
    log_files,
    quiet_line,
    rank_label,
    rank_width,
    session_meta,
    session_summary,
    standing_warnings,
    usage_record,
)
from sgpu_magic.views.html import render_segment_html
from sgpu_magic.views.html_style import BOX, SANS, SOFT, safe
from sgpu_magic.views.metrics import metrics_text
from sgpu_magic.views.output import Caption, TextSegment, share_of
from sgpu_magic.views.output_buffer import (
    HEAD_SHARE,
    MIN_BYTES,
    SHOWN_LINES,
    GapItem,
    Item,
    LineItem,
    gap_lines,
    line_bytes,
    text_limit,
    trim,
)
from sgpu_magic.views.run_notes import cut_off_text, error_line, finishing_text, other_lines
from sgpu_magic.views.stacks import stall_lines
from sgpu_magic.wire.base import RunKind, RunState

_MAX_SENTENCE_CHARS = 1000
_MAX_METRICS = 8
RUN_MIME = "application/vnd.sgpu.run.v1+json"
RECORD_VERSION = 1
"""Version of the record under `RUN_MIME`; keys can be added without changing it."""

# the record is for programs and is part of every saved output, so it stays small for any number of ranks
_MAX_USAGE_RANKS = 64
_MAX_LISTED = 64
_OF_RUN = ("run_id", "name", "ranks", "pool", "host", "attempt", "attempts", "directory")
_OF_LEASE = ("device_type", "ranks", "cpu_slots", "simulated")
_OF_TRACKED = ("experiment_id", "experiment", "uri", "url")
_OF_FAILURE = ("rank", "host", "line")
_DURATIONS = ("queued_s", "starting_s", "running_s", "total_s")


def render_segment_text(view: RunView, segment: TextSegment, first: bool, last: bool, limit: int | None = None) -> str:
    """Return one segment as text: the first has the header and the notes, the last the summary.

    Args:
        view: The run.
        segment: One of `segments(view)`.
        first: It is the first segment.
        last: It is the last segment.
        limit: Bytes allowed for a live form, which shows the newest lines.
    """
    if is_quiet(view):
        return quiet_line(view) if first else ""
    lines: list[str] = []
    if first:
        notes = [*view.notes, *view.past_stall, *standing_warnings(view), *idle_lines(view)]
        lines = [header_line(view), *(f"note: {note}" for note in notes)]
    ending = _ending(view) if last or limit is None else []
    items: Sequence[Item] = segment.items
    if limit is None:
        # the first and the last lines, with a gap for those between them
        items = trim(items, [isinstance(item, LineItem) for item in items], 2 * SHOWN_LINES, 0.5)
        room = text_limit(view.output_limit) - sum(map(line_bytes, ending))
        bound, head_share = max(share_of(view, segment, room), MIN_BYTES), HEAD_SHARE
    else:
        bound, head_share = limit, 0.0
    width = rank_width(view)
    sizes = [line_bytes(item.text) if isinstance(item, LineItem) else 0 for item in items]
    for item in trim(items, sizes, bound, head_share):
        if isinstance(item, GapItem):
            lines.extend(gap_lines(item, view.short_id, log_files(view)))
        elif isinstance(item, LineItem):
            lines.append(f"{rank_label(item.rank, width)} {ansi.plain(item.text)}")
    return "\n".join([*lines, *(ending if last else [])])


def summary_line(view: RunView) -> str:
    """Return the run's last line, or `live_line` while it is active."""
    if not view.is_final:
        return live_line(view)
    if is_quiet(view):
        return quiet_line(view)
    if view.session is not None and view.failure is None:
        return session_summary(view)
    if view.state is RunState.SUCCEEDED:
        # ranks that were done at once took only their start
        duration = view.times.text().removeprefix("start ")
        succeeded = f"succeeded in {duration}" if duration else "succeeded"
        cut_off = cut_off_text(view.ended) if view.ended is not None else ""
        used = (cut_off, billed_text(view), busy_text(view.usage), returned_text(view))
        return _join_words(succeeded, *used, *_run_names(view))
    return _join_words(failed_line(view, brief=True), billed_text(view), *_run_names(view))


def live_line(view: RunView) -> str:
    """Return one line about an active run: its position in the queue, or its state and time."""
    if view.left:
        return view.left
    if is_quiet(view):
        return quiet_line(view)
    run, word = f"run {view.short_id}", state_word(view).text
    if view.state is RunState.QUEUED:
        position = f", position {view.position}" if view.position else ""
        return _join_words(f"{word}{position}", view.waiting_for or view.reason, packages_text(view), run)
    elapsed, starting_s = view.times.running_s(), view.times.starting_s()
    since = f" for {format_elapsed(starting_s)}" if starting_s else ""
    if elapsed:
        since = f" for {view.times.text()}"
    if view.session is not None:
        # no "for": the time counts from its start, not from this state
        since = f" · {format_span(elapsed)}" if elapsed else ""
    words = (
        finishing_text(view.finishing),
        cost_text(view),
        attempt_text(view),
        packages_text(view),
        *session_meta(view),
        view.reason,
    )
    return _join_words(f"{word}{since}", *words, run)


def _ending(view: RunView) -> list[str]:
    if not view.is_final:
        return [*unfinished_lines(view), *stall_lines(view), summary_line(view)]
    text = "the last expression's value could not be sent"
    problems = [f"rank {each.rank}: {text}: {each.value_problem}" for each in view.results if each.value_problem]
    logged = metrics_text(view.metrics, _MAX_METRICS)
    metrics = [f"metrics: {logged}"] if logged else []
    if view.state is RunState.SUCCEEDED or view.failure is None:
        return [*problems, *metrics, summary_line(view)]
    lines = [*metrics, *failure_lines(view, view.failure)]
    if view.session is not None:
        return [*lines, _join_words(*session_meta(view), *_run_names(view))]
    last = _join_words(billed_text(view), *_run_names(view))
    if len(lines) == len(metrics) + 1 or other_lines(view.others, view.failure.rank)[-1:] == lines[-1:]:
        lines[-1] += f" · {last}"
    else:
        lines.append(last)
    return lines


def unfinished_lines(view: RunView) -> list[str]:
    """Return the unfinished line of each rank."""
    width = rank_width(view)
    return [f"{rank_label(rank, width)} {ansi.plain(text)}" for rank, text in view.output.live_lines.items()]


def _join_words(*words: str) -> str:
    return " · ".join(filter(None, words))


def _run_names(view: RunView) -> tuple[str, str]:
    """Return the run's identifiers in MLflow, "" without one, and here."""
    return tracked_text(view), f"run {view.short_id}"


# ---------------------------------------------------------------- MIME bundles


def mime_bundle(
    view: RunView, segment: TextSegment, first: bool = True, last: bool = True, limit: int | None = None
) -> dict[str, object]:
    """Return HTML and text of a segment; the last one also includes the run as a small record.

    The record's `whole` is true if the segment is the only one and the run's events say all of it, so that a view made
    of the events can replace it.

    Args:
        view: The run.
        segment: One of `segments(view)`.
        first: It is the first segment.
        last: It is the last segment.
        limit: Bytes allowed for the HTML of a live form; its text gets a third of that.
    """
    # few front ends show a live form's text, so it gets less space than the HTML
    text = render_segment_text(view, segment, first, last, None if limit is None else limit // 3)
    html = render_segment_html(view, segment, first, last, limit)
    return {
        "text/html": html,
        "text/plain": text,
        **({RUN_MIME: {**run_record(view), "whole": first and not view.is_remarked}} if last else {}),
    }


def caption_bundle(caption: Caption) -> dict[str, object]:
    """Return the caption of a rank's display. JupyterLab shows it in the display's corner (`plugin/outputs.css`)."""
    html = f'<div class="sgpu-caption sgpu-columns-{caption.columns}" style="{SOFT};{SANS}">rank {caption.rank}</div>'
    return {"text/html": html, "text/plain": f"[{caption.rank}]"}


def interrupted_bundle(view: RunView) -> dict[str, object]:
    """Return the fallback of a live view for front ends that can't show it: which run it is, and how to show it again.

    It is shown in a notebook that was saved during the run, and in a page whose kernel was restarted.
    """
    seconds = view.times.running_s() or view.times.starting_s()
    after = f" for {format_elapsed(seconds)}" if seconds else ""
    lines = [header_line(view), f"run {view.short_id} was {view.state}{after} when this was saved."]
    command = f"%sgpu_attach {view.short_id}"
    if view.session is not None:
        lines[1:] = _of_session(view, command)
    elif view.spec.detach:
        lines.append(f"It continues without its notebook: {command} shows it{_and_brings(view)}.")
    else:
        lines.append(
            f"{command} shows it{_and_brings(view)}, and what became of it. It ended with its notebook's kernel "
            "unless it was detached."
        )
    lines = [ansi.plain(line)[:_MAX_SENTENCE_CHARS] for line in lines]
    head, *rest = map(safe, lines)
    html = f'<div style="{BOX};padding:6px 12px"><div><b style="font-weight:600">{head}</b></div>'
    html += "".join(f'<div style="{SOFT}">{line}</div>' for line in rest) + "</div>"
    return {"text/html": html, "text/plain": "\n".join(lines), RUN_MIME: run_record(view)}


def _of_session(view: RunView, command: str) -> list[str]:
    """Return the lines for a session, without its last activity: they are written once, and the session continues."""
    began = time.strftime("%Y-%m-%d at %H:%M", time.localtime(view.spec.submitted_at or None))
    if view.spec.detach:
        return [f"It started on {began} and continues without its notebook: {command} shows it."]
    return [
        f"It started on {began} and existed when this was saved. A session ends with its notebook's kernel: "
        f"%sgpu_connect starts a new one; {command} shows what became of this one."
    ]


def _and_brings(view: RunView) -> str:
    names = [output.name for output in view.spec.outputs] if view.spec.kind is RunKind.CELL else []
    return f" and brings {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}" if names else ""


# ---------------------------------------------------------------- the record


def run_record(view: RunView) -> dict[str, object]:
    """Return the run as JSON: what it was, where and how long it ran, how it ended."""
    # a call's internal names for its results are omitted
    outputs = view.spec.outputs if view.spec.kind is not RunKind.CALL else ()
    lease, failure, ended, shipped = view.lease, view.failure, view.ended, view.spec.shipped
    names, seconds = list(shipped.names[:_MAX_LISTED]), round(shipped.seconds, 6)
    record: dict[str, object] = {
        "version": RECORD_VERSION,
        **_fields(view, _OF_RUN),
        "state": str(view.state),
        "rank_numbers": list(view.rank_numbers[:_MAX_LISTED]),
        "kind": str(view.spec.kind),
        "session": view.spec.session,
        "lines": view.output.total_lines,
        "shipped": {"names": names, "total_bytes": shipped.total_bytes, "seconds": seconds},
        "returned": [{"name": name.name, "all_ranks": name.all_ranks} for name in outputs[:_MAX_LISTED]],
    }
    if view.state is RunState.SUCCEEDED and view.spec.outputs:
        record["returned_bytes"] = returned_bytes(view)
    if view.usage.ranks:
        record["usage"] = usage_record(view.usage, _MAX_USAGE_RANKS)
    if view.session is not None:
        record["cells"] = view.session.cells
    if lease is not None:
        record["lease"] = {**_fields(lease, _OF_LEASE), "uuids": list(lease.uuids[:_MAX_LISTED])}
    if ended is not None:
        record["durations"] = {name: round(getattr(ended, name), 6) for name in _DURATIONS}
        if ended.gpu_s is not None:
            record["gpu_s"] = round(ended.gpu_s, 3)
        if ended.cost is not None:
            record["cost"] = {"amount": round(ended.cost, 9), "currency": ended.currency}
    if environment := _environment(view):
        record["environment"] = environment
    if view.tracked is not None:
        record["mlflow"] = {"run_id": view.tracked.mlflow_run_id, **_fields(view.tracked, _OF_TRACKED)}
    if failure is not None:
        words = {"kind": str(failure.kind), "type": failure.type_name, "message": error_line(failure)}
        record["failure"] = {**_fields(failure, _OF_FAILURE), **words}
    return record


def _fields(record: object, names: Sequence[str]) -> dict[str, object]:
    return {name: getattr(record, name) for name in names}


def _environment(view: RunView) -> dict[str, object]:
    """Return the ranks' environment, and whether and how long it was built; empty for the notebook's packages."""
    spec, moved = view.spec, view.environment
    record: dict[str, object] = {"digest": spec.environment, "label": spec.environment_label}
    if moved is not None and moved.ready:
        record |= {"built": moved.built, "seconds": round(moved.seconds, 3), "packages": moved.packages}
    return record if spec.environment or moved is not None else {}
