"""Why a pool can never place a request, in words that say what can be placed."""

from __future__ import annotations

import math
from collections.abc import Iterable

from sgpu_magic.formatting import count_of
from sgpu_magic.pool.format_capacity import format_amount, format_contents, format_line, format_quota, format_session
from sgpu_magic.pool.scheduling.capacity import SPREAD, STRATEGIES, STRICT_PACK
from sgpu_magic.pool.scheduling.placement_refusal import (
    NamedFreshRanks,
    NodeTooSmall,
    NoPrice,
    NoRanks,
    NoSuchRanks,
    NoSuchSession,
    NothingToPlace,
    NoTypeLargeEnough,
    NoTypeWithMemory,
    OneMachineOnly,
    OtherRankCount,
    PoolTooSmall,
    QuotaTooSmall,
    RefusalReason,
    SessionOnNodes,
    StrictPackOnNodes,
    TooFewLargeNodes,
    TooLittleMemory,
    TooManyFreshRanks,
    TooManyOnCpu,
    TypeMissing,
    UnevenNodes,
    UnknownStrategy,
)
from sgpu_magic.wire.base import short
from sgpu_magic.wire.devices import CPU, memory_text, type_label
from sgpu_magic.wire.option_text import OptionName, Text, text_of

_GB = 1e9
_OTHER_POOL = text_of("choose another pool with ", OptionName("pool"))
_LEAST_SIMULATED = 8
_GPUS, _NODES, _TYPE, _RANKS = (OptionName(name) for name in ("gpus", "nodes", "type", "ranks"))


def format_refusal(reason: RefusalReason) -> Text:
    """Return why a request can't be placed, and what to do about it."""
    match reason:
        case NoRanks(ranks=ranks):
            return text_of(f"{ranks} ranks were requested; a run has at least 1. Correct ", _GPUS, ".")
        case UnknownStrategy() | UnevenNodes() | StrictPackOnNodes() | OneMachineOnly():
            return _format_shape(reason)
        case PoolTooSmall():
            return _format_pool_too_small(reason)
        case NodeTooSmall():
            return _format_node_too_small(reason)
        case TooFewLargeNodes():
            return _format_too_few_nodes(reason)
        case TooLittleMemory():
            return _format_too_little_memory(reason)
        case NoTypeWithMemory():
            return _format_no_type_with_memory(reason)
        case NoTypeLargeEnough(ranks=ranks, lines=lines):
            has = " and ".join(f"{one.limit} {format_line(one.line)}" for one in lines)
            most = OptionName("gpus", max(one.limit for one in lines))
            on_cpu = OptionName("type", CPU)
            return text_of(
                f"this pool has {has}, and the run asks for {ranks}. Use ",
                most,
                " or fewer, run on CPU with ",
                on_cpu,
                ", or ",
                _OTHER_POOL,
                ".",
            )
        case NothingToPlace(ranks=ranks, contents=contents):
            has = format_contents(contents)
            return text_of(
                f"this pool can't place {count_of(ranks, 'rank')}. It has: {has}. Ask for fewer with ",
                _GPUS,
                " or ",
                _OTHER_POOL,
                ".",
            )
        case TooManyOnCpu(ranks=ranks, most=most, cores=cores, slots=slots):
            enough = math.ceil(ranks * slots / most)
            return text_of(
                f"this pool starts at most {most} ranks of one run on CPU, since the machine has "
                f"{count_of(cores, 'core')}, and the run asks for {ranks}. Ask for fewer with ",
                _GPUS,
                f", or raise the setting cpu_slots from {slots} to {enough} (SGPU_CPU_SLOTS={enough}) and restart the "
                "pool with `sgpu pool stop`.",
            )
        case TypeMissing():
            return _format_type_missing(reason)
        case NoPrice():
            return _format_no_price(reason)
        case QuotaTooSmall():
            return _format_quota_too_small(reason)
        case _:
            return _format_session_refusal(reason)


# ---------------------------------------------------------------- the shape of a request


