"""What is done to each run of a soak, drawn from a seed, and how the run may then end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

MAX_RANKS = 4
# strikes on the whole pool hit this share of the runs; during the others, one pool must not grow
STRIKES_UNTIL = 0.7

_BEGIN = """\
import os, subprocess, sys, time
import torch
import torch.distributed as dist
for number in range({lines}):
    print("line", number)
"""
_AWAY = """\
subprocess.Popen(["sleep", "3600"], start_new_session=True)
"""
_SUM = """\
total = torch.ones(1)
dist.all_reduce(total)
answer = int(total.item()) * 1000 + base
"""
_LONG = """\
print("begun", flush=True)
if rank == 0:
    time.sleep(600)
dist.barrier()
"""
_A_WHILE = """\
print("begun", flush=True)
if rank == 0:
    time.sleep({seconds})
dist.barrier()
"""
_ARRAY = """\
answer = int(big.sum())
back = big[: len(big) // 2] + rank
dist.barrier()
"""
_EXITS_ONCE = """\
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == world_size - 1:
    os._exit(7)
"""

State = str
Error = str


@dataclass(frozen=True)
class Kind:
    """A way to treat a run.

    Args:
        weight: How often it comes, against the others.
        body: The cell after its first lines.
        state: How the run ends when nothing else happens.
        error: What its notebook shows then; "" for success.
        options: Of the run.
        strike: What is done once it has begun; "" for nothing.
    """

    weight: int
    body: str
    state: State = "succeeded"
    error: Error = ""
    options: str = ""
    strike: str = ""


KINDS: dict[str, Kind] = {
    "small": Kind(22, _SUM),
    "array": Kind(12, _ARRAY, options="--out answer,back:all"),
    "user error": Kind(8, "if rank == world_size - 1:\n    raise KeyError(base)\ndist.barrier()", "failed", "KeyError"),
    "sys.exit": Kind(4, "if rank == 0:\n    sys.exit(3)\ndist.barrier()", "failed", "RemoteError"),
    "os._exit": Kind(4, "if rank == 0:\n    os._exit(3)\ndist.barrier()", "failed", "WorkerDied"),
    "timeout": Kind(4, _AWAY + _LONG, "timed out", "RunTimeout", "--timeout 1s"),
    "retried": Kind(5, _EXITS_ONCE + _SUM, options="--retries 1"),
    "interrupted": Kind(7, _AWAY + _LONG, "cancelled", "RunCancelled", strike="interrupt"),
    "cancelled": Kind(5, _AWAY + _LONG, "cancelled", "RunCancelled", strike="cancel"),
    "rank killed": Kind(8, _AWAY + _LONG, "failed", "WorkerDied", strike="rank"),
    "rank killed, retried": Kind(3, _A_WHILE + _SUM, options="--retries 1", strike="rank"),
    "attached": Kind(5, _A_WHILE + _SUM, options="--detach", strike="attach"),
    "kernel killed": Kind(4, _AWAY + _LONG, "cancelled", strike="kernel"),
    "kernel killed, attached": Kind(3, _A_WHILE + _SUM, options="--detach", strike="kernel, attach"),
    "pool killed": Kind(4, _A_WHILE + _SUM, strike="pool"),
    "zygote killed": Kind(3, _AWAY + _LONG, "failed", "WorkerDied", strike="zygote"),
    "agent killed": Kind(2, _AWAY + _LONG, "failed", "NodeLost", strike="agent"),
    "pool and agent killed": Kind(2, _AWAY + _LONG, "failed", "NodeLost", strike="pool agent"),
}
_WHOLE_POOL = ("pool killed", "zygote killed", "agent killed", "pool and agent killed")


@dataclass(frozen=True)
class Plan:
    """One run.

    Args:
        number: Its place in the soak; also a value that the cell takes along and gives back.
        kind: The key of `KINDS`.
        ranks: Its ranks.
        lines: That every rank prints first.
        elements: Of the array that an `array` run takes along.
        seconds: For which the work goes on.
    """

    number: int
    kind: str
    ranks: int
    lines: int
    elements: int
    seconds: float

    @property
    def name(self) -> str:
        return f"soak-{self.number}"

    @property
    def how(self) -> Kind:
        return KINDS[self.kind]

    @property
    def cell(self) -> str:
        options = self.how.options
        if "--out" not in options and "answer" in self.how.body:
            options += " --out answer"
        body = _BEGIN.replace("{lines}", str(self.lines)) + self.how.body.replace("{seconds}", f"{self.seconds:.2f}")
        return f"%%distributed -n {self.ranks} --name {self.name} {options}\n{body}"

    @property
    def setup(self) -> str:
        """What the notebook runs before."""
        array = f"big = numpy.full({self.elements}, base, dtype='int64')" if self.kind == "array" else "big = None"
        return f"import numpy\nbase = {self.number}\n{array}"

    @property
    def answer(self) -> int | None:
        """What the notebook has afterwards; None when nothing comes back."""
        if "answer" not in self.how.body:
            return None
        return self.elements * self.number if self.kind == "array" else self.ranks * 1000 + self.number

    def endings(self, strikes: Sequence[str]) -> set[tuple[State, Error]]:
        """How the run may end, with what its notebook shows; `?` where no notebook is asked.

        Args:
            strikes: What was done to the whole pool while it went on, its own strike among it.
        """
        how = self.how
        own = (how.state, how.error)
        also: set[tuple[State, Error]] = set()
        struck = {word for strike in strikes for word in strike.split()}
        foreign = list(strikes)
        if how.strike in foreign:
            foreign.remove(how.strike)
        theirs = {word for strike in foreign for word in strike.split()}
        if "agent" in theirs:
            also |= {("failed", "NodeLost")}
        if "zygote" in theirs:
            # the zygote may have been hit while it was starting
            also |= {("failed", "WorkerDied"), ("failed", "EnvironmentFailed")}
        if "pool" in struck and how.state == "cancelled":
            # a run that was cancelled between two services, or in the queue of the first
            also |= {("failed", how.error), ("failed", "NodeLost")}
        if "pool" in theirs and "--detach" in how.options:
            # a run that was still queued is not resubmitted
            also |= {("failed", "NodeLost")}
        if how.state == "cancelled":
            also |= {(state, how.error) for state, _ in also}
        return {own, *also}


def draw(seed: int, count: int) -> list[Plan]:
    """The plans of a soak."""
    source = random.Random(seed)
    names = list(KINDS)
    weights = [kind.weight for kind in KINDS.values()]
    calm_weights = [0 if name in _WHOLE_POOL else KINDS[name].weight for name in names]
    plans: list[Plan] = []
    for number in range(1, count + 1):
        chosen = source.choices(names, weights if number <= count * STRIKES_UNTIL else calm_weights)[0]
        plans.append(
            Plan(
                number=number,
                kind=chosen,
                ranks=source.choice([1, 2, 2, 2, 3, MAX_RANKS]),
                lines=source.choice([0, 1, 5, 200]),
                elements=source.choice([1_000, 200_000, 2_000_000]),
                seconds=source.uniform(0.3, 1.0),
            )
        )
    return plans
