"""What no pool takes, whatever is free: limits of a run, and what does not fit a session or a run in one. Pure."""

from __future__ import annotations

import math

from sgpu_magic.config import SEVEN_DAYS_S
from sgpu_magic.wire.ids import short
from sgpu_magic.wire.messages import Submit
from sgpu_magic.wire.records import RunSpec
from sgpu_magic.wire.states import RunKind

# CPU ranks may share slots, and each costs the agent several descriptors
_MOST_RANKS = 4096
_MAX_RETRIES = 100


def unfit(spec: RunSpec) -> str:
    """Why the run is not taken, a sentence; "" when it is."""
    is_session = spec.kind is RunKind.SESSION
    if spec.placement.ranks < 1:
        return f"a run needs at least one rank, not {spec.placement.ranks}."
    if spec.placement.ranks > _MOST_RANKS:
        return f"a run has at most {_MOST_RANKS} ranks, not {spec.placement.ranks}."
    if not 0 < spec.timeout_s <= SEVEN_DAYS_S:
        return "a run's time limit is more than 0 s and at most 7 days."
    if not 0 <= spec.retries <= _MAX_RETRIES:
        return f"a run is started again 0 to {_MAX_RETRIES} times."
    if spec.max_cost is not None:
        if not (math.isfinite(spec.max_cost) and spec.max_cost > 0):
            return f"a run may cost more than 0, and --max-cost {spec.max_cost:g} does not say how much."
        if spec.session:
            return "what runs in a session costs nothing of its own: give --max-cost to the session's %sgpu_connect."
    if is_session and spec.session:
        return "a session has a lease of its own: it can't begin in another."
    if spec.idle_s is not None and not (is_session and spec.idle_s > 0):
        return "only a session ends when nothing runs in it, after more than 0 s."
    if spec.retries and (is_session or spec.in_session):
        what = "a session" if is_session else "a cell in a session's ranks"
        return f"{what} is not started again by itself. Leave --retries out, or run the cell with --fresh."
    if spec.kind in (RunKind.PUSH, RunKind.PULL) and not spec.in_session:
        return "names are pushed to and pulled from a session's ranks. Connect first with %sgpu_connect."
    return ends_with_notebook(spec) if spec.detach else ""


def unstartable(submit: Submit) -> str:
    """Why no process can be started as this asks, "" when one can: the agent has other users' ranks too."""
    variables = submit.interpreter.variables | submit.context.environ
    words = [submit.interpreter.executable, submit.context.cwd, *submit.context.sys_path, *variables]
    if any("\0" in word for word in (*words, *variables.values())) or not all(map(_can_be_set, variables)):
        return "its environment variables, path or directory have a character that no process can be started with."
    return ""


def _can_be_set(variable: str) -> bool:
    return bool(variable) and "=" not in variable


def ends_with_notebook(spec: RunSpec) -> str:
    """Why the run can't be detached, "" when it can."""
    if spec.kind is RunKind.SESSION:
        return f"session {spec.name or short(spec.run_id)} can't go on alone: a session ends with its notebook."
    if spec.session:
        run = f"run {short(spec.run_id)}"
        return f"{run} can't go on alone: it is in a session, which ends with its notebook. Run it without one."
    return ""
