"""The states of a run and the one table of moves between them."""

from __future__ import annotations

import enum


class RunState(enum.StrEnum):
    QUEUED = "queued"
    PREPARING = "preparing"
    STARTING = "starting"
    RUNNING = "running"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed out"

    @property
    def is_final(self) -> bool:
        return not TRANSITIONS[self]


class RunKind(enum.StrEnum):
    """What a run is.

    Attributes:
        CELL: A cell: its last expression is shown, its names stay in a session.
        CALL: A function's call: what it returns travels and is not shown.
        SESSION: Ranks that stay, and hold the lease for the cells that run in them. It has no code of its own.
        PUSH: Only sets the payload's names in a session's ranks.
        PULL: Only brings names of a session's ranks back.
    """

    CELL = "cell"
    CALL = "call"
    SESSION = "session"
    PUSH = "push"
    PULL = "pull"


class FailureKind(enum.StrEnum):
    USER_CODE = "user code"
    SERIALIZATION = "serialization"
    ENVIRONMENT = "environment"
    WORKER_DIED = "worker died"
    NODE_LOST = "node lost"
    TIMEOUT = "timeout"
    CAPACITY = "capacity"
    SESSION = "session"
    INTERNAL = "internal"


_S = RunState
_ENDS_EARLY = frozenset({_S.CANCELLING, _S.FAILED, _S.CANCELLED, _S.TIMED_OUT})

TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    _S.QUEUED: frozenset({_S.PREPARING, _S.STARTING}) | _ENDS_EARLY,
    # back to QUEUED: its node was lost, and its group is placed again
    _S.PREPARING: frozenset({_S.STARTING, _S.QUEUED}) | _ENDS_EARLY,
    _S.STARTING: frozenset({_S.RUNNING, _S.SUCCEEDED, _S.QUEUED}) | _ENDS_EARLY,
    # back to STARTING: its group is started again
    _S.RUNNING: frozenset({_S.STARTING, _S.SUCCEEDED, _S.QUEUED}) | _ENDS_EARLY,
    # a run that a cancel overtook may still have ended by itself
    _S.CANCELLING: frozenset({_S.CANCELLED, _S.SUCCEEDED, _S.FAILED, _S.TIMED_OUT}),
    _S.SUCCEEDED: frozenset(),
    _S.FAILED: frozenset(),
    _S.CANCELLED: frozenset(),
    _S.TIMED_OUT: frozenset(),
}


OWNER_GONE = "the notebook that started it is gone"
"""Why a run was cancelled that nobody could have come back to."""

COST_LIMIT = "its cost limit of"
BUDGET = "the pool's budget of"
"""How the reasons begin of runs that end as `TIMED_OUT` because of what they cost, not of their time."""


def can_move(old: RunState, new: RunState) -> bool:
    return new in TRANSITIONS[old]
