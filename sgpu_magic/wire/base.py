"""The parts that all messages share: the base record, run ids, and the states and kinds of runs.

Ids are validated before they become parts of paths.
"""

from __future__ import annotations

import enum
import re
import secrets

import msgspec

_ID = re.compile(r"[0-9a-f]{8}")
SHORT_LENGTH = 4
# the short forms of this process's ids, and how many of them may be taken before they are used again
_MOST_TAKEN = 16**SHORT_LENGTH // 2
_taken: set[str] = set()


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of the records: immutable; fields with their default value are not sent."""


class OfRun(Record, frozen=True, kw_only=True):
    """Base of records that concern one run."""

    run_id: str


class Numbered(Record, frozen=True, kw_only=True):
    """Base of requests, which their sender numbers, and of replies, which carry the request's number."""

    request: int


def new_id() -> str:
    """Return a new id: 8 hexadecimal digits. Its short form is not that of an earlier one of this process."""
    while True:
        run_id = secrets.token_hex(4)
        if len(_taken) >= _MOST_TAKEN:
            _taken.clear()
        if short(run_id) not in _taken:
            _taken.add(short(run_id))
            return run_id


def is_valid_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def check_id(text: str) -> str:
    """Return `text` if it is an id.

    Raises:
        ValueError: It is not. Ids become parts of paths, so nothing else is accepted.
    """
    if not is_valid_id(text):
        raise ValueError(f"{text[:40]!r} is not a run id (8 hexadecimal digits)")
    return text


def short(run_id: str) -> str:
    """Return the first four digits of a run's id, as displayed. Commands accept them if they are unique."""
    return run_id[:SHORT_LENGTH]


# ---------------------------------------------------------------- states


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


class CancelReason(enum.StrEnum):
    """Why a run was cancelled or a session ended, where a part of sgpu-magic did it. Recorded as plain text."""

    INTERRUPT = "interrupted"
    SECOND_INTERRUPT = "interrupted again"
    CANCEL_BUTTON = "Cancel button"
    END_BUTTON = "End session button"
    COMMAND = "`sgpu cancel`"
    DISCONNECT = "disconnected"
    OWNER_GONE = "the notebook that started it is gone"


class ErrorKind(enum.StrEnum):
    """Why a request is refused: which class of `sgpu_magic.errors` the client raises."""

    USAGE = "UsageError"
    CAPACITY = "CapacityError"
    SESSION = "SessionError"
    ENVIRONMENT = "EnvironmentFailed"
    SERIALIZATION = "SerializationError"
    RUN_UNKNOWN = "RunUnknown"
    RUN_FILE_UNKNOWN = "RunFileUnknown"
    POOL = "PoolError"
    INTERNAL = "InternalError"


class RunLimit(enum.StrEnum):
    """A limit that ends a run as `TIMED_OUT`."""

    TIME = "time"
    COST = "cost"
    BUDGET = "budget"
    """The pool's budget."""


class RunKind(enum.StrEnum):
    """Kind of a run.

    Attributes:
        CELL: A cell: its last expression is shown, and its names stay in a session.
        CALL: A function call: its return value is sent back and not shown.
        SESSION: Ranks that stay and hold the lease for the cells that run in them. It runs no code itself.
        PUSH: Only sets the payload's names in a session's ranks.
        PULL: Only returns names of a session's ranks.
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
    # back to QUEUED: its node was lost and its ranks are placed again
    _S.PREPARING: frozenset({_S.STARTING, _S.QUEUED}) | _ENDS_EARLY,
    _S.STARTING: frozenset({_S.RUNNING, _S.SUCCEEDED, _S.QUEUED}) | _ENDS_EARLY,
    # back to STARTING: its ranks are started again
    _S.RUNNING: frozenset({_S.STARTING, _S.SUCCEEDED, _S.QUEUED}) | _ENDS_EARLY,
    # the run may have ended by itself before the cancel took effect
    _S.CANCELLING: frozenset({_S.CANCELLED, _S.SUCCEEDED, _S.FAILED, _S.TIMED_OUT}),
    **dict.fromkeys((_S.SUCCEEDED, _S.FAILED, _S.CANCELLED, _S.TIMED_OUT), frozenset()),
}


def can_move(old: RunState, new: RunState) -> bool:
    return new in TRANSITIONS[old]
