"""The MIME bundle of a run's segment, as it is saved in the notebook."""

from __future__ import annotations

from sgpu_magic.render.html import render_segment_html
from sgpu_magic.render.segments import TextSegment
from sgpu_magic.render.text import error_line, render_segment_text
from sgpu_magic.render.view import RunView

RUN_MIME = "application/vnd.sgpu.run.v1+json"


def mime_bundle(
    view: RunView, segment: TextSegment, first: bool = True, last: bool = True, limit: int | None = None
) -> dict[str, object]:
    """Return HTML and text of a segment; the last one also carries the run as a small record.

    Args:
        view: The run.
        segment: One of `segments(view)`.
        first: It is the first of them.
        last: It is the last of them.
        limit: Bytes allowed for the HTML of a live form; its text gets a third of that.
    """
    # a live form's text is for few eyes: it gets a third beside the HTML
    text = render_segment_text(view, segment, first, last, None if limit is None else limit // 3)
    if segment.next_rank is not None:
        text = f"{text}\n[{segment.next_rank}] displays:".lstrip("\n")
    bundle: dict[str, object] = {
        "text/html": render_segment_html(view, segment, first, last, limit),
        "text/plain": text,
    }
    if last:
        bundle[RUN_MIME] = run_record(view)
    return bundle


def run_record(view: RunView) -> dict[str, object]:
    """Return the run as JSON: what it was, where it ran, how long, how it ended."""
    lease, failure, ended, shipped = view.lease, view.failure, view.ended, view.spec.shipped
    record: dict[str, object] = {
        "run_id": view.run_id,
        "name": view.name,
        "state": str(view.state),
        "ranks": view.ranks,
        "pool": view.pool,
        "host": view.host,
        "lines": view.total_lines,
        "shipped": {
            "names": list(shipped.names),
            "total_bytes": shipped.total_bytes,
            "seconds": round(shipped.seconds, 6),
        },
        "returned": [{"name": name.name, "all_ranks": name.all_ranks} for name in view.spec.outputs],
    }
    if lease is not None:
        record["lease"] = {
            "device_type": lease.device_type,
            "ranks": lease.ranks,
            "uuids": list(lease.uuids),
            "cpu_slots": lease.cpu_slots,
            "simulated": lease.simulated,
        }
    if ended is not None:
        record["durations"] = {
            "queued_s": round(ended.queued_s, 6),
            "starting_s": round(ended.starting_s, 6),
            "running_s": round(ended.running_s, 6),
            "total_s": round(ended.total_s, 6),
        }
    if failure is not None:
        record["failure"] = {
            "kind": str(failure.kind),
            "rank": failure.rank,
            "host": failure.host,
            "type": failure.type_name,
            "message": error_line(failure),
            "line": failure.line,
        }
    return record
