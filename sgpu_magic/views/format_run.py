"""A run in words: state, name, ranks, nodes, failure, shipped and returned variables, packages and MLflow run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple
from urllib.parse import urlsplit

from sgpu_magic.config import host_name
from sgpu_magic.formatting import clipped, count_of, format_bytes, format_seconds, names_text
from sgpu_magic.views import ansi
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.live.schema import Link, Tone
from sgpu_magic.views.run_notes import death_sentence, error_line, limit_of, timeout_sentence
from sgpu_magic.views.stacks import hang_heading
from sgpu_magic.views.units import TIMES
from sgpu_magic.wire.base import FailureKind, RunKind, RunState, short
from sgpu_magic.wire.devices import backend, type_label
from sgpu_magic.wire.rank_events import Failure

_MAX_NAMED = 4
_MAX_CHARS = 60

# these states are shown by their own names
_WORDS: dict[RunState, tuple[Tone, str]] = {
    RunState.QUEUED: ("plain", "○"),
    RunState.CANCELLING: ("warn", "■"),
    RunState.SUCCEEDED: ("good", "✓"),
    RunState.FAILED: ("bad", "✕"),
    RunState.CANCELLED: ("warn", "■"),
}
_MAX_NAME = 40
_MAX_URL_CHARS = 2000
BEFORE_RANKS = (RunState.QUEUED, RunState.PREPARING)
"""States in which no rank is being started yet."""


def header_line(view: RunView) -> str:
    """Return `train_digits · 4 ranks on local (cpu, gloo) · shipped model (45.1 MB in 38 ms)`."""
    where = (_where(view), "" if view.spec.in_session else hosts_text(view))
    parts = (mark_text(view), view.name, *where, attempt_text(view), shipped_text(view), label_text(view))
    return " · ".join(part for part in parts if part)


def mark_text(view: RunView) -> str:
    """Return `auto` for a cell that `%sgpu_auto` submitted, else ""."""
    return "auto" if view.spec.auto else ""


def ranks_text(view: RunView) -> str:
    """Return `4 ranks`, `3 of 4 ranks`, `rank 2 of 4`."""
    taking_part = len(view.rank_numbers)
    if taking_part == view.ranks:
        return count_of(view.ranks, "rank")
    if taking_part == 1:
        return f"rank {view.rank_numbers[0]} of {view.ranks}"
    return f"{taking_part} of {view.ranks} ranks"


def session_text(view: RunView) -> str:
    """Return `session work`, "" for a run that uses no session's lease."""
    spec = view.spec
    return f"session {spec.session_name or short(spec.session)}" if spec.session else ""


def format_placement(view: RunView) -> list[str]:
    """Return the ranks and their location, for the headers of the static HTML and the live view.

    A cell in a session names the session, whose own view shows its location.
    """
    if view.spec.in_session:
        return [ranks_text(view), session_text(view)]
    beside = f"beside {session_text(view)}" if view.spec.session else ""
    return [word for word in (format_devices(view), view.pool, hosts_text(view), beside) if word]


def format_devices(view: RunView) -> str:
    """Return `4 ranks · cpu, gloo` or `4 x A10, nccl` for the header, also saying whether devices are simulated."""
    lease = view.lease
    if lease is None:
        return ranks_text(view)
    if lease.device_type == "cpu":
        return f"{ranks_text(view)} · cpu, {backend(lease)}"
    simulated = " (simulated on cpu)" if lease.simulated else ""
    return f"{lease.ranks} {TIMES} {type_label(lease.device_type)}{simulated}, {backend(lease)}"


def shipped_text(view: RunView) -> str:
    """Return `shipped model, loader, cfg (45.1 MB in 38 ms)`, "" when nothing was shipped."""
    shipped = view.spec.shipped
    if not shipped.names:
        return ""
    cost = f"{format_bytes(shipped.total_bytes)} in {format_seconds(shipped.seconds)}"
    return f"shipped {names_text(shipped.names)} ({cost})"


def returned_text(view: RunView) -> str:
    """Return `returned history (1.2 kB)`, "" when nothing was requested or the run has not succeeded."""
    if view.state is not RunState.SUCCEEDED:
        return ""
    what = names_text(name.name for name in view.spec.outputs)
    if view.spec.kind is RunKind.CALL:
        values = sum(result.payload is not None for result in view.results)
        what = count_of(values, "value") if values else ""
    return f"returned {what} ({format_bytes(returned_bytes(view))})" if what else ""


