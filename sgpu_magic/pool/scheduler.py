"""The pool's scheduler: typed stimuli in, a list of typed instructions out.

Pure: no clock (every stimulus carries `now`, seconds of any one clock), no socket, no thread. The service
feeds it what happened and does what it says. In the style of distributed's `worker_state_machine`.

    - First come, first served within a line (one device type, or the CPU slots). A later run that fits may
      pass an earlier one that does not.
    - A run that was first passed over `pass_over_s` ago lets nothing of its line pass any more, so that what
      becomes free is kept for it; unless it could not run here even if nothing else did.
    - `LaunchRun` gives the lease, `RunOver` frees it. The run stays queued until the agent's first
      `RunMoved`; until then the engine may hand the lease back with `LeaseRefused`.
    - A state changes only with a `MoveRun`, and only along `protocol.states.TRANSITIONS`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from sgpu_magic.pool.placement import Line, Refusal, Room, Want, resolve
from sgpu_magic.pool.scheduled_run import ScheduledRun, kept_for, span, waits_for
from sgpu_magic.pool.stimuli import (
    CancelRequested,
    EndRun,
    Instruction,
    InventoryChanged,
    LaunchRun,
    LeaseRefused,
    MoveRun,
    RefuseRun,
    RunAdopted,
    RunMoved,
    RunOver,
    RunSubmitted,
    Stimulus,
    StopRun,
    TellQueue,
)
from sgpu_magic.protocol.device_types import CPU
from sgpu_magic.protocol.records import Inventory, RunSpec
from sgpu_magic.protocol.states import RunState, can_move

# ---------------------------------------------------------------- the machine

# a run that is over holds its devices until its ranks have left; one that was not to wait waits for that
_LEAVING_S = 1.0


class Scheduler:
    """Decides which run gets which devices, and when.

    Args:
        inventory: What the node has; None holds submitted runs back until the first `InventoryChanged`.
        pass_over_s: Seconds from the first time a run is passed over until nothing may pass it.
    """

    def __init__(self, inventory: Inventory | None = None, *, pass_over_s: float = 600.0) -> None:
        self._inventory = inventory
        self._pass_over_s = pass_over_s
        self._runs: dict[str, ScheduledRun] = {}  # in order of submission, which a replaced value keeps
        self._refused: dict[str, str] = {}
        self._leases_given = 0
        self._now = float("-inf")

    @property
    def runs(self) -> tuple[ScheduledRun, ...]:
        """Every run that waits or holds a lease, in order of submission."""
        return tuple(self._runs.values())

    @property
    def cpu_slots_free(self) -> int:
        return 0 if self._inventory is None else self._room(self._inventory).cpu_slots_free

    def run(self, run_id: str) -> ScheduledRun | None:
        return self._runs.get(run_id)

    def holder(self, uuid: str) -> str | None:
        """The run that holds the device `uuid`, None when it is free."""
        return None if self._inventory is None else self._room(self._inventory).holder(uuid)

    def next_deadline(self) -> float | None:
        """When `TimePassed` is next useful, None when only events can change anything."""
        times: list[float | None] = []
        for run in self._runs.values():
            times += [self._queue_deadline(run), run.time_limit]
            if run.lease is None and run.passed_at is not None:
                keeps_from = run.passed_at + self._pass_over_s
                times.append(keeps_from if keeps_from > self._now else None)
        return min((time for time in times if time is not None), default=None)

    def handle(self, stimulus: Stimulus) -> list[Instruction]:
        """Take in what happened and return what to do, in this order.

        Stimuli about unknown runs, and reports that came too late to matter, change nothing.

        Raises:
            ValueError: `RunOver` with a state that is not final.
        """
        now = self._now = max(self._now, stimulus.now)
        match stimulus:
            case RunSubmitted(spec=spec):
                out = self._submit(spec, now)
            case RunAdopted():
                out = self._adopt(stimulus)
            case InventoryChanged(inventory=inventory):
                out = self._look_again(inventory)
            case RunMoved(run_id=run_id, state=state) if run_id in self._runs:
                out = self._moved(self._runs[run_id], state, now)
            case CancelRequested(run_id=run_id, reason=reason) if run_id in self._runs:
                out = self._stop(self._runs[run_id], RunState.CANCELLED, reason)
            case RunOver(run_id=run_id, state=state) if run_id in self._runs:
                out = self._over(self._runs[run_id], state, now)
            case LeaseRefused(run_id=run_id, uuids=uuids, why=why) if run_id in self._runs:
                out = self._lease_refused(self._runs[run_id], uuids, why)
            case _:
                out = []
        return out + self._settle(now)

    # ------------------------------------------------------------ one method per stimulus

    def _submit(self, spec: RunSpec, now: float) -> list[Instruction]:
        if spec.run_id in self._runs:
            message = f"run {spec.run_id} was submitted before; each needs an id of its own."
            return [RefuseRun(spec.run_id, "UsageError", message)]
        run = ScheduledRun(spec, submitted_at=now)
        if self._inventory is None:
            self._put(run)
            return []
        return self._judge(run, self._inventory)

    def _adopt(self, adopted: RunAdopted) -> list[Instruction]:
        if adopted.spec.run_id not in self._runs:
            run = ScheduledRun(
                adopted.spec,
                submitted_at=adopted.metered_at,
                state=adopted.state,
                accepted=True,
                lease=adopted.lease,
                begun=True,
                metered_at=adopted.metered_at,
            )
            self._put(run)
        return []

    def _look_again(self, inventory: Inventory) -> list[Instruction]:
        self._inventory = inventory
        self._refused.clear()
        waiting = [run for run in self._runs.values() if run.lease is None]
        return [instruction for run in waiting for instruction in self._judge(run, inventory)]

    def _judge(self, run: ScheduledRun, inventory: Inventory) -> list[Instruction]:
        """Give a waiting run its place in a line, a new one when the devices changed under it."""
        want = resolve(run.spec.placement, inventory)
        if isinstance(want, Refusal):
            if run.want is not None:
                return []  # its devices went away while it waited and may come back; its reason says so
            self._runs.pop(run.run_id, None)
            return [RefuseRun(run.run_id, want.error, want.message)]
        moved_line = run.want is not None and run.want.line != want.line
        self._put(replace(run, want=want, passed_at=None if moved_line else run.passed_at))
        return []

    def _moved(self, run: ScheduledRun, state: RunState, now: float) -> list[Instruction]:
        if run.lease is None:
            return []
        self._put(replace(run, begun=True))
        return self._move(run.run_id, state, "", now)

    def _stop(self, run: ScheduledRun, state: RunState, reason: str) -> list[Instruction]:
        if run.lease is None:
            return self._end(run, state, reason)
        if not can_move(run.state, RunState.CANCELLING):
            return []
        self._put(replace(run, stopping_as=state))
        moves = self._move(run.run_id, RunState.CANCELLING, reason, self._now)
        return [*moves, StopRun(run.run_id, state, reason)]

    def _over(self, run: ScheduledRun, state: RunState, now: float) -> list[Instruction]:
        if not state.is_final:
            raise ValueError(f"run {run.run_id} can't be over as {state!r}: a final state is needed")
        moves = self._move(run.run_id, state, "", now)
        del self._runs[run.run_id]
        return moves

    def _lease_refused(self, run: ScheduledRun, uuids: Iterable[str], why: str) -> list[Instruction]:
        if run.lease is None or run.begun:
            return []
        # at least one of its own devices is barred, else the same lease would come again and again
        barred = set(uuids) & set(run.lease.uuids) or set(run.lease.uuids) or {CPU}
        self._refused.update(dict.fromkeys(barred, why))
        run = replace(run, lease=None)
        self._put(run)
        return [] if run.stopping_as is None else self._end(run, run.stopping_as, "")

    # ------------------------------------------------------------ what follows from every stimulus

    def _settle(self, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for run in self.runs:
            if run.time_limit is not None and now >= run.time_limit:
                reason = f"its time limit of {span(run.spec.timeout_s)} is over"
                out += self._stop(run, RunState.TIMED_OUT, reason)
        if self._inventory is not None:
            out += self._place(self._inventory, now)
        # a run that gives up may have kept devices for itself: those behind it get their turn
        while given_up := self._give_up(now):
            out += given_up
            if self._inventory is not None:
                out += self._place(self._inventory, now)
        return out + self._tell()

    def _place(self, inventory: Inventory, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        room = self._room(inventory)
        closed: set[Line] = set()
        skipped: dict[Line, list[str]] = {}
        for run, want in self._waiting():
            if want.line in closed:
                continue
            lease = room.grant(want, self._lease_id(run.run_id))
            if lease is None:
                skipped.setdefault(want.line, []).append(run.run_id)
                if self._keeps_devices(run, want, room):
                    closed.add(want.line)
                continue
            room.take(run.run_id, lease)
            self._leases_given += 1
            self._put(replace(run, lease=lease, told=None, accepted=True))
            out.append(LaunchRun(run.run_id, lease))
            for passed in (self._runs[run_id] for run_id in skipped.pop(want.line, ())):
                if passed.passed_at is None:
                    self._put(replace(passed, passed_at=now))
        return out

    def _give_up(self, now: float) -> list[Instruction]:
        """End, or not even accept, the runs whose time in the queue is over."""
        out: list[Instruction] = []
        if self._inventory is None:
            return out
        room = self._room(self._inventory)
        keepers = self._keepers(room)
        for run, want in self._waiting():
            deadline = self._queue_deadline(run)
            if deadline is None or now < deadline:
                continue
            why = kept_for(keepers, run, want) if room.missing(want) == 0 else room.obstacles(want)
            need, free = room.amount(want), room.free(want)
            if run.spec.wait_s:
                waited = f"{need} did not become free within {span(run.spec.wait_s)}"
                remedy = "Wait longer with --wait"
            else:
                are = "is" if free == 1 else "are"
                waited = f"the run needs {need}, {free} {are} free, and it was not to wait"
                remedy = "Let it queue with --wait 10m"
            message = f"{waited}: {why}. {remedy}, ask for fewer with --gpus, or choose another pool with --pool."
            if run.accepted:
                out += self._end(run, RunState.FAILED, message)
            else:
                del self._runs[run.run_id]
                out.append(RefuseRun(run.run_id, "CapacityError", message))
        return out

    def _tell(self) -> list[Instruction]:
        out: list[Instruction] = []
        positions: Counter[Line | None] = Counter()
        room = None if self._inventory is None else self._room(self._inventory)
        keepers = {} if room is None else self._keepers(room)
        for run in self.runs:
            if run.lease is not None:
                continue
            if room is None or run.want is None:
                line, reason = None, "the pool is still looking for its devices"
            else:
                line, reason = run.want.line, waits_for(run, run.want, room, keepers)
            positions[line] += 1
            told = (positions[line], reason)
            if told != run.told:
                out.append(TellQueue(run.run_id, *told))
            if told != run.told or run.accepted != (line is not None):
                self._put(replace(run, told=told, accepted=line is not None))
        return out

    # ------------------------------------------------------------ small parts

    def _queue_deadline(self, run: ScheduledRun) -> float | None:
        deadline = run.queue_deadline
        if deadline is not None and any(other.state.is_final for other in self._runs.values()):
            return max(deadline, run.submitted_at + _LEAVING_S)
        return deadline

    def _move(self, run_id: str, state: RunState, reason: str, now: float) -> list[Instruction]:
        """The one place where a state changes. A move that the table lacks is a report that came too late."""
        run = self._runs[run_id]
        out: list[Instruction] = []
        if not can_move(run.state, state):
            # a report may skip the start: ranks that run, or are done, have started
            not_begun = run.metered_at is None and can_move(run.state, RunState.STARTING)
            if not (not_begun and can_move(RunState.STARTING, state)):
                return out
            out += self._move(run_id, RunState.STARTING, "", now)
            run = self._runs[run_id]
        metered_at = now if state is RunState.STARTING and run.metered_at is None else run.metered_at
        self._put(replace(run, state=state, metered_at=metered_at))
        return [*out, MoveRun(run_id, state, reason)]

    def _end(self, run: ScheduledRun, state: RunState, reason: str) -> list[Instruction]:
        moves = self._move(run.run_id, state, reason, self._now)
        del self._runs[run.run_id]
        return [*moves, EndRun(run.run_id, state, reason)]

    def _put(self, run: ScheduledRun) -> None:
        self._runs[run.run_id] = run

    def _waiting(self) -> list[tuple[ScheduledRun, Want]]:
        return [(run, run.want) for run in self._runs.values() if run.lease is None and run.want is not None]

    def _room(self, inventory: Inventory) -> Room:
        leases = {run.run_id: run.lease for run in self._runs.values() if run.lease is not None}
        return Room(inventory, leases, self._refused)

    def _keeps_devices(self, run: ScheduledRun, want: Want, room: Room) -> bool:
        if run.passed_at is None or self._now < run.passed_at + self._pass_over_s:
            return False
        return room.fits_when_empty(want)

    def _keepers(self, room: Room) -> dict[Line, str]:
        """By line, the first run that freed devices are kept for."""
        keepers: dict[Line, str] = {}
        for run, want in self._waiting():
            if want.line not in keepers and self._keeps_devices(run, want, room):
                keepers[want.line] = run.run_id
        return keepers

    def _lease_id(self, run_id: str) -> str:
        """An id for the next lease; the same stimuli give the same ids."""
        return hashlib.blake2b(f"{run_id} {self._leases_given}".encode(), digest_size=4).hexdigest()
