"""A pool of another machine: really served on a port, reached over a line that breaks."""

from __future__ import annotations

import contextlib
import getpass
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pool_client import FollowedRun, PoolClient
from served_pools import SGPU, RemoteUser, ServedPool, served_pool
from stories import render_text
from tcp_proxy import Proxy
from waiting import eventually

from sgpu_magic.client import network_transport
from sgpu_magic.config import host_name
from sgpu_magic.errors import KeyRefused, PoolError, RunUnknown
from sgpu_magic.runs.follow.run_loop import Subscription
from sgpu_magic.views.fold import RunView
from sgpu_magic.views.html import render_html
from sgpu_magic.views.publisher import TerminalPublisher
from sgpu_magic.wire.base import CancelReason, RunState
from sgpu_magic.wire.rank_events import OutputWritten
from sgpu_magic.wire.run import Owner

COUNT = """
import pathlib, time
for number in range(200):
    print(number, flush=True)
    time.sleep(0.02)
"""
WAIT = "import time\nprint('begun', flush=True)\nwhile True: time.sleep(0.01)"


@pytest.fixture
def line(served: ServedPool) -> Iterator[Proxy]:
    made = Proxy(served.port)
    yield made
    made.close()


def numbers(run: FollowedRun) -> list[int]:
    return [int(word) for word in run.printed.get(0, "").split()]


def test_a_run_on_another_machine(served: ServedPool, ann: RemoteUser):
    run = ann.client.begin("print('hello from', rank)\nrank * 10", names={"x": 1})
    assert run.ended().state is RunState.SUCCEEDED
    assert run.printed == {0: "hello from 0\n", 1: "hello from 1\n"}
    assert run.values == [0, 10]
    status = ann.client.pool.status()
    assert status is not None
    assert status.pool == "team"
    assert [row.user for row in status.runs if row.run_id == run.run_id] == ["ann"]


