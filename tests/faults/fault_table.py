"""The table: what each fault does, and how a run ends that is struck by it in each of its states."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from fault_states import Situation, Stage, settle
from kernels import stop_process
from strikes import kill, pid_of, send

# in seconds; the home's settings have the same values
GRACE_S = 1.0
ADOPT_S = 8.0
_TIMEOUT_S = 4.0
_STOP_GRACE_S = 2.0
# added to the design's time limits for a loaded machine
_SLACK_S = 5.0
# a zygote imports torch before the next run can start
_COLD_S = 15.0


@dataclass(frozen=True)
class Ending:
    """How a run ends.

    Args:
        state: In the ledger.
        error: The type of the error below the cell; "" when the cell, or who attaches, gets the whole output.
        says: Words of the error; of the ledger's row when no notebook is left. `{rank}` and `{pid}` are the victim's.
        within_s: From the fault, or from the moment the work was let finish.
        continues: It ends when the work is let finish; without it, it ends by itself.
        frees_cell: The cell is over before the run is.
    """

    state: str
    error: str = ""
    says: str = ""
    within_s: float = _SLACK_S
    continues: bool = False
    frees_cell: bool = False


@dataclass(frozen=True)
class Expected:
    """What one cell of the table asks for.

    Args:
        run: How the run ends.
        ahead: How the run ends that it waits for; None when there is none.
    """

    run: Ending
    ahead: Ending | None = None


@dataclass(frozen=True)
class Fault:
    """Something bad.

    Args:
        strike: Does it.
        expected: By the run's state.
        options: Of the run that is struck; by state where one needs others.
        reported: Where the run's end is reported: the `cell`, who `attaches` from a new notebook, or `nobody`.
        kills_kernel: A new notebook is needed afterwards.
        hits_rank: It hits one rank alone.
        until_over: The words below the cell that show that the fault is overcome, before the work is let finish.
    """

    strike: Callable[[Stage, Situation], None]
    expected: dict[str, Expected]
    options: str = ""
    options_of: dict[str, str] = field(default_factory=dict)
    reported: str = "cell"
    kills_kernel: bool = False
    hits_rank: bool = False
    until_over: str = ""


# ---------------------------------------------------------------- what is done


def _kill_kernel(stage: Stage, situation: Situation) -> None:
    situation.kernel.kill()


def _restart_kernel(stage: Stage, situation: Situation) -> None:
    situation.kernel.restart()
    situation.kernel.check("%load_ext sgpu_magic")
    settle(situation.kernel)


def _interrupt(stage: Stage, situation: Situation) -> None:
    situation.kernel.interrupt()


def _end_pool(stage: Stage, situation: Situation) -> None:
    # handlers of ranks that are being stopped keep their grace; there are none in the other states
    handlers_s = _STOP_GRACE_S if situation.saves else 0.0
    stop_process(pid_of(stage.home, "pool"), signal.SIGTERM, handlers_s + _SLACK_S)


def _kill(*roles: str) -> Callable[[Stage, Situation], None]:
    def strike(stage: Stage, situation: Situation) -> None:
        pids = [pid_of(stage.home, role) for role in roles if role != "kernel"]
        if "kernel" in roles:
            # stop the notebook first: a notebook that sees its pool die starts the next one
            send(signal.SIGSTOP, situation.kernel.pid)
        # kill the notebook last: a surviving pool would cancel its run
        kill(*pids)
        if "kernel" in roles:
            situation.kernel.kill()

    return strike


def _signal_rank(number: int) -> Callable[[Stage, Situation], None]:
    return lambda stage, situation: send(number, situation.victim)


# ---------------------------------------------------------------- how runs end

WHOLE = Ending("succeeded", continues=True)
# after waiting for a new zygote
WHOLE_COLD = Ending("succeeded", within_s=_COLD_S)
WHOLE_NEXT = Ending("succeeded")
SAVED = Ending("cancelled", "RunCancelled", "cancelled by `sgpu cancel`", continues=True)

_NO_OWNER = "the notebook that started it is gone"
_AGENT_ENDED = "the agent on this machine ended unexpectedly"
_BOTH_ENDED = "the pool service and the agent of its ranks ended unexpectedly"
_ZYGOTE_ENDED = "the process that forks ranks ended unexpectedly"
_NOT_AGAIN = "its notebook did not submit it again"
_STOPPED = "the pool was stopped"


def _died(name: str) -> Ending:
    return Ending("failed", "WorkerDied", f"rank {{rank}} of 2 (process {{pid}}) was killed by {name}")


def _of_rank(number: signal.Signals) -> Fault:
    """One rank dies of a signal, which is reported; a run that is being stopped continues to stop."""
    died = _died(number.name)
    return Fault(
        _signal_rank(number),
        {
            "queued": Expected(WHOLE_NEXT, ahead=died),
            "starting": Expected(died),
            "running": Expected(died),
            "in-a-collective": Expected(died),
            "stopping": Expected(SAVED),
        },
        hits_rank=True,
    )


def _everywhere(
    run: Ending, *, queued: Expected, stopping: Ending, starting: Ending | None = None
) -> dict[str, Expected]:
    """The table's row of a fault that ends a run with ranks in one way."""
    return {
        "queued": queued,
        "starting": Expected(starting or run),
        "running": Expected(run),
        "in-a-collective": Expected(run),
        "stopping": Expected(stopping),
    }


