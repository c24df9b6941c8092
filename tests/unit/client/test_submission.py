"""Submission to a pool whose service dies, and the memory that holds payloads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_pools import RUN, ScriptedPool, Services, has_run, lacks_runs, spec_of
from waiting import eventually

from sgpu_magic.client import payload_memory
from sgpu_magic.client import pool as module
from sgpu_magic.client.pool import Pool
from sgpu_magic.client.run import Attachments
from sgpu_magic.config import Settings, load_settings
from sgpu_magic.errors import PoolError, RunUnknown, UsageError
from sgpu_magic.payload.buffers import INLINE_LIMIT
from sgpu_magic.payload.pack import Packed, pack_namespace
from sgpu_magic.wire.attachments import FilePayload, SharedPayload
from sgpu_magic.wire.base import Record, RunState
from sgpu_magic.wire.client import Attach, Cancel, Refused, Submit
from sgpu_magic.wire.events import PayloadReleased

KEY = b"k" * 32
SMALL = pack_namespace({"x": 1}, {}, KEY)


@pytest.fixture
def large() -> Packed:
    """Variables that are too large for a message."""
    return pack_namespace({"x": b"x" * (INLINE_LIMIT + 1)}, {}, KEY)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a pool with these services, one after the other."""
    made: list[Pool] = []

    def pool(*services: ScriptedPool | Exception) -> Pool:
        monkeypatch.setattr(module, "LocalConnector", lambda *_: Services(*services))
        made.append(Pool(Settings(state_dir=str(tmp_path / "state"))))
        return made[-1]

    yield pool
    for each in made:
        each.close()


def submit(client: Pool, packed: Packed = SMALL) -> Any:
    return client.submit(spec_of(), packed, KEY, {}, Attachments())


def dies_at_submit(message: Any) -> list[Record] | None:
    return None if isinstance(message, Submit) else []


def refuses(message: Any) -> list[Record]:
    if isinstance(message, Submit):
        return [Refused(request=message.request, error="UsageError", message="not like this.")]
    return []


# ---------------------------------------------------------------- the service dies


def test_a_run_that_no_service_took_is_submitted_to_the_next(make: Any):
    first, second = ScriptedPool(dies_at_submit), ScriptedPool(lacks_runs)
    run = submit(make(first, second))
    assert (first.kinds(), second.kinds()) == (["Submit"], ["Attach", "Submit"])
    assert (run.run_id, run.owned, run.link.lost.is_set()) == (RUN, True, False)


def test_a_run_that_the_dead_service_took_is_not_submitted_twice(make: Any, large: Packed):
    first, second = ScriptedPool(dies_at_submit), ScriptedPool(has_run)
    client = make(first, second)
    run = submit(client, large)
    assert second.sent[-1].owns
    # no message reports when the ranks have read the memory, so it is not reused
    assert client._memory._slots == []
    assert second.kinds() == ["Attach"]
    assert (run.owned, run.submission, run.link.lost.is_set()) == (True, None, False)


def test_a_queued_run_is_submitted_again_and_counts_its_events_anew(make: Any):
    first, second, third = ScriptedPool(), ScriptedPool(lacks_runs), ScriptedPool(lacks_runs)
    client = make(first, second, third)
    run = submit(client)
    run.last_seq = 5
    first.die()
    assert run.link.lost.is_set()
    client.find_again(run)
    assert second.kinds() == ["Attach", "Submit"]
    assert (second.sent[-2].after, run.last_seq, run.link.lost.is_set()) == (5, 0, False)
    # after placement, only the run's ranks know about it
    run.submission = None
    second.die()
    with pytest.raises(RunUnknown, match=f"there is no run {RUN}"):
        client.find_again(run)


def test_a_run_is_cancelled_at_the_next_service(make: Any):
    first, second = ScriptedPool(), ScriptedPool()
    run = submit(make(first))
    first.die()
    make(PoolError("it starts"), PoolError("it still starts"), second).cancel_in_background(run, "interrupted")
    eventually(lambda: second.kinds() == ["Attach", "Cancel"], what="it is cancelled")
    assert (second.sent[-1].run, second.sent[-1].reason) == (RUN, "interrupted")
    # the run must not be submitted again just to be cancelled
    assert run.submission is None