def values_left_there(view: RunView) -> list[str]:
    """Return why the last values of ranks could not be returned."""
    problems = [each for each in view.results if each.value_problem][:4]
    return [f"rank {each.rank}'s last value could not be sent: {each.value_problem}" for each in problems]


def returned_bytes(view: RunView) -> int:
    """Return the size of the returned values: the first rank's, or every rank's if a name is requested from all."""
    everywhere = view.spec.kind is RunKind.CALL or any(name.all_ranks for name in view.spec.outputs)
    first = view.rank_numbers[0]
    payloads = [result.payload for result in view.results if everywhere or result.rank == first]
    layouts = [payload.layout for payload in payloads if payload is not None]
    return sum(layout.pickle_size + sum(size for _, size in layout.buffers) for layout in layouts)


def attempt_text(view: RunView) -> str:
    """Return `attempt 2 of 3`, "" for the first."""
    return f"attempt {view.attempt} of {view.attempts}" if view.attempt > 1 else ""


def _where(view: RunView) -> str:
    """Return `4 ranks on local (4 x A10, nccl)`, `4 ranks on local, 4 x A10 (simulated on cpu), gloo`."""
    lease, where = view.lease, f"{ranks_text(view)} on {view.pool}"
    if view.spec.in_session:
        return f"{ranks_text(view)} in {session_text(view)}"
    if lease is not None:
        device = "cpu" if lease.device_type == "cpu" else f"{lease.ranks} {TIMES} {type_label(lease.device_type)}"
        simulated = f", {device} (simulated on cpu), {backend(lease)}"
        where += simulated if lease.simulated else f" ({device}, {backend(lease)})"
    return f"{where}, beside {session_text(view)}" if view.spec.session else where


def new_host(view: RunView, ranks: Sequence[int], at: int) -> str:
    """Return the node of the rank listed at this position, "" when the one before it is on the same node."""
    hosts = _hosts(view)
    if not hosts or view.lease is None:
        return ""
    ends = list(accumulate(share.ranks for share in view.lease.shares))
    # compare numbers, as two nodes may have the same name
    node = bisect_right(ends, ranks[at])
    is_new = at == 0 or bisect_right(ends, ranks[at - 1]) != node
    return hosts[node] if is_new and node < len(hosts) else ""


def hosts_text(view: RunView) -> str:
    """Return `2 nodes: ml-1, ml-2`, only the number for many nodes, "" for one."""
    hosts = _hosts(view)
    count = count_of(len(hosts), "node") if hosts else ""
    return f"{count}: {', '.join(hosts)}" if 0 < len(hosts) <= _MAX_NAMED else count


def _hosts(view: RunView) -> list[str]:
    """Return the nodes' names in the order of their ranks; empty when all ranks are on one node."""
    shares = view.lease.shares if view.lease is not None else ()
    return [ansi.plain(share.host)[:_MAX_CHARS] for share in shares] if len(shares) > 1 else []


class StateWord(NamedTuple):
    """The first part of a run's header."""

    text: str
    tone: Tone
    shape: str = "●"


_OF_SESSIONS: dict[RunState, StateWord] = {
    RunState.QUEUED: StateWord("waits for devices", "plain", "○"),
    RunState.PREPARING: StateWord("starting", "busy"),
    RunState.CANCELLING: StateWord("disconnecting", "warn", "■"),
    # the usual ends of a session
    RunState.SUCCEEDED: StateWord("succeeded", "plain", "■"),
    RunState.CANCELLED: StateWord("cancelled", "plain", "■"),
}
_LEFT = StateWord("continues", "plain", "→")
_FINISHING = StateWord("finishing", "busy")
_CUT_OFF = StateWord("succeeded, cut off", "warn", "■")


def state_word(view: RunView) -> StateWord:
    """Return the word for a run's state."""
    if view.left:
        return _LEFT
    if view.state is RunState.TIMED_OUT:
        return StateWord(limit_of(view.failure, view.limit).word, "bad", "✕")
    if view.finishing:
        return _FINISHING
    if view.ended is not None and view.ended.cut_off and view.state is RunState.SUCCEEDED:
        return _CUT_OFF
    word = StateWord(f"{view.state}", *_WORDS.get(view.state, ("busy", "●")))
    if view.session is None:
        return word
    if view.session.running and view.state is RunState.RUNNING:
        cells = [clipped(name or "a cell", _MAX_NAME) for name in view.session.running]
        return StateWord(f"runs {names_text(cells, 1)}", "busy")
    if view.state is RunState.RUNNING:
        return StateWord("connected", "warn" if view.session.dead else "good")
    return _OF_SESSIONS.get(view.state, word)