def _format_shape(reason: UnknownStrategy | UnevenNodes | StrictPackOnNodes | OneMachineOnly) -> Text:
    match reason:
        case UnknownStrategy(strategy=strategy):
            known = ", ".join(STRATEGIES)
            return text_of(OptionName("placement"), f" {strategy[:40]!r} is not known. Use one of {known}.")
        case UnevenNodes(ranks=ranks, nodes=nodes):
            return text_of(
                f"{ranks} ranks can't be spread evenly over ",
                OptionName("nodes", nodes),
                ". Make ",
                _GPUS,
                " a multiple of ",
                _NODES,
                ", or leave ",
                _NODES,
                " out.",
            )
        case StrictPackOnNodes(nodes=nodes):
            return text_of(
                OptionName("placement", STRICT_PACK),
                " uses one node, and ",
                OptionName("nodes", nodes),
                " asks for more. Leave one of them out.",
            )
        case OneMachineOnly(nodes=nodes):
            return text_of(
                f"this pool is one machine, and the run asks for {nodes} nodes. Leave ",
                _NODES,
                " out, or ",
                _OTHER_POOL,
                ".",
            )


# ---------------------------------------------------------------- what the pool has


def _format_pool_too_small(small: PoolTooSmall) -> Text:
    has = " and ".join(
        f"{'up to ' if one.limit > one.count else ''}{format_amount(one.limit, one.line)}" for one in small.lines
    )
    return text_of(
        f"this pool has {has}, and the run asks for {small.ranks}. Use ",
        OptionName("gpus", small.most),
        " or fewer, another ",
        _TYPE,
        ", or another pool with ",
        OptionName("pool"),
        f". It has: {format_contents(small.contents)}.",
    )


def _format_node_too_small(small: NodeTooSmall) -> Text:
    amount = format_amount(small.ranks, small.line)
    has = f"no node of this pool has {amount}: the largest, {small.host}, has {small.largest}."
    fewer = OptionName("gpus", small.largest)
    if small.is_session:
        return text_of(
            f"a session's ranks are all on one node, and {has} Connect with ",
            fewer,
            " or fewer, run cells without a session to take several nodes, or ",
            _OTHER_POOL,
            ".",
        )
    return text_of(
        f"{has} Leave ",
        OptionName("placement", STRICT_PACK),
        " and ",
        OptionName("nodes", 1),
        " out to take several nodes, use ",
        fewer,
        " or fewer, or ",
        _OTHER_POOL,
        ".",
    )


def _format_too_few_nodes(few: TooFewLargeNodes) -> Text:
    have = "node of this pool has" if few.large_enough == 1 else "nodes of this pool have"
    return text_of(
        f"{few.large_enough} {have} {format_amount(few.per_node, few.line)} or more, and the run asks for "
        f"{few.per_node} on each of {few.nodes} (",
        _NODES,
        f"). The largest node, {few.host}, has {few.largest}. Ask for other ",
        _GPUS,
        " or ",
        _NODES,
        ", or ",
        _OTHER_POOL,
        ".",
    )


def _format_too_little_memory(little: TooLittleMemory) -> Text:
    line, enough = format_line(little.line), little.enough
    have = " or ".join(memory_text(size) if size else "an unknown amount" for size in little.sizes)
    if enough:
        count = f"{enough} {line} of this pool {'has' if enough == 1 else 'have'}"
    else:
        count = f"no {line} of this pool has"
    return text_of(
        f"{count} {little.min_memory_bytes / _GB:g} GB of memory (",
        OptionName("min-memory"),
        f"), and the run asks for {little.ranks}: they have {have}. Ask for less memory, fewer with ",
        _GPUS,
        ", or leave ",
        _TYPE,
        " out so that the pool chooses.",
    )


def _format_no_type_with_memory(reason: NoTypeWithMemory) -> Text:
    has = ", ".join(f"{one.count} {format_line(one.line)} with {_format_sizes(one.sizes)}" for one in reason.lines)
    return text_of(
        f"this pool can't place {reason.ranks} ranks on devices of one type with "
        f"{reason.min_memory_bytes / _GB:g} GB of memory (",
        OptionName("min-memory"),
        f"). It has: {has or format_contents(reason.contents)}. Ask for less memory, fewer with ",
        _GPUS,
        ", or ",
        _OTHER_POOL,
        ".",
    )


