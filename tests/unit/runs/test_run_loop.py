"""How a run ends when its pool service died or its last events were lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_pools import RUN, ScriptedPool, spec_of
from waiting import eventually

from sgpu_magic.client.run import ClientRun
from sgpu_magic.errors import CapacityError, KeyRefused, PoolError, PoolVersionError, RunUnknown, SgpuError, UsageError
from sgpu_magic.runs.follow import run_loop
from sgpu_magic.runs.follow.run_loop import Ending, EventPump, Subscription, follow
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.publisher import SilentPublisher
from sgpu_magic.wire import events as ev
from sgpu_magic.wire.base import FailureKind, RunState


class Found:
    """The part of a pool that finds a run again.

    Args:
        answers: What each attempt raises; an attempt without one succeeds.

    Attributes:
        left: Runs that this process no longer follows.
        ended: Runs whose end was heard.
    """

    def __init__(self, *answers: SgpuError) -> None:
        self.answers = list(answers)
        self.left: list[str] = []
        self.ended: list[str] = []

    def find_again(self, run: ClientRun) -> None:
        if self.answers:
            raise self.answers.pop(0)
        after = ScriptedPool()
        run.move_to(after.link, after.link.follow(run.run_id), from_start=True)
        after.apply(ev.RunEnded(state=RunState.SUCCEEDED))
        after.die()

    def give_payload_up(self, run_id: str) -> None:
        self.left.append(run_id)

    def on_run_ended(self, run_id: str, state: RunState, at: float) -> None:
        self.ended.append(run_id)


@pytest.fixture
def pool() -> Iterator[ScriptedPool]:
    made = ScriptedPool()
    yield made
    made.link.close()


def followed_of(pool: ScriptedPool, found: Found, **others: Any) -> Subscription:
    spec = spec_of()
    run = ClientRun(spec, b"k" * 32, pool.link, pool.link.follow(RUN), Path("/runs/0000abcd"))
    return Subscription(run, RunView(spec, 100_000), SilentPublisher(), found, **others)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_loop, "_FIND_PATIENCE_S", 0.0)


DIED = "the pool of this test ended while the run was active"


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            RunUnknown("there is no run 0000."),
            FailureKind.NODE_LOST,
            f"{DIED}, and the run with it: there is no run 0000. Run the cell again",
        ),
        (
            PoolVersionError("it speaks another version."),
            FailureKind.NODE_LOST,
            f"{DIED}, and the run with it: it speaks another version. Run the cell again",
        ),
        (
            KeyRefused("your key was removed."),
            FailureKind.NODE_LOST,
            "this notebook can no longer follow the run: your key was removed.",
        ),
        (
            PoolError("nobody answers."),
            FailureKind.NODE_LOST,
            f"{DIED}, and no other could be reached: nobody answers",
        ),
        (
            CapacityError("it has no H100."),
            FailureKind.CAPACITY,
            f"{DIED}; submitted again, it was refused: it has no H100.",
        ),
        (
            UsageError("not like this."),
            FailureKind.NODE_LOST,
            f"{DIED}; submitted again, it was refused: not like this.",
        ),
    ],
)
def test_why_a_run_could_not_be_found_again_is_its_failure(
    pool: ScriptedPool, error: SgpuError, kind: FailureKind, message: str
):
    found = Found(error)
    followed = followed_of(pool, found)
    pool.apply(ev.StateChanged(state=RunState.RUNNING))
    pool.die()
    ending = follow(followed)
    assert ending is not None
    ended, frames = ending
    assert (ended.state, tuple(frames)) == (RunState.FAILED, ())
    assert ended.failure is not None
    assert (ended.failure.kind, ended.failure.message) == (kind, message)
    # the view shows it like an end that the pool reported
    assert followed.view.is_final
    assert (found.left, found.ended) == ([RUN], [RUN])


def test_the_next_service_is_waited_for(pool: ScriptedPool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_loop, "_FIND_PATIENCE_S", 60.0)
    found = Found(PoolError("it starts."), PoolError("it starts."))
    followed = followed_of(pool, found)
    pool.die()
    ending = follow(followed)
    assert ending is not None
    assert (ending[0].state, found.left, found.answers) == (RunState.SUCCEEDED, [], [])


def test_an_end_that_was_sent_before_the_death_counts(pool: ScriptedPool):
    found = Found(RunUnknown("there is no run 0000."))
    followed = followed_of(pool, found)
    pool.apply(ev.RunEnded(state=RunState.CANCELLED))
    pool.die()
    ending = follow(followed)
    assert ending is not None
    assert ending[0].state is RunState.CANCELLED
    assert len(found.answers) == 1


def test_a_run_that_ended_without_its_last_events_says_where_its_output_is(
    pool: ScriptedPool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_loop, "HISTORY_PATIENCE_S", 0.0)
    followed = followed_of(pool, Found())
    ending = follow(followed, has_ended=True)
    assert ending is not None
    assert ending[0].failure is not None
    assert ending[0].failure.message == "its last events were not kept; its ranks' output is in /runs/0000abcd"


def test_following_ends_when_it_is_told_to(pool: ScriptedPool):
    followed, stopped = followed_of(pool, Found()), threading.Event()
    pool.apply(ev.Detached())
    assert follow(followed, until_detached=True) is None
    stopped.set()
    assert follow(followed, stopped=stopped) is None
    assert follow(followed, until=0.0) is None


# ---------------------------------------------------------------- many runs


def test_of_many_runs_each_is_delivered_once(pool: ScriptedPool, capsys: pytest.CaptureFixture[str]):
    other = ScriptedPool()
    ends: list[tuple[str, RunState | None]] = []

    def received() -> None:
        raise RuntimeError("planted")

    def reported(name: str) -> Any:
        def end(ending: Ending | None) -> None:
            ends.append((name, None if ending is None else ending[0].state))

        return end

    follower = EventPump()
    follower.add(followed_of(pool, Found()), reported("first"))
    follower.add(followed_of(other, Found(), on_event=received), reported("faulty"))
    assert len(follower.following) == 2
    # a fault in one run does not affect the others
    other.apply(ev.StateChanged(state=RunState.RUNNING))
    pool.apply(ev.RunEnded(state=RunState.SUCCEEDED))
    eventually(lambda: ends == [("first", RunState.SUCCEEDED)], what="the first one's end")
    eventually(lambda: "RuntimeError: planted" in capsys.readouterr().err, what="the fault is printed")
    follower.close()
    assert ends[1:] == [("faulty", None)]
    follower.add(followed_of(other, Found()), reported("late"))
    assert ends[2:] == [("late", None)]
    other.link.close()


def test_a_run_that_is_added_while_another_wakes_the_follower_is_not_missed(pool: ScriptedPool):
    other, follower = ScriptedPool(), EventPump()
    ends: list[tuple[str, Ending | None]] = []

    class Woken(threading.Event):
        """Adds a run that ends immediately, between the wake-up for the other one and its handling."""

        has_added = False

        def wait(self, timeout: float | None = None) -> bool:
            woken = super().wait(timeout)
            if not self.has_added:
                self.has_added = True
                follower.add(followed_of(other, Found()), lambda ending: ends.append(("late", ending)))
                other.apply(ev.RunEnded(state=RunState.SUCCEEDED))
            return woken

    follower._woken = Woken()  # pyright: ignore[reportPrivateUsage]
    follower.add(followed_of(pool, Found()), lambda ending: ends.append(("first", ending)))
    eventually(lambda: [name for name, _ in ends] == ["late"], what="the end of the run that was added late")
    follower.close()
    assert ends[0][1] is not None
    assert ends[1:] == [("first", None)]
    other.link.close()


def test_an_ended_run_without_an_end_is_given_up(pool: ScriptedPool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_loop, "HISTORY_PATIENCE_S", 0.0)
    ends: list[Ending | None] = []
    follower = EventPump()
    follower.add(followed_of(pool, Found()), ends.append, has_ended=True)
    eventually(lambda: ends, what="it is given up")
    assert ends[0] is not None
    assert ends[0][0].state is RunState.FAILED
    eventually(lambda: not follower.following)
    follower.close()


def test_a_silent_link_is_a_note_until_it_is_heard_again(pool: ScriptedPool):
    followed = followed_of(pool, Found())
    pool.silent_s = 12.0
    followed.on_link_change()
    assert followed.view.silence.startswith("reconnecting: the pool of this test has been silent since ")
    pool.silent_s = 0.0
    followed.on_link_change()
    assert followed.view.silence == ""
