"""One real pool, several users: turns, priorities and quotas as its settings say, and what each of them is shown."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import pytest
from homes import Home
from pool_client import FollowedRun, PoolClient
from waiting import eventually

from sgpu_magic.client.connector import ask
from sgpu_magic.client.this_machine import this_owner
from sgpu_magic.views.pool_tables import status_text
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.events import QueueMoved, RanksStarted
from sgpu_magic.wire.pool_status import AskStatus, PoolStatus, with_changes
from sgpu_magic.wire.rank_events import OutputWritten

WAIT = "import threading\nprint('here', flush=True)\nthreading.Event().wait()"


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    settings = {
        "SGPU_CPU_SLOTS": "2",
        "SGPU_USER_PRIORITIES": "boss=5",
        "SGPU_USER_QUOTAS": "guest:cpu=1",
    }
    home = Home(settings)
    yield home
    home.close()


@pytest.fixture
def client(home: Home) -> Iterator[PoolClient]:
    client = PoolClient(home)
    yield client
    client.close()
    home.check_leaks()


def begin(client: PoolClient, user: str, body: str = WAIT, ranks: int = 2) -> FollowedRun:
    owner = msgspec.structs.replace(this_owner(), user=user)
    return client.begin(body, ranks=ranks, owner=owner, name=f"{user}s")


def states(client: PoolClient) -> dict[str, RunState]:
    status = client.pool.status()
    return {} if status is None else {run.run_id: run.state for run in status.runs}


@pytest.mark.slow
def test_a_client_that_asks_again_is_told_what_has_changed(client: PoolClient) -> None:
    link = client.pool._connector.get_link(start=True)
    before = begin(client, "alice", "pass")
    before.ended()
    whole = ask(link, AskStatus(request=0), PoolStatus)
    assert whole.changes is None
    assert before.run_id in [row.run_id for row in whole.runs]
    run = begin(client, "alice", "pass")
    run.ended()
    reported = ask(link, AskStatus(request=0, known=whole.version), PoolStatus)
    assert reported.changes is not None
    assert run.run_id in [row.run_id for row in reported.runs]
    now = with_changes(whole, reported)
    assert [row.run_id for row in now.runs] == [run.run_id, *(row.run_id for row in whole.runs)]
    # not the last version that this client received
    assert ask(link, AskStatus(request=0, known=whole.version), PoolStatus).changes is None
    assert states(client) == states(client) == {row.run_id: row.state for row in now.runs}


@pytest.mark.slow
def test_the_one_run_of_another_user_is_next_and_priorities_come_before_turns(client: PoolClient) -> None:
    first = begin(client, "alice")
    first.wait_for(OutputWritten)
    others = [begin(client, "alice", "pass") for _ in range(3)]
    bob = begin(client, "bob", "pass")
    boss = begin(client, "boss", "pass")

    def places() -> dict[str, int | None]:
        status = client.pool.status()
        return {run.run_id: run.position for run in status.runs} if status is not None else {}

    eventually(lambda: places().get(boss.run_id) == 1, 10)
    assert places()[bob.run_id] == 2
    assert [places()[run.run_id] for run in others] == [3, 4, 5]
    status = client.pool.status()
    assert status is not None
    text = status_text(status)
    assert "waiting: boss's boss" in text
    assert " user " in text
    first.run.cancel("over")
    ended: list[str] = []

    def note(run: FollowedRun) -> None:
        run.ended()
        ended.append(run.run_id)

    threads = [threading.Thread(target=note, args=(run,)) for run in (boss, bob, *others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    status = client.pool.status()
    assert status is not None
    began = sorted((run for run in status.runs if run.run_id in ended), key=lambda run: run.started_at or 0.0)
    assert [run.run_id for run in began][:2] == [boss.run_id, bob.run_id]


@pytest.mark.slow
def test_who_has_used_up_the_quota_is_told_so_and_begins_when_the_own_run_is_over(client: PoolClient) -> None:
    first = begin(client, "guest", ranks=1)
    first.wait_for(OutputWritten)
    second = begin(client, "guest", "pass", ranks=1)
    moved: QueueMoved = second.wait_for(QueueMoved)
    assert moved.reason == (
        "user guest may have 1 CPU rank at once (the pool's setting user_quotas): 1 is in use by run "
        f"{first.run_id[:4]}, and it needs 1 CPU rank"
    )
    # the slot is free for other users
    begin(client, "bob", "pass", ranks=1).ended()
    assert states(client)[second.run_id] is RunState.QUEUED
    first.run.cancel("over")
    second.wait_for(RanksStarted)
    assert second.ended().state is RunState.SUCCEEDED