def _format_sizes(sizes: Iterable[int]) -> str:
    return " or ".join(map(memory_text, sizes))


def _format_type_missing(missing: TypeMissing) -> Text:
    asked = missing.device_type
    problem = f" Its GPUs could not be read: {missing.problem.rstrip('.')}." if missing.problem else ""
    has = f"this pool has no {type_label(asked)}. It has: {format_contents(missing.contents)}.{problem} "
    begin = "Leave "
    if asked != CPU and missing.contents.cpu_slots > 0:
        begin = "Run the ranks on CPU instead with SGPU_STAND_IN=cpu, leave "
    ways: list[Text | OptionName] = [begin, _TYPE, " out to use what is there, "]
    if asked != CPU and missing.is_one_machine:
        simulate = f"SGPU_SIMULATE={asked}:{max(_LEAST_SIMULATED, missing.ranks)}"
        ways.append(f"simulate devices on this machine's pool with {simulate}, ")
    ways += ["or ", _OTHER_POOL, "."]
    if asked != CPU:
        ways.append(" `%env NAME=VALUE` sets a variable in a notebook.")
    return text_of(has, *ways)


# ---------------------------------------------------------------- costs and quotas


def _format_no_price(missing: NoPrice) -> Text:
    kind = missing.device_type
    return text_of(
        OptionName("max-cost", f"{missing.max_cost:g}"),
        f" can't be enforced: this pool has no price for {kind} (it has one for "
        f"{', '.join(missing.priced) or 'nothing'}). Leave ",
        OptionName("max-cost"),
        f' out, or set the price in the settings, such as SGPU_PRICES="{kind}=1.20" for one device and hour, and '
        "restart the pool.",
    )


def _format_quota_too_small(small: QuotaTooSmall) -> Text:
    quota = small.quota
    return text_of(
        f"user {small.user} may have {format_quota(quota, small.kind)} at once in this pool (its setting user_quotas), "
        f"and the run asks for {small.ranks}. Ask for ",
        f"{quota} or fewer with " if quota else "another type with ",
        _GPUS if quota else _TYPE,
        ", choose another pool with ",
        OptionName("pool"),
        ", or ask this pool's operator for more.",
    )


# ---------------------------------------------------------------- sessions


def _format_session_refusal(
    reason: NoSuchSession | NamedFreshRanks | TooManyFreshRanks | OtherRankCount | NoSuchRanks | SessionOnNodes,
) -> Text:
    fresh = OptionName("fresh")
    match reason:
        case NoSuchSession(run_id=run_id):
            return f"there is no session {short(run_id)} in this pool. Start one with %sgpu_connect."
        case NamedFreshRanks():
            return text_of(_RANKS, " names existing ranks, and ", fresh, " starts new ones. Leave one of them out.")
        case TooManyFreshRanks(ranks=ranks, asked=asked):
            return text_of(
                f"{format_session(reason.run_id, reason.name)} has {ranks} ranks, and the run asks for {asked} new "
                "ones on its devices. Use ",
                OptionName("gpus", ranks),
                " or fewer, or end the session with %sgpu_disconnect and connect with more.",
            )
        case OtherRankCount(ranks=ranks, asked=asked):
            return text_of(
                f"{format_session(reason.run_id, reason.name)} has {ranks} ranks, and the run asks for {asked}. Leave ",
                _GPUS,
                " out, name some of them with ",
                _RANKS,
                ", or start new processes with ",
                fresh,
                ".",
            )
        case NoSuchRanks(ranks=ranks, missing=missing):
            has = "rank 0" if ranks == 1 else f"ranks 0 to {ranks - 1}"
            named = ", ".join(map(str, missing))
            session = format_session(reason.run_id, reason.name)
            return text_of(f"{session} has {has}, and the cell names {named}. Correct ", _RANKS, ".")
        case SessionOnNodes(nodes=nodes):
            option = OptionName("placement", SPREAD) if nodes is None else OptionName("nodes", nodes)
            return text_of(
                f"the ranks of {format_session(reason.run_id, reason.name)} are all on one node, and ",
                option,
                " asks for more. Leave it out, or run the cell without a session (%%distributed with the same "
                "options).",
            )
