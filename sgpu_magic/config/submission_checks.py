"""Why no pool accepts a submission, whatever devices are free: each check returns a sentence, or None. Pure."""

from __future__ import annotations

import math

from sgpu_magic.config import SEVEN_DAYS_S
from sgpu_magic.wire.base import RunKind, short
from sgpu_magic.wire.client import Submit
from sgpu_magic.wire.option_text import OptionName, Text, text_of
from sgpu_magic.wire.run import RunSpec

# CPU ranks may share slots, and each costs the agent several descriptors
_MOST_RANKS = 4096
_MAX_RETRIES = 100


def unfit(spec: RunSpec) -> Text | None:
    """Return why the run is not accepted, a sentence; None when it is."""
    is_session = spec.kind is RunKind.SESSION
    if spec.placement.ranks < 1:
        return f"a run needs at least one rank, not {spec.placement.ranks}."
    if not 0 < spec.timeout_s <= SEVEN_DAYS_S:
        return "a run's time limit must be more than 0 s and at most 7 days."
    if spec.placement.ranks > _MOST_RANKS:
        return f"a run has at most {_MOST_RANKS} ranks, not {spec.placement.ranks}."
    if not 0 <= spec.retries <= _MAX_RETRIES:
        return f"a run can be restarted 0 to {_MAX_RETRIES} times."
    if spec.max_cost is not None and not (math.isfinite(spec.max_cost) and spec.max_cost > 0):
        return text_of(OptionName("max-cost"), f" takes a finite number greater than 0, not {spec.max_cost:g}.")
    if spec.max_cost is not None and spec.session:
        return "a run in a session has no cost of its own: give the limit when you connect the session."
    if is_session and spec.session:
        return "a session has its own lease: it can't start in another session."
    if spec.idle_s is not None and not (is_session and spec.idle_s > 0):
        return "only a session has an idle limit, and it must be more than 0 s."
    if spec.retries and (is_session or spec.in_session):
        what = "a session" if is_session else "a cell in a session's ranks"
        return text_of(
            f"{what} is not restarted automatically. Leave ",
            OptionName("retries"),
            " out, or run the cell with ",
            OptionName("fresh"),
            ".",
        )
    if spec.kind in (RunKind.PUSH, RunKind.PULL) and not spec.in_session:
        return "names are pushed to and pulled from a session's ranks. Connect first with %sgpu_connect."
    return ends_with_notebook(spec) if spec.detach else None


def unstartable(submit: Submit) -> str | None:
    """Return why no process can be started from this message; None when one can.

    Checked here because a failure would hit the agent, which also serves other users' ranks.
    """
    variables = submit.interpreter.variables | submit.context.environ
    words = [submit.interpreter.executable, submit.context.cwd, *submit.context.sys_path, *variables]
    no_name = any("=" in name or not name for name in variables)
    if no_name or any("\0" in word for word in (*words, *variables.values())):
        return "its environment variables, path or directory contain a character that no process can be started with."
    return None


def ends_with_notebook(spec: RunSpec) -> str | None:
    """Return why the run can't be detached; None when it can."""
    if spec.kind is RunKind.SESSION:
        return f"session {spec.name or short(spec.run_id)} can't be detached: a session ends with its notebook."
    if spec.session:
        run = f"run {short(spec.run_id)}"
        return f"{run} can't be detached: it is in a session, which ends with its notebook. Run it without one."
    return None
