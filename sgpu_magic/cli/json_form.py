"""Runs, pools and amounts in the form that `--json` prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from sgpu_magic.cli.json_records import (
    Budget,
    DeviceRow,
    Money,
    NodeRow,
    OmittedPool,
    PoolDetails,
    PoolReachability,
    PoolStatusRow,
    RunRow,
    Status,
)
from sgpu_magic.client.pools import PoolStatusReply
from sgpu_magic.client.pools_file import LOCAL
from sgpu_magic.views import ansi
from sgpu_magic.views.format_pool import device_holders, format_problem, is_free
from sgpu_magic.wire.costs import cost_so_far
from sgpu_magic.wire.devices import ANY, CPU
from sgpu_magic.wire.pool_status import BudgetState, PoolStatus, RunSummary

_DAY_S = 24 * 3600.0


def time_of(seconds: float) -> datetime:
    """Return a time given in seconds since the epoch."""
    return datetime.fromtimestamp(seconds, UTC)


def time_or_none(seconds: float | None) -> datetime | None:
    """Return a time given in seconds since the epoch, None for None."""
    return None if seconds is None else time_of(seconds)


def text_or_none(text: str | None) -> str | None:
    """Return a text without escape sequences, None if it is empty."""
    return ansi.plain(text) if text else None


def amounts(sums: Mapping[str, float]) -> tuple[Money, ...]:
    """Return sums by currency as amounts, in the order of the currencies."""
    return tuple(Money(amount=amount, currency=currency) for currency, amount in sorted(sums.items()))


def omitted_pools(answers: Iterable[PoolStatusReply]) -> tuple[OmittedPool, ...]:
    """Return the pools that could not be asked."""
    return tuple(
        OmittedPool(pool=answer.name, problem=ansi.plain(answer.problem)) for answer in answers if answer.problem
    )


def run_row(run: RunSummary, pool: str, now: float) -> RunRow:
    """Return the row of a run.

    Args:
        run: The run.
        pool: Name of its pool.
        now: The current time, seconds since the epoch.
    """
    cost = cost_so_far(run, now)
    return RunRow(
        id=run.run_id,
        pool=pool,
        name=text_or_none(run.name),
        kind=run.kind,
        state=run.state,
        submitted_at=time_of(run.submitted_at),
        started_at=time_or_none(run.started_at),
        ended_at=time_or_none(run.ended_at),
        duration_s=running_s(run, now),
        ranks=run.ranks,
        gpus=_gpus(run),
        type=run.device_type,
        simulated=run.simulated,
        devices=run.uuids,
        notebook=text_or_none(run.notebook),
        session=text_or_none(run.session),
        user=text_or_none(run.user),
        queue_position=run.position,
        waiting_for=text_or_none(run.waiting_for),
        failure=text_or_none(run.failure),
        cost=None if cost is None else Money(amount=cost, currency=run.currency),
    )


def running_s(run: RunSummary, now: float) -> float | None:
    """Return seconds since a run's ranks started, until its end or now; None before, and if its end is unknown."""
    if run.started_at is None:
        return None
    if run.ended_at is not None:
        return max(0.0, run.ended_at - run.started_at)
    # the end of a run is unknown if its pool died with it
    return None if run.state.is_final else max(0.0, now - run.started_at)


def _gpus(run: RunSummary) -> int | None:
    if run.device_type == ANY:
        return None
    return 0 if run.device_type == CPU else run.ranks


def reachability(answer: PoolStatusReply) -> PoolReachability:
    """Return whether a pool answers."""
    if answer.problem:
        return "unreachable"
    return "not running" if answer.status is None else "up"


def kind_of(answer: PoolStatusReply) -> str:
    """Return `local`, `reserved` or `on demand`."""
    return LOCAL if answer.entry is None else answer.entry.kind


def address_of(answer: PoolStatusReply) -> str | None:
    """Return a pool's address, None for the local pool."""
    return None if answer.entry is None else answer.entry.address


def status_document(answers: Iterable[PoolStatusReply], now: float) -> Status:
    """Return the status of pools.

    Args:
        answers: What the pools have answered.
        now: The current time, seconds since the epoch.
    """
    rows = [
        PoolStatusRow(
            name=answer.name,
            kind=kind_of(answer),
            address=address_of(answer),
            state=reachability(answer),
            problem=text_or_none(answer.problem),
            details=None if answer.status is None else _details(answer.status, answer.name, now),
        )
        for answer in answers
    ]
    return Status(pools=tuple(rows))


def _details(status: PoolStatus, name: str, now: float) -> PoolDetails:
    inventory = status.inventory
    return PoolDetails(
        pid=status.pid,
        version=status.package_version,
        host=inventory.host,
        started_at=time_of(status.started_at),
        idle_ends_at=time_or_none(status.idle_ends_at),
        clients=status.clients,
        problems=tuple(map(ansi.plain, format_problem(status))),
        cpu_slots=inventory.cpu_slots,
        cpu_slots_free=max(0, status.cpu_slots_free),
        devices=_devices(status),
        nodes=tuple(
            NodeRow(id=node.node, host=node.host, cores=node.cores, cpu_slots=node.cpu_slots)
            for node in inventory.nodes
        ),
        budget=None if status.budget is None else _budget(status.budget),
        runs=tuple(run_row(run, name, now) for run in status.runs),
    )


def _devices(status: PoolStatus) -> tuple[DeviceRow, ...]:
    holders = device_holders(status)
    rows: list[DeviceRow] = []
    for device in status.inventory.devices:
        holder = holders.get(device.uuid)
        rows.append(
            DeviceRow(
                uuid=device.uuid,
                type=device.type,
                name=text_or_none(device.name),
                index=device.index,
                node=device.node or None,
                memory_bytes=device.memory_bytes or None,
                used_bytes=device.used_bytes,
                utilization_pct=device.utilization_pct,
                simulated=device.simulated,
                free=is_free(device, holders),
                run=None if holder is None else holder[0].run_id,
                outside_use=text_or_none(device.outside_use),
                unavailable=text_or_none(device.unavailable),
            )
        )
    return tuple(rows)


def _budget(budget: BudgetState) -> Budget:
    return Budget(
        limit=Money(amount=budget.limit, currency=budget.currency),
        spent=Money(amount=budget.spent, currency=budget.currency),
        period_s=budget.days * _DAY_S,
    )