_LOST_OWNER = Ending("cancelled", says=_NO_OWNER, within_s=GRACE_S + _SLACK_S)
_INTERRUPTED = Ending("cancelled", "RunCancelled", "interrupted", within_s=GRACE_S + _SLACK_S)
_RESTARTED = Ending("cancelled", says="interrupted", within_s=GRACE_S + _SLACK_S)
_AGENT_LOST = Ending("failed", "NodeLost", _AGENT_ENDED)
_ZYGOTE_LOST = Ending("failed", "WorkerDied", _ZYGOTE_ENDED)
_POOL_STOPPED = Ending("cancelled", "RunCancelled", _STOPPED)
_TIMED_OUT = Ending("timed out", "RunTimeout", "reached its 4 s time limit", within_s=_TIMEOUT_S + GRACE_S + _SLACK_S)
_BOTH_LOST = Ending("failed", "NodeLost", _BOTH_ENDED, within_s=_COLD_S)
# only the next pool service can report it, and no client is left to receive the report
_LOST_ALONE = Ending("failed", says=_BOTH_ENDED, within_s=GRACE_S + _SLACK_S)

FAULTS: dict[str, Fault] = {
    "kernel-killed": Fault(
        _kill_kernel,
        _everywhere(
            _LOST_OWNER,
            queued=Expected(Ending("cancelled", says=_NO_OWNER), ahead=WHOLE),
            stopping=Ending("cancelled", says="`sgpu cancel`", continues=True),
        ),
        reported="nobody",
        kills_kernel=True,
    ),
    "kernel-of-a-detached-run-killed": Fault(
        _kill_kernel,
        _everywhere(WHOLE, queued=Expected(WHOLE, ahead=WHOLE), stopping=SAVED),
        options="--detach",
        reported="attaches",
        kills_kernel=True,
    ),
    "kernel-restarted": Fault(
        _restart_kernel,
        _everywhere(
            _RESTARTED,
            queued=Expected(_RESTARTED, ahead=WHOLE),
            stopping=Ending("cancelled", says="`sgpu cancel`", continues=True),
        ),
        reported="nobody",
    ),
    "interrupted": Fault(
        _interrupt,
        _everywhere(
            _INTERRUPTED,
            queued=Expected(_INTERRUPTED, ahead=WHOLE),
            stopping=Ending("cancelled", "RunCancelled", "is being stopped", continues=True, frees_cell=True),
        ),
    ),
    "pool-killed": Fault(
        _kill("pool"),
        _everywhere(WHOLE, queued=Expected(WHOLE, ahead=WHOLE), stopping=SAVED),
        until_over="has taken over the run",
    ),
    "pool-ended": Fault(
        _end_pool,
        _everywhere(_POOL_STOPPED, queued=Expected(_POOL_STOPPED, ahead=_POOL_STOPPED), stopping=_POOL_STOPPED),
        options_of={"stopping": f"--grace {_STOP_GRACE_S:.0f}s"},
    ),
    "agent-killed": Fault(
        _kill("agent"),
        _everywhere(
            _AGENT_LOST,
            queued=Expected(WHOLE_COLD, ahead=_AGENT_LOST),
            stopping=Ending("cancelled", "RunCancelled", _AGENT_ENDED),
        ),
    ),
    "zygote-killed": Fault(
        _kill("zygote"),
        _everywhere(
            _ZYGOTE_LOST,
            queued=Expected(WHOLE_COLD, ahead=_ZYGOTE_LOST),
            stopping=Ending("cancelled", "RunCancelled", "cancelled by `sgpu cancel`"),
        ),
    ),
    "rank-killed": _of_rank(signal.SIGKILL),
    "rank-segfaulted": _of_rank(signal.SIGSEGV),
    "rank-aborted": _of_rank(signal.SIGABRT),
    "rank-stopped-until-the-timeout": Fault(
        _signal_rank(signal.SIGSTOP),
        _everywhere(
            _TIMED_OUT,
            queued=Expected(Ending("succeeded", within_s=_TIMED_OUT.within_s), ahead=_TIMED_OUT),
            # already being stopped: the grace applies
            stopping=Ending(
                "cancelled", "RunCancelled", "cancelled by `sgpu cancel`", within_s=_STOP_GRACE_S + _SLACK_S
            ),
        ),
        options=f"--timeout {_TIMEOUT_S:.0f}s",
        options_of={"stopping": f"--grace {_STOP_GRACE_S:.0f}s"},
    ),
    "pool-and-agent-killed": Fault(
        _kill("pool", "agent"),
        _everywhere(_BOTH_LOST, queued=Expected(WHOLE_COLD, ahead=_BOTH_LOST), stopping=_BOTH_LOST),
    ),
    "kernel-and-pool-killed": Fault(
        _kill("kernel", "pool"),
        _everywhere(
            _LOST_ALONE,
            queued=Expected(Ending("failed", says=_NOT_AGAIN, within_s=ADOPT_S + _SLACK_S), ahead=WHOLE),
            # a node that waits no longer for the next pool service stops its runs with their grace
            stopping=Ending("failed", says=_BOTH_ENDED, within_s=ADOPT_S + _STOP_GRACE_S + _SLACK_S),
        ),
        options_of={"stopping": f"--grace {_STOP_GRACE_S:.0f}s"},
        reported="nobody",
        kills_kernel=True,
    ),
    "kernel-pool-and-agent-killed": Fault(
        _kill("kernel", "pool", "agent"),
        _everywhere(
            _LOST_ALONE,
            queued=Expected(Ending("failed", says=_NOT_AGAIN, within_s=_COLD_S), ahead=_BOTH_LOST),
            stopping=_LOST_ALONE,
        ),
        reported="nobody",
        kills_kernel=True,
    ),
}