def failed_line(view: RunView, brief: bool = False) -> str:
    """Return the first line of a failure, with the error in it when `brief` or when there is no traceback."""
    # a refused run has no duration; that of a run which failed before its ranks had started is their start
    after = f" after {duration.removeprefix('start ')}" if (duration := view.times.text()) else ""
    failure = view.failure
    word = limit_of(failure, view.limit).word if view.state is RunState.TIMED_OUT else view.state
    start = f"{view.name} · {word}{after}"
    if view.state is RunState.CANCELLED or failure is None:
        return f"{start} · {view.reason}" if view.reason else start
    if failure.kind is FailureKind.USER_CODE:
        where = _format_rank(failure, view.ranks)
        return " · ".join(part for part in (start, where, error_line(failure) if brief else "") if part)
    sentence = failure_sentence(view)
    return f"{start} · {sentence.split(chr(10), 1)[0] if brief else sentence}"


def failure_sentence(view: RunView) -> str:
    """Return why a run ended, for a failure without a traceback of the user's code."""
    failure = view.failure
    if failure is not None and failure.kind is FailureKind.TIMEOUT:
        return failure.message.strip() or timeout_sentence(view.spec.timeout_s)
    if failure is None:
        return ""
    stacks = view.ended.stacks if view.ended is not None else ()
    return hang_heading(failure, stacks, view.spec.cell) + death_sentence(failure, view.ranks)


def _format_rank(failure: Failure, ranks: int) -> str:
    """Return `rank 1 of 4 (this machine)`, "" for a failure without a rank."""
    if failure.rank is None:
        return ""
    here = "this machine" if failure.host.split(".")[0] == host_name() else failure.host
    return f"rank {failure.rank} of {ranks}" + (f" ({here})" if here else "")


def label_text(view: RunView) -> str:
    """Return `packages ai-4`, the environment of the ranks; "" for the notebook's own packages."""
    return f"packages {view.spec.environment_label}" if view.spec.environment_label else ""


def packages_text(view: RunView) -> str:
    """Return the progress of a run's packages: `packages: installing, 41 of 80 · 12.0 s · gpu-node-2`.

    Returns "" when nothing is installed, and once the ranks have started.
    """
    moved = view.environment
    if moved is None or view.is_final or view.state not in (*BEFORE_RANKS, RunState.STARTING):
        return ""
    name = label_text(view) or "packages"
    if moved.ready:
        return f"{name}: ready after {format_seconds(moved.seconds)}" if moved.built else ""
    if view.state not in BEFORE_RANKS:
        return ""
    count = f"{moved.done} of {moved.packages:,}" if moved.packages else ""
    step = ", ".join(filter(None, [moved.step, count]))
    return f"{name}: {' · '.join(filter(None, [step, format_seconds(moved.seconds), moved.host]))}"


def format_moved(view: RunView) -> list[str]:
    """Return what was returned and shipped, and the environment; nothing for a run that has not succeeded."""
    badly = view.is_final and view.state is not RunState.SUCCEEDED
    return [] if badly else [returned_text(view), shipped_text(view), label_text(view)]


def next_step(view: RunView) -> str:
    """Return why an active run is not followed here any more, or the command for a failed run's logs; else ""."""
    has_failed = view.is_final and view.state is RunState.FAILED
    return view.left or (f"full log: !sgpu logs {view.short_id}" if has_failed else "")


def tracked_link(view: RunView) -> Link | None:
    """Return a link to the MLflow run; None when its store has no server, or the run is unknown."""
    tracked = view.tracked
    if tracked is None or not page_url(tracked.url):
        return None
    where = f"{tracked.experiment}/{view.name}" if tracked.experiment else tracked.mlflow_run_id
    return Link(text=f"MLflow run {where}", url=tracked.url)


def tracked_text(view: RunView) -> str:
    """Return `MLflow run http://...`, without a server `MLflow run digits/0a1b2c...`; "" when it is not tracked."""
    tracked = view.tracked
    if tracked is None:
        return ""
    where = f"{tracked.experiment}/" if tracked.experiment else ""
    return f"MLflow run {page_url(tracked.url) or where + tracked.mlflow_run_id}"


def page_url(url: str) -> str:
    """Return the URL if it is that of a web page, else ""."""
    return url if _is_page(url) else ""


def _is_page(url: str) -> bool:
    """Whether the URL is a web page; `javascript:` and similar URLs are not."""
    if len(url) > _MAX_URL_CHARS or not url.isprintable() or any(char.isspace() for char in url):
        return False
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc)