def test_doctor_goes_the_way_to_a_served_pool(served: ServedPool, ann: RemoteUser):
    found = ann.sgpu("doctor", "--pool", ann.entry.name)
    assert re.findall(r"^ok +(\w+)", found.stdout, re.M) == ["key", "name", "port", "pool"], found
    (ann.home.path / "client.key").rename(ann.home.path / "elsewhere.key")
    try:
        found = ann.sgpu("doctor", "--pool", ann.entry.name)
        assert "sgpu pool keygen" in found.stdout
        assert found.returncode == 1
    finally:
        (ann.home.path / "elsewhere.key").rename(ann.home.path / "client.key")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "says"),
    [("team", "a pool named team is already running on "), ("other", "can't listen at tcp://127.0.0.1:.* in use")],
)
def test_a_pool_is_served_once(served: ServedPool, name: str, says: str):
    done = subprocess.run(
        [SGPU, "pool", "serve", "--listen", served.listen, "--name", name],
        env=served.home.environ, capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert done.returncode == 1
    assert re.search(says, done.stderr)
    assert done.stdout == ""


def test_the_operator_is_told_who_runs_what_as_whom(served: ServedPool):
    assert f"add it with: sgpu pool add team {served.entry.address} --key '{served.entry.key}'" in served.words
    assert f"all ranks run as the one OS user {getpass.getuser()}" in served.words
    assert "run one pool per user" in served.words


# ---------------------------------------------------------------- a line that breaks


def test_a_link_that_is_cut_costs_nothing_but_time(served: ServedPool, ann: RemoteUser, line: Proxy):
    client = ann.new_client(line.address)
    run = client.begin(COUNT, ranks=1)
    run.wait_for(OutputWritten, 3)
    line.cut()
    seen = len(run.events)
    eventually(lambda: "120\n" in served.home.log(run.run_id, 0), 20, "the run does not go on")
    assert len(run.events) == seen
    line.mend()
    assert run.ended().state is RunState.SUCCEEDED
    assert numbers(run) == list(range(200))
    client.close()


@pytest.mark.slow
def test_many_cuts_in_one_run(ann: RemoteUser, line: Proxy):
    client = ann.new_client(line.address)
    run = client.begin(COUNT, ranks=2)
    for count in range(5, 35, 5):
        run.wait_for(OutputWritten, count)
        before = line.connections
        line.reset()
        eventually(lambda before=before: line.connections > before, 10, "it does not come back")
    assert run.ended().state is RunState.SUCCEEDED
    assert run.printed == {rank: "".join(f"{number}\n" for number in range(200)) for rank in (0, 1)}
    client.close()


@pytest.mark.slow
def test_a_line_that_swallows_everything_is_told_and_caught_up(
    served: ServedPool, ann: RemoteUser, line: Proxy, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(network_transport, "_SILENT_S", 1.0)
    client = ann.new_client(line.address)
    run = client.begin(COUNT, ranks=1)
    run.wait_for(OutputWritten, 3)
    assert run.run.link.transport.silent_s == 0
    line.hold()
    eventually(lambda: run.run.link.transport.silent_s > 1, 10, "nobody noticed")
    view = RunView(run.run.spec, pool="team")
    stream = io.StringIO()
    followed = Subscription(run.run, view, TerminalPublisher(view, stream), client.pool)
    followed.on_link_change()
    reported = rf"the pool team \({re.escape(line.address)}\) has been silent since [\d:]+; the run continues there"
    assert re.search(reported, render_text(view))
    assert re.search(reported, render_html(view))
    eventually(lambda: "120\n" in served.home.log(run.run_id, 0), 20, "the run does not go on")
    line.mend()
    eventually(lambda: not run.run.link.transport.silent_s, 10, "nobody noticed")
    followed.on_link_change()
    assert "silent" not in render_text(view)
    assert run.ended().state is RunState.SUCCEEDED
    assert numbers(run) == list(range(200))
    client.close()


@pytest.mark.slow
def test_a_question_whose_answer_was_lost_is_done_once(served: ServedPool, ann: RemoteUser, line: Proxy):
    client = ann.new_client(line.address)
    assert client.pool.status() is not None
    runs = set(served.home.ledger())
    line.hold_answers()
    with ThreadPoolExecutor(1) as thread:
        submitted = thread.submit(client.begin, "print('once')", ranks=1)
        eventually(lambda: len(set(served.home.ledger()) - runs) == 1, 10, "it was not submitted")
        assert not submitted.done()
        line.mend()
        run = submitted.result(20)
    assert run.ended().state is RunState.SUCCEEDED
    assert run.printed == {0: "once\n"}
    assert set(served.home.ledger()) - runs == {run.run_id}
    client.close()


@pytest.mark.slow
def test_a_cancel_while_the_line_is_cut_arrives_later(ann: RemoteUser, line: Proxy):
    client = ann.new_client(line.address)
    run = client.begin(WAIT, ranks=1)
    run.wait_for(OutputWritten)
    line.cut()
    run.run.cancel("it was told so")
    line.mend()
    ended = run.ended()
    assert (ended.state, ended.reason) == (RunState.CANCELLED, "it was told so")
    client.close()


# ---------------------------------------------------------------- clients that go


@pytest.mark.slow
def test_goodbye_ends_what_was_not_detached(ann: RemoteUser):
    client = ann.new_client()
    mine, kept = client.begin(WAIT, ranks=1), client.begin(WAIT, ranks=1, detach=True)
    mine.wait_for(OutputWritten)
    kept.wait_for(OutputWritten)
    client.close()
    other = ann.new_client()
    row = eventually(lambda: _row(other, mine.run_id, RunState.CANCELLED), 10, "it goes on")
    assert row.user == "ann"
    found, state = other.pool.attach(kept.run_id[:8])
    assert state is RunState.RUNNING
    found.cancel("it is enough")
    eventually(lambda: _row(other, kept.run_id, RunState.CANCELLED), 10, "it goes on")
    other.close()


@pytest.mark.slow
def test_a_client_that_stays_away_too_long_is_gone_and_so_is_a_pool():
    timeouts = {"SGPU_LINK_TIMEOUT_S": "5", "SGPU_ADOPT_TIMEOUT_S": "2"}
    with served_pool(timeouts) as pool, contextlib.closing(Proxy(pool.port)) as line:
        client = pool.user("ann").new_client(line.address)
        mine, kept = client.begin(WAIT, ranks=1), client.begin(WAIT, ranks=1, detach=True)
        mine.wait_for(OutputWritten)
        kept.wait_for(OutputWritten)
        line.cut()
        eventually(lambda: pool.home.ledger()[mine.run_id].state == "cancelled", 20, "it goes on without an owner")
        assert pool.home.ledger()[kept.run_id].state == "running"
        line.mend()
        ended = mine.ended()
        assert (ended.state, ended.reason) == (RunState.CANCELLED, CancelReason.OWNER_GONE)
        # no service follows: this pool's operator starts none, and ranks wait no longer than configured
        pool.kill()
        assert pool.home.rank_pids()
        eventually(lambda: not pool.home.processes(), 20, lambda: f"left: {pool.home.processes()}")
        client.close()


# ---------------------------------------------------------------- a pool that goes


@pytest.mark.slow
def test_a_pool_that_is_killed_and_started_again_has_its_runs():
    """The owner's process is on another machine: that there is none of its number here says nothing."""
    with served_pool() as pool:
        ann, ben = pool.user("ann"), pool.user("ben")
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        owner = Owner(pid=ended.pid, host=host_name(), user="root")
        run = ann.client.begin(COUNT, ranks=2, owner=owner)
        run.wait_for(OutputWritten, 5)
        first = pool.pid
        pool.kill()
        seen = pool.home.log(run.run_id, 0)
        eventually(lambda: len(pool.home.log(run.run_id, 0)) > len(seen) + 80, 10, "its ranks do not go on")
        pool.start()
        assert pool.pid != first
        assert run.ended().state is RunState.SUCCEEDED
        assert run.printed == {rank: "".join(f"{number}\n" for number in range(200)) for rank in (0, 1)}
        with pytest.raises(RunUnknown):
            ben.client.pool.attach(run.run_id)
        assert ann.client.pool.attach(run.run_id)[1] is RunState.SUCCEEDED


# ---------------------------------------------------------------- users


def test_each_user_has_the_own_runs_and_sees_rows_of_the_others(served: ServedPool, ann: RemoteUser):
    ben, ops = served.user("ben"), served.user("ops", admin=True)
    run = ann.client.begin(WAIT, ranks=1, name="secret-name", owner=Owner(pid=1, host="x", user="ben"))
    run.wait_for(OutputWritten)
    row = _row(ben.client, run.run_id, RunState.RUNNING)
    assert row is not None
    assert (row.user, row.name, row.notebook, row.owner_pid) == ("ann", "", "", 0)
    assert _row(ann.client, run.run_id, RunState.RUNNING).name == "secret-name"
    for question in (
        lambda who: who.pool.attach(run.run_id),
        lambda who: who.pool.attach(""),
        lambda who: who.pool.detach(run.run_id),
        lambda who: who.pool.stacks(run.run_id),
        lambda who: who.pool.cancel(run.run_id, "not mine"),
    ):
        with pytest.raises(RunUnknown):
            question(ben.client)
    with pytest.raises(PoolError, match="user ben is not allowed to stop this pool"):
        ben.client.pool.stop(force=True)
    # an admin may cancel it, but not read its data
    for question in (lambda who: who.pool.attach(run.run_id), lambda who: who.pool.stacks(run.run_id)):
        with pytest.raises(RunUnknown):
            question(ops.client)
    assert "is being cancelled" in ops.client.pool.cancel(run.run_id, "by ops")
    assert run.ended().reason == "by ops"


@pytest.mark.slow
def test_a_revoked_user_is_out_at_once(served: ServedPool, ann: RemoteUser):
    eve = served.user("eve")
    run = eve.client.begin(WAIT, ranks=1)
    run.wait_for(OutputWritten)
    link = eve.client.pool.link()
    assert "1 key removed" in served.command("revoke", "eve")
    eventually(link.lost.is_set, 15, "the link stays")
    with pytest.raises(KeyRefused, match="does not admit your key"):
        eve.client.pool.status()
    assert ann.client.pool.status() is not None
    # it does not end running work, which is available again once the user is readmitted
    assert served.home.ledger()[run.run_id].state == "running"
    served.command("authorize", "eve", eve.keys.public)
    found, _ = eve.client.pool.attach(run.run_id)
    found.cancel("it is enough")
    eventually(lambda: _row(eve.client, run.run_id, RunState.CANCELLED), 10, "it goes on")


def _row(client: PoolClient, run_id: str, state: RunState) -> Any:
    status = client.pool.status()
    assert status is not None
    return next((row for row in status.runs if row.run_id == run_id and row.state is state), None)
