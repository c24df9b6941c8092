"""Why a run ends, is refused or is warned, in words."""

from __future__ import annotations

from sgpu_magic.formatting import format_exact_span, format_money, format_rough_span
from sgpu_magic.pool.format_capacity import format_amount, format_session
from sgpu_magic.pool.format_queue import format_blockers, format_holders, format_wait
from sgpu_magic.pool.format_refusal import format_refusal
from sgpu_magic.pool.scheduling.end_reason import (
    AlreadySubmitted,
    BudgetExhausted,
    BudgetNear,
    BudgetUsedUp,
    CellWaitLimitReached,
    CostLimitNear,
    CostLimitReached,
    CostWarning,
    EndReason,
    InUse,
    NoNodesInTime,
    SessionClosed,
    SessionEnded,
    SessionWasIdle,
    TimeLimitReached,
    WaitLimitReached,
    WaitsForOwnSessions,
)
from sgpu_magic.pool.scheduling.wait_reason import Holders
from sgpu_magic.wire.devices import Lease, type_label
from sgpu_magic.wire.option_text import OptionName, Text, TextWithOptions, text_of

_DAY_S = 86400
_WAIT_LONGER = text_of("Wait longer with ", OptionName("wait"))
_QUEUE_IT = text_of("Queue it with ", OptionName("wait", "10m"))


def format_end(reason: EndReason | None) -> Text:
    """Return why a run ends or is refused; "" without a reason."""
    match reason:
        case None:
            return ""
        case str() | TextWithOptions():
            return reason
        case TimeLimitReached(limit_s=limit_s):
            return f"reached its {format_exact_span(limit_s)} time limit"
        case SessionWasIdle(idle_s=idle_s):
            return f"nothing ran in it for {format_exact_span(idle_s)} (--idle)"
        case NoNodesInTime(wait_s=wait_s):
            return f"the cluster added nothing within {format_exact_span(wait_s)}"
        case WaitLimitReached():
            return _format_wait_limit(reason)
        case WaitsForOwnSessions():
            return _format_own_sessions(reason)
        case CellWaitLimitReached(wait_s=wait_s, reason=why):
            if wait_s:
                waited = format_exact_span(wait_s)
                return text_of(f"it has waited for {waited}: {format_wait(why)}. ", _WAIT_LONGER, ".")
            return text_of(f"{format_wait(why)}, and the run does not wait. ", _QUEUE_IT, ".")
        case CostLimitReached():
            return _format_cost_limit(reason)
        case BudgetUsedUp(limit=limit, days=days, currency=currency):
            return (
                f"{_format_budget(limit, days, currency)} is used up: its runs have cost "
                f"{format_money(reason.spent, currency)}, this one {format_money(reason.own, currency)} of it. Raise "
                "the setting budget and restart the pool, or take devices without a price"
            )
        case BudgetExhausted():
            return _format_budget_exhausted(reason)
        case SessionEnded():
            ended = ", whose devices it uses, ended" if reason.cell_started else " ended before the run could start"
            text = f"{format_session(reason.run_id, reason.name)}{ended}{_format_cause(reason.reason)}"
            return f"{text}." if reason.fails_cell else text
        case SessionClosed():
            has = "has ended" if reason.has_ended else "is ending"
            text = f"{format_session(reason.run_id, reason.name)} {has}{_format_cause(reason.reason)}"
            return f"{text}. Start another with %sgpu_connect."
        case AlreadySubmitted(run_id=run_id):
            return f"run {run_id} was already submitted; each run needs its own ID."
        case _:
            return format_refusal(reason)


def format_warning(warning: CostWarning) -> str:
    """Return what a run's followers are warned of."""
    match warning:
        case CostLimitNear(max_cost=max_cost, currency=currency, left_s=left_s):
            return (
                f"80 % of its cost limit of {format_money(max_cost, currency)} is used: it is stopped in "
                f"{format_rough_span(left_s)}"
            )
        case BudgetNear(limit=limit, days=days, currency=currency):
            budget = _format_budget(limit, days, currency)
            return f"80 % of {budget} is used; runs with a price are stopped when it is used up"


# ---------------------------------------------------------------- one reason


def _format_wait_limit(reached: WaitLimitReached) -> Text:
    need = format_amount(reached.need, reached.line)
    if isinstance(reached.reason, InUse):
        why = ", ".join([*format_holders(reached.reason.holders), *format_blockers(reached.reason.blockers)])
    else:
        why = format_wait(reached.reason)
    if reached.wait_s:
        waited = f"{need} did not become free within {format_exact_span(reached.wait_s)}"
        remedy = _WAIT_LONGER
    else:
        are = "is" if reached.free == 1 else "are"
        waited = f"the run needs {need}, {reached.free} {are} free, and it does not wait"
        remedy = _QUEUE_IT
    fewer, other_pool = OptionName("gpus"), OptionName("pool")
    return text_of(
        f"{waited}: {why}. ", remedy, ", ask for fewer with ", fewer, ", or choose another pool with ", other_pool, "."
    )


def _format_own_sessions(waits: WaitsForOwnSessions) -> Text:
    held = ", ".join(format_holders(Holders(waits.sessions)))
    return text_of(
        f"the run needs {format_amount(waits.need, waits.line)}, with {waits.free} free, and {held}. The notebook "
        "or program that waits for this run can't end a session of its own meanwhile. End one before with "
        "`%sgpu_disconnect NAME`, run in it, ask for fewer with ",
        OptionName("gpus"),
        ", choose another pool with ",
        OptionName("pool"),
        ", or wait all the same with ",
        OptionName("wait", "2h"),
        ".",
    )


def _format_cost_limit(reached: CostLimitReached) -> Text:
    currency, max_cost = reached.currency, reached.max_cost
    return text_of(
        f"its cost limit of {format_money(max_cost, currency)} is reached (",
        OptionName("max-cost", f"{max_cost:g}"),
        f"): {_format_lease(reached.lease)} at {format_money(reached.hourly, currency)} an hour cost "
        f"{format_money(reached.cost, currency)} in {format_rough_span(reached.ran_s)}. Raise ",
        OptionName("max-cost"),
        ", or take fewer devices with ",
        OptionName("gpus"),
        " or cheaper ones with ",
        OptionName("type"),
    )


def _format_budget_exhausted(budget: BudgetExhausted) -> str:
    in_s = budget.frees_in_s
    when = "when the active runs have ended" if in_s is None else f"in {format_rough_span(in_s)}"
    return (
        f"{_format_budget(budget.limit, budget.days, budget.currency)} is used up: the pool's runs have cost "
        f"{format_money(budget.spent, budget.currency)} in that time. There is room again {when}; until then only "
        "devices without a price are granted. Raise the setting budget and restart the pool, or wait."
    )


def _format_budget(limit: float, days: float, currency: str) -> str:
    return f"the pool's budget of {format_money(limit, currency)} in {format_exact_span(days * _DAY_S)}"


def _format_lease(lease: Lease | None) -> str:
    if lease is None:
        return "it"
    return f"{lease.ranks} {type_label(lease.device_type)}" + (" (simulated)" if lease.simulated else "")


def _format_cause(reason: EndReason | None) -> str:
    text = str(format_end(reason))
    return f": {text}" if text else ""