def test_a_run_that_no_service_has_needs_no_cancelling(make: Any):
    first, second = ScriptedPool(), ScriptedPool(lacks_runs)
    client = make(first, second)
    run = submit(client)
    first.die()
    before = threading.active_count()
    client.cancel_in_background(run, "interrupted")
    eventually(lambda: second.kinds() == ["Attach"] and threading.active_count() <= before, what="it is given up")
    assert not [message for message in second.sent if isinstance(message, Submit | Cancel)]


# ---------------------------------------------------------------- where the variables are


def test_a_refused_run_leaves_nothing(make: Any, large: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(payload_memory, "fits_memory", lambda _: False)
    pool = ScriptedPool(refuses)
    client = make(pool)
    with pytest.raises(UsageError, match="not like this"):
        submit(client, large)
    eventually(lambda: pool.kinds() == ["Submit", "Cancel"], what="it is cancelled, in case it was accepted after all")
    submitted, cancel = pool.sent[-2:]
    # without shared memory, the variables were in a file
    assert isinstance(submitted.payload.source, FilePayload)
    assert submitted.payload.source.size == large.total_bytes
    assert (type(cancel), cancel.run) == (Cancel, RUN)
    assert list((tmp_path / "state" / "uploads").iterdir()) == []
    assert not pool.link.is_used


def test_memory_is_used_again_once_its_run_is_over(make: Any, large: Packed):
    refusing = [False]
    pool = ScriptedPool(lambda message: refuses(message) if refusing[0] else has_run(message))
    client = make(pool)

    def descriptor() -> int:
        submit(client, large)
        source = next(message for message in reversed(pool.sent) if isinstance(message, Submit)).payload.source
        assert isinstance(source, SharedPayload)
        return source.fd

    first, second = descriptor(), descriptor()
    assert first != second
    pool.apply(PayloadReleased(kept=True))
    assert descriptor() in (first, second)
    # the memory of a refused run is free immediately
    refusing[0] = True
    with pytest.raises(UsageError):
        submit(client, large)
    refused = next(message for message in reversed(pool.sent) if isinstance(message, Submit))
    refusing[0] = False
    assert refused.payload.source.fd == descriptor()


def test_unused_memory_is_freed_after_a_while(make: Any, large: Packed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(payload_memory, "_IDLE_S", 0.01)
    client = make(ScriptedPool())
    memory = client._memory
    submit(client, large)
    memory.on_run_ended("other", accepted=True)
    # the run may still read the memory: a timer checks it repeatedly
    timer = memory._timer  # pyright: ignore[reportPrivateUsage]
    eventually(lambda: memory._timer is not timer, what="it is looked at")  # pyright: ignore[reportPrivateUsage]
    assert len(memory._slots) == 1  # pyright: ignore[reportPrivateUsage]
    memory.on_run_ended(RUN, accepted=True)
    eventually(lambda: not memory._slots, what="the memory is freed")  # pyright: ignore[reportPrivateUsage]


def test_a_successor_says_when_a_runs_memory_is_free(make: Any, large: Packed):
    first, second = ScriptedPool(), ScriptedPool()
    client = make(first, second)
    run = submit(client, large)
    first.die()
    client.find_again(run)
    assert isinstance(second.sent[-1], Attach)
    slot = client._memory._slots[0]
    assert not slot.released.is_set()
    second.apply(PayloadReleased(kept=True))
    assert slot.released.wait(10)


def test_a_run_is_attached_through_the_next_service_if_the_pool_dies_at_that_moment(tmp_path: Path):
    dies = ScriptedPool(lambda message: None if isinstance(message, Attach) else has_run(message))
    services = Services(dies, ScriptedPool())
    pool = Pool(load_settings({"SGPU_STATE_DIR": str(tmp_path), "SGPU_CONFIG": str(tmp_path / "none.toml")}))
    pool._connector = services  # type: ignore[assignment]
    run, state = pool.attach(RUN)
    assert (run.run_id, state, run.link.lost.is_set()) == (RUN, RunState.RUNNING, False)
    assert dies.link.lost.is_set()
    services.close()
