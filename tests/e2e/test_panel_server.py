"""The panel's half in the Jupyter server: a real server below a base URL, a real simulated pool, real runs."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.cookiejar import CookieJar
from typing import Any, cast

import pytest
import websocket
from homes import Home
from jupyter_servers import JupyterServer
from process_table import level
from server_kernels import RunningCell, ServerKernel, loaded_kernel
from waiting import eventually

from sgpu_magic.config import Settings
from sgpu_magic.panel.orders import CancelRun, CommandResult, Page, PanelUpdate, Rest, StartPool, Watch
from sgpu_magic.panel.poll_pool import PollResult, PoolPoller
from sgpu_magic.panel.poller import FAILED, POLLED_S, PoolWatcher, Watchers
from sgpu_magic.panel.pool_state import away_snapshot
from sgpu_magic.panel.schema import PoolsUpdate, PoolUpdate, RunsUpdate
from sgpu_magic.pool.ledger import Ledger
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.devices import Lease, Placement
from sgpu_magic.wire.run import CellSource, Owner, RunSpec

VARIABLES = {"SGPU_SIMULATE": "a10:4,h100:8", "SGPU_PRICES": "a10=2.5,h100=7", "SGPU_ADOPT_TIMEOUT_S": "20"}
BASE = "/user/ann/"


class ServedPage:
    """A page with a websocket: what it was told, folded as the panel does."""

    def __init__(self, server: JupyterServer, token: str | None = None, **options: Any) -> None:
        shown = server.token if token is None else token
        address = f"ws{server.url.removeprefix('http')}/sgpu/panel?token={shown}"
        self._socket = websocket.create_connection(address, timeout=20, **options)
        self.pools: list[dict[str, Any]] = []
        self.listed: dict[str, list[dict[str, Any]]] = {}
        self.snapshot: dict[str, Any] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.sent: list[dict[str, Any]] = []
        self.messages = 0
        self.bytes = 0

    def order(self, kind: str, **fields: object) -> None:
        self._socket.send(json.dumps({"kind": kind, **fields}))

    def send(self, text: str) -> None:
        self._socket.send(text)

    def read(self) -> str:
        """Take in one message and return its kind."""
        raw = self._socket.recv()
        reported = json.loads(raw)
        self.messages += 1
        self.bytes += len(raw)
        match reported["kind"]:
            case "pools":
                self.pools = reported["pools"]
                self.listed = {each["pool"]: each["runs"] for each in reported["runs"]}
            case "pool":
                self.snapshot = reported["snapshot"]
            case "runs":
                self.runs = {} if reported["whole"] else self.runs
                self.runs |= {row["run_id"]: row for row in reported["changed"]}
                self.runs = {run_id: row for run_id, row in self.runs.items() if run_id not in reported["gone"]}
            case _:
                self.sent.append(reported)
        return reported["kind"]

    def until(self, condition: Callable[[], Any], deadline_s: float = 20.0) -> Any:
        """Read until something is so."""
        end = time.monotonic() + deadline_s
        while not (found := condition()):
            self._socket.settimeout(max(0.01, end - time.monotonic()))
            try:
                self.read()
            except websocket.WebSocketTimeoutException:
                raise AssertionError(f"not within {deadline_s:g} s: {self.snapshot}, {self.sent}") from None
        return found

    def until_state(self, state: str, deadline_s: float = 20.0) -> dict[str, Any]:
        self.until(lambda: self.snapshot.get("state") == state, deadline_s)
        return self.snapshot

    def until_said(self, deadline_s: float = 20.0) -> dict[str, Any]:
        self.until(lambda: self.sent, deadline_s)
        return self.sent.pop(0)

    def row(self, run_id: str) -> dict[str, Any]:
        return self.runs.get(run_id, {})

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def server_home() -> Iterator[Home]:
    server_home = Home(VARIABLES)
    yield server_home
    server_home.close()


@pytest.fixture(scope="module")
def server(server_home: Home) -> Iterator[JupyterServer]:
    made = JupyterServer(server_home, base_url=BASE)
    yield made
    made.close()


@pytest.fixture(scope="module")
def kernel(server: JupyterServer) -> Iterator[ServerKernel]:
    with loaded_kernel(server, "--type a10") as made:
        yield made


@pytest.fixture
def open_page(server: JupyterServer) -> Iterator[Callable[..., ServedPage]]:
    made: list[ServedPage] = []

    def make(watch: bool = True, **options: Any) -> ServedPage:
        page = ServedPage(server, **options)
        made.append(page)
        if watch:
            page.order("watch")
        return page

    yield make
    for page in made:
        page.close()


@pytest.fixture
def running(
    server_home: Home, kernel: ServerKernel, server: JupyterServer, request: pytest.FixtureRequest
) -> Iterator[RunningCell]:
    cell = RunningCell(server_home, kernel, f"p{abs(hash(request.node.name)):x}"[:9], "--type a10")
    yield cell
    if server.get(f"{cell.path}/outputs").status != 200:
        cell.end()


# ------------------------------------------------------------ a pool that is there


def test_a_page_is_told_everything_first(kernel: ServerKernel, open_page: Callable[..., ServedPage]):
    page = open_page()
    assert [page.read() for _ in range(3)] == ["pools", "pool", "runs"]
    assert [(pool["name"], pool["default"]) for pool in page.pools] == [("local", True)]
    snapshot = page.snapshot
    assert (snapshot["pool"], snapshot["state"], snapshot["sentence"], snapshot["remedy"]) == ("local", "up", "", "")
    types = [(one["type"], one["total"], one["price"], one["simulated"]) for one in snapshot["types"]]
    assert types == [("h100", 8, 7.0, True), ("a10", 4, 2.5, True), ("cpu", 16, None, False)]
    assert [one["label"] for one in snapshot["devices"] if one["type"] == "a10"] == [f"A10 · {at}" for at in range(4)]
    assert snapshot["notes"] == ["No GPU on this machine: ranks run on CPU."]
    assert re.match(r"This month \d+\.\d\d GPU h \(simulated\)", snapshot["usage"])
    assert abs(snapshot["now"] - time.time()) < 10
    assert [row["state"] for row in page.runs.values()][-1] == "succeeded"


def test_a_run_is_told_from_its_beginning_to_its_end(
    running: RunningCell, kernel: ServerKernel, open_page: Callable[..., ServedPage]
):
    page = open_page()
    page.until(lambda: page.row(running.run_id).get("state") == "running")
    row = page.row(running.run_id)
    assert (row["ranks"], row["device_type"], row["simulated"], row["tone"]) == (2, "a10", True, "going")
    assert (row["kernel"], row["hourly"], row["cost"], row["here"]) == (kernel.id, 5.0, None, True)
    page.until(lambda: [one["free"] for one in page.snapshot["types"]][:2] == [8, 2])
    users = [one["user"] for one in page.snapshot["devices"] if one["run_id"] == running.run_id]
    assert users == [f"{row['name']} · rank 0", f"{row['name']} · rank 1"]
    known = page.runs.keys()
    running.end()
    page.until(lambda: page.row(running.run_id)["final"])
    assert page.row(running.run_id)["state"] == "succeeded"
    assert page.row(running.run_id)["cost"] > 0
    assert page.runs.keys() == known
    page.until(lambda: [one["free"] for one in page.snapshot["types"]][:2] == [8, 4])


def test_a_run_that_waits_says_for_what(
    running: RunningCell, server_home: Home, server: JupyterServer, open_page: Callable[..., ServedPage]
):
    second = ServerKernel(server)
    try:
        second.run("%load_ext sgpu_magic")
        message = second.start("%%distributed -n 3 --type a10 --name waits --ui none\npass")
        page = open_page()
        page.until(
            lambda: (run := server_home.run_named("waits")) and page.row(run).get("reason", "").endswith("position 1")
        )
        row = page.row(server_home.run_named("waits"))
        assert row["reason"].startswith("needs 1 more A10 (simulated); 2 are held by run ")
        assert (row["state"], row["tone"]) == ("queued", "waiting")
        running.end()
        second.finish(message)
        page.until(lambda: page.row(row["run_id"])["state"] == "succeeded")
    finally:
        second.close()
        server.delete(f"api/kernels/{second.id}")


def test_a_run_is_cancelled_through_the_page(running: RunningCell, open_page: Callable[..., ServedPage]):
    page = open_page()
    page.until(lambda: page.row(running.run_id).get("state") == "running")
    page.order("cancel-run", run_id=running.run_id)
    assert page.until_said() == {
        "kind": "command-result",
        "text": f"Run {running.run_id[:4]} is being stopped.",
        "ok": True,
    }
    page.until(lambda: page.row(running.run_id)["final"])
    assert page.row(running.run_id)["state"] == "cancelled"
    assert page.row(running.run_id)["reason"] == "Cancel button"


@pytest.mark.parametrize("run_id", ["", "dead", "../../etc", "0000dead"])
def test_what_is_no_run_is_not_cancelled(kernel: ServerKernel, open_page: Callable[..., ServedPage], run_id: str):
    page = open_page(watch=False)
    page.order("cancel-run", run_id=run_id)
    sent = page.until_said()
    assert sent["ok"] is False
    assert "run" in sent["text"]


def test_an_idle_session_says_when_it_ends(
    kernel: ServerKernel, server_home: Home, open_page: Callable[..., ServedPage]
):
    kernel.run("%sgpu_connect -n 2 --name work --type h100 --idle 10m --ui none")
    try:
        session = eventually(lambda: server_home.run_named("work"), 20)
        page = open_page()
        page.until(lambda: page.row(session).get("idle_ends_at"))
        row = page.row(session)
        assert (row["kind"], row["name"], row["state"]) == ("session", "session work", "running")
        assert abs(row["idle_ends_at"] - row["started_at"] - 600) < 30
    finally:
        kernel.run("%sgpu_disconnect work")
    page.until(lambda: page.row(session)["final"])
    assert page.row(session)["idle_ends_at"] is None


def test_a_run_is_told_and_cancelled_when_its_kernel_is_gone(
    kernel: ServerKernel, server_home: Home, server: JupyterServer, open_page: Callable[..., ServedPage]
):
    other = ServerKernel(server)
    other.run("%load_ext sgpu_magic")
    other.run("%%distributed -n 1 --type h100 --name stays --detach\nimport time\nwhile True:\n    time.sleep(0.05)")
    other.close()
    server.delete(f"api/kernels/{other.id}")
    page = open_page()
    page.until(lambda: page.row(server_home.run_named("stays")).get("state") == "running")
    row = page.row(server_home.run_named("stays"))
    assert row["kernel"] == other.id
    page.order("cancel-run", run_id=row["run_id"])
    page.until(lambda: page.row(row["run_id"])["state"] == "cancelled")


# ------------------------------------------------------------ watching, and its end


def test_any_number_of_pages_look_with_one_thread(
    kernel: ServerKernel, server: JupyterServer, open_page: Callable[..., ServedPage]
):
    pages = [open_page() for _ in range(5)]
    for page in pages:
        page.until_state("up")
    before = _threads(server)
    more = [open_page() for _ in range(5)]
    for page in more:
        page.until_state("up")
    assert _threads(server) <= before + 1


@pytest.mark.slow
def test_nobody_who_looks_leaves_nothing(
    kernel: ServerKernel, server: JupyterServer, open_page: Callable[..., ServedPage]
):
    """The thread and its link end within a second, whether the page rests or is closed."""
    page = open_page(watch=False)
    # the server's thread for pages, which starts with the first order, stays
    page.order("watch")
    page.until_state("up")
    page.order("rest")
    page.snapshot = {}
    quiet = eventually(lambda: _resting(server), 30, "the threads of earlier pages stay")
    page.order("watch")
    page.until_state("up")
    assert _threads(server) > quiet
    page.order("rest")
    eventually(lambda: _threads(server) <= quiet, 10, lambda: f"{quiet} threads -> {_threads(server)}")
    page.snapshot = {}
    page.order("watch")
    page.until_state("up")
    assert _threads(server) > quiet
    page.close()
    eventually(lambda: _threads(server) <= quiet, 10, lambda: f"{quiet} threads -> {_threads(server)}")


def _threads(server: JupyterServer) -> int:
    return level(server.pid)["threads"]


def _resting(server: JupyterServer) -> int:
    """How many threads the server has when no page watches: those that were the same for longer than a page polls."""
    seen = _threads(server)
    end = time.monotonic() + POLLED_S + 2.0
    eventually(lambda: _threads(server) != seen or time.monotonic() > end, POLLED_S + 5.0)
    return seen if time.monotonic() > end else 0


@pytest.mark.slow
def test_a_page_that_can_only_poll_gets_the_same(kernel: ServerKernel, server: JupyterServer, running: RunningCell):
    answer = server.get("sgpu/panel?pool=local")
    assert answer.status == 200
    assert {name: reported["kind"] for name, reported in answer.body.items()} == {
        "pools": "pools",
        "pool": "pool",
        "runs": "runs",
    }
    assert answer.body["pool"]["snapshot"]["state"] == "up"
    assert answer.body["runs"]["whole"] is True
    sent = server.post("sgpu/panel/orders", {"kind": "cancel-run", "run_id": running.run_id})
    assert (sent.status, sent.body["ok"]) == (200, True)

    def state() -> str:
        rows = {row["run_id"]: row for row in server.get("sgpu/panel").body["runs"]["changed"]}
        return rows[running.run_id]["state"]

    eventually(lambda: state() == "cancelled", 20, state)
    assert server.post("sgpu/panel/orders", {"kind": "watch"}).body == {
        "kind": "command-result",
        "text": "",
        "ok": True,
    }


def test_a_pool_that_nobody_has_is_told_in_a_sentence(server: JupyterServer, open_page: Callable[..., ServedPage]):
    page = open_page(watch=False)
    page.order("watch", pool="team")
    snapshot = page.until_state("problem")
    assert snapshot["sentence"] == "There is no pool 'team' here: only the local one. Choose that."
    page.order("start-pool", pool="team")
    assert page.until_said() == {
        "kind": "command-result",
        "text": "There is no pool named `team`. You have: local. `sgpu pool add` lists another one.",
        "ok": False,
    }
    page.order("watch")
    page.until(lambda: page.snapshot["pool"] == "local")


# ------------------------------------------------------------ access


def test_a_wrong_token_is_refused(server: JupyterServer, open_page: Callable[..., ServedPage]):
    with pytest.raises(websocket.WebSocketBadStatusException) as refused:
        open_page(token="wrong")
    assert refused.value.status_code == 403
    assert server.get("sgpu/panel", token="wrong").status == 403
    assert server.post("sgpu/panel/orders", {"kind": "start-pool"}, token="wrong").status == 403


def test_another_origin_is_refused(server: JupyterServer):
    """A page of another site, in a browser that has logged in here."""
    jar = CookieJar()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
    opener.open(f"{server.url}/login?token={server.token}", timeout=20).close()
    cookies = "; ".join(f"{cookie.name}={cookie.value}" for cookie in jar)
    address = f"ws{server.url.removeprefix('http')}/sgpu/panel"
    websocket.create_connection(address, timeout=20, cookie=cookies).close()
    with pytest.raises(websocket.WebSocketBadStatusException) as refused:
        websocket.create_connection(address, timeout=20, cookie=cookies, origin="https://elsewhere.example")
    assert refused.value.status_code == 403
    request = urllib.request.Request(f"{server.url}/sgpu/panel", headers={"Origin": "https://elsewhere.example"})
    with pytest.raises(urllib.error.HTTPError) as answer:
        opener.open(request, timeout=20)
    answer.value.close()
    assert answer.value.code == 404


def test_cookies_alone_order_nothing(server: JupyterServer):
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    opener.open(f"{server.url}/login?token={server.token}", timeout=20).close()
    body = json.dumps({"kind": "start-pool"}).encode()
    with pytest.raises(urllib.error.HTTPError) as refused:
        opener.open(urllib.request.Request(f"{server.url}/sgpu/panel/orders", data=body, method="POST"), timeout=20)
    refused.value.close()
    assert refused.value.code == 403


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"kind":"nonsense"}', '{"kind":"cancel-run"}', "x" * 20_000])
def test_nonsense_is_answered_and_harms_nothing(server: JupyterServer, open_page: Callable[..., ServedPage], text: str):
    page = open_page(watch=False)
    page.send(text)
    sent = page.until_said()
    assert sent["ok"] is False
    assert "request is" in sent["text"]
    page.order("watch")
    page.until(lambda: page.snapshot)


# ------------------------------------------------------------ a pool that is not there


@pytest.mark.slow
def test_a_killed_pool_is_lost_and_started_again_by_the_page(new_home: Callable[..., Home]):
    server_home = new_home(VARIABLES)
    server = JupyterServer(server_home, base_url=BASE)
    try:
        page = ServedPage(server)
        page.order("watch")
        snapshot = page.until_state("none")
        assert snapshot["sentence"] == "No pool is running. It starts with the first run."
        assert (snapshot["remedy"], snapshot["remedy_words"]) == ("start", "Start the pool")
        assert server_home.pool_pid() is None, "looking has started a pool"
        page.order("start-pool")
        assert page.until_said()["text"] == "The pool is running."
        page.until_state("up")
        pid = server_home.pool_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        snapshot = page.until_state("lost", 3.0)
        assert snapshot["sentence"].startswith("The pool ended unexpectedly.")
        assert (snapshot["remedy"], snapshot["remedy_words"]) == ("start", "Start it again")
        page.order("start-pool")
        assert page.until_said()["ok"] is True
        page.until_state("up")
        assert server_home.pool_pid() not in (None, pid)
        os.kill(server_home.pool_pid() or 0, signal.SIGTERM)
        snapshot = page.until_state("none")
        assert "it has shut down" in snapshot["sentence"]
        page.close()
    finally:
        server.close()


@pytest.mark.slow
def test_a_pool_that_does_not_answer_is_lost_until_it_does(new_home: Callable[..., Home]):
    server_home = new_home(VARIABLES)
    server = JupyterServer(server_home, base_url=BASE)
    try:
        page = ServedPage(server)
        page.order("watch")
        page.order("start-pool")
        page.until_state("up")
        pid = server_home.pool_pid()
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            snapshot = page.until_state("lost", 15)
            assert (snapshot["remedy"], snapshot["remedy_words"]) == ("retry", "Check again")
            assert "did not answer within 5 s" in snapshot["sentence"]
        finally:
            os.kill(pid, signal.SIGCONT)
        page.order("watch")
        page.until_state("up", 10)
        page.close()
    finally:
        server.close()


@pytest.mark.slow
def test_broken_settings_are_a_sentence_until_they_are_mended(new_home: Callable[..., Home]):
    server_home = new_home(VARIABLES)
    config = server_home.path / "no-config.toml"
    config.write_text("nonsense = 1\n")
    server = JupyterServer(server_home, base_url=BASE)
    try:
        page = ServedPage(server)
        page.order("watch")
        snapshot = page.until_state("problem")
        assert "'nonsense', which is not a setting" in snapshot["sentence"]
        assert snapshot["remedy"] == "retry"
        page.order("start-pool")
        assert page.until_said()["ok"] is False
        config.write_text("")
        page.until_state("none", 5)
        page.close()
    finally:
        server.close()


@pytest.mark.slow
def test_a_list_of_pools_that_can_not_be_read_now_holds_up_no_other_request(new_home: Callable[..., Home]):
    """As on a network disk that hangs: reading waits, and the server answers everything else."""
    server_home = new_home()
    listed = server_home.path / "pools.toml"
    server_home.environ["SGPU_POOLS_FILE"] = str(listed)
    server = JupyterServer(server_home, base_url=BASE)
    pages: list[ServedPage] = []
    try:
        os.mkfifo(listed, 0o600)
        held = listed.with_name("held")
        os.link(listed, held)
        for _ in range(12):
            pages.append(ServedPage(server))
            pages[-1].order("watch")
        pages[-1].order("rest")
        pages.pop().close()
        began = time.monotonic()
        assert server.get("api/status").status == 200
        # the server's own threads, which look up names and read files, do not block either
        assert server.get("api/contents").status == 200
        assert time.monotonic() - began < 5
        # the last request is answered when the list can be read again
        pages[0].order("watch", pool="local")
        empty = listed.with_name("empty")
        empty.touch(0o600)
        empty.replace(listed)
        os.close(os.open(held, os.O_WRONLY))
        for page in pages:
            page.until_state("none")
            assert [pool["name"] for pool in page.pools] == ["local"]
            page.close()
    finally:
        server.close()


# ------------------------------------------------------------ a thousand runs, without a server


def settings_of(server_home: Home) -> Settings:
    return Settings(
        state_dir=str(server_home.state),
        runtime_dir=str(server_home.runtime),
        lock_dir=str(server_home.path / "lock"),
        simulate="a10:4",
    )


def written(server_home: Home, count: int, first: int = 0) -> None:
    """Write ended runs into the ledger, as earlier pools would have."""
    ledger = Ledger(server_home.state / "ledger.sqlite3")
    now = time.time()
    lease = Lease(lease_id="l", device_type="a10", ranks=2, uuids=("SIM-a10-0", "SIM-a10-1"), simulated=True)
    for at in range(first, first + count):
        spec = RunSpec(
            run_id=f"{at:08x}",
            name=f"train_{at % 7}",
            cell=CellSource(body="pass"),
            placement=Placement(ranks=2, device_type="a10"),
            outputs=(),
            owner=Owner(pid=1, host="h", user="ann"),
            timeout_s=1.0,
            submitted_at=now - 2000 + at,
        )
        ledger.record(spec, RunState.QUEUED)
        began = spec.submitted_at
        ledger.update(spec.run_id, state=RunState.SUCCEEDED, lease=lease, started_at=began, ended_at=began + 0.5)
    ledger.close()


class Heard:
    """What a page in this process was told."""

    def __init__(self) -> None:
        self.all: list[PanelUpdate] = []

    def __call__(self, reported: PanelUpdate) -> None:
        self.all.append(reported)

    def last(self, kind: type[PoolUpdate] | type[RunsUpdate] | type[PoolsUpdate]) -> Any:
        return next((reported for reported in reversed(self.all) if isinstance(reported, kind)), None)


@pytest.fixture
def watchers(new_home: Callable[..., Home]) -> Iterator[tuple[Home, Watchers]]:
    server_home = new_home(VARIABLES)
    made = Watchers(lambda: settings_of(server_home), interval_s=0.05)
    yield server_home, made
    made.close()


def test_without_a_pool_the_list_is_the_ledgers(watchers: tuple[Home, Watchers]):
    server_home, made = watchers
    written(server_home, 1005)
    reported = Heard()
    page = Page(made, reported)
    assert page.execute(Watch()) is None
    runs: RunsUpdate = eventually(lambda: reported.last(RunsUpdate), 10)
    assert runs.whole
    assert len(runs.changed) == 1000
    assert [row.run_id for row in runs.changed[:2]] == ["000003ec", "000003eb"]
    assert reported.last(PoolUpdate).snapshot.state == "none"
    assert page.execute(Rest()) is None
    page.close()
    count = len(reported.all)
    page.execute(Watch())
    assert len(reported.all) == count, "a page that is closed is told something"


@pytest.mark.slow
def test_a_thousand_runs_are_asked_for_once(watchers: tuple[Home, Watchers], monkeypatch: pytest.MonkeyPatch):
    server_home, made = watchers
    for name, value in server_home.environ.items():
        monkeypatch.setenv(name, value)
    written(server_home, 1000)
    asked: list[int] = []
    from sgpu_magic.client.pool import Pool

    status = Pool.status

    def counted(self: Pool, recent: int = 20, **options: Any) -> Any:
        asked.append(recent)
        return status(self, recent, **options)

    monkeypatch.setattr(Pool, "status", counted)
    reported = Heard()
    page = Page(made, reported)
    assert page.execute(StartPool()) == CommandResult(text="The pool is running.", ok=True)
    asked.clear()
    page.execute(Watch())
    eventually(lambda: len(asked) > 5, 10)
    assert asked.count(1000) == 1
    assert len(reported.last(RunsUpdate).changed) == 1000
    assert sum(isinstance(one, RunsUpdate) for one in reported.all) == 1
    sent = page.execute(CancelRun(run_id="00000001"))
    assert sent is not None
    assert not sent.ok
    page.close()


@pytest.mark.slow
def test_a_pool_of_another_version_is_told_with_its_runs(
    watchers: tuple[Home, Watchers], monkeypatch: pytest.MonkeyPatch
):
    server_home, made = watchers
    for name, value in server_home.environ.items():
        monkeypatch.setenv(name, value)
    written(server_home, 3)
    reported = Heard()
    page = Page(made, reported)
    assert page.execute(StartPool()) == CommandResult(text="The pool is running.", ok=True)
    with monkeypatch.context() as newer:
        newer.setattr("sgpu_magic.client.this_machine.PROTOCOL_VERSION", 99)
        newer.setattr("sgpu_magic.client.connector.PROTOCOL_VERSION", 99)
        page.execute(Watch())
        snapshot = eventually(lambda: (one := reported.last(PoolUpdate)) and one.snapshot, 10)
        assert snapshot.state == "other-version"
        assert "speaks protocol" in snapshot.sentence
        assert (snapshot.remedy, snapshot.remedy_words) == ("start", "Restart it")
        assert len(eventually(lambda: reported.last(RunsUpdate), 10).changed) == 3
    eventually(lambda: reported.last(PoolUpdate).snapshot.state == "up", 10)
    page.close()


def test_more_runs_than_are_asked_for_are_not_missed(watchers: tuple[Home, Watchers], monkeypatch: pytest.MonkeyPatch):
    server_home, made = watchers
    for name, value in server_home.environ.items():
        monkeypatch.setenv(name, value)
    written(server_home, 10)
    reported = Heard()
    page = Page(made, reported)
    page.execute(StartPool())
    page.execute(Watch())
    eventually(lambda: reported.last(RunsUpdate), 10)
    # as if that many runs had started and ended between two polls
    written(server_home, 60, first=10)
    listed: set[str] = set()

    def all_listed() -> bool:
        listed.update(row.run_id for one in list(reported.all) if isinstance(one, RunsUpdate) for row in one.changed)
        return len(listed) == 70

    eventually(all_listed, 10, lambda: f"{len(listed)} runs are listed")
    page.close()


# ------------------------------------------------------------ the watcher alone


class ScriptedPoller:
    """Reads nothing: takes a given time, and fails on request."""

    is_outdated = False

    def __init__(self, takes_s: float = 0.0) -> None:
        self.began: list[float] = []
        self.closed = 0
        self.broken = False
        self._takes_s = takes_s

    def poll(self) -> PollResult:
        self.began.append(time.monotonic())
        threading.Event().wait(self._takes_s)
        if self.broken:
            raise KeyError("a fault of our own")
        return PollResult(away_snapshot("local", "none", f"look {len(self.began)}", "", "", time.time()), {})

    def close(self) -> None:
        self.closed += 1


def watcher_of(look: ScriptedPoller, interval_s: float = 0.01) -> PoolWatcher:
    return PoolWatcher("local", lambda: cast("PoolPoller", look), interval_s)


def test_a_pool_that_answers_slowly_is_asked_less_often():
    look = ScriptedPoller(takes_s=0.2)
    watcher = watcher_of(look)
    watcher.add(1, Heard())
    eventually(lambda: len(look.began) >= 3, 10)
    watcher.remove(1)
    pauses = [later - earlier for earlier, later in itertools.pairwise(look.began)]
    assert min(pauses) >= 0.75
    watcher.join()
    assert (watcher._polls, look.closed) == (False, 1)


def test_who_comes_after_the_last_has_left_gets_a_new_look():
    look, reported = ScriptedPoller(), Heard()
    watcher = watcher_of(look)
    for number in range(3):
        watcher.add(number, Heard())
        watcher.remove(number)
        watcher.join()
        assert not watcher._polls
    looks = len(look.began)
    watcher.add(4, reported)
    eventually(lambda: reported.last(PoolUpdate), 10)
    assert reported.last(PoolUpdate).snapshot.sentence != f"look {looks}", "what was seen earlier is outdated"
    watcher.stop()
    watcher.join()
    assert not watcher._polls
    # a page that polls has no listener
    watcher.poll()
    assert watcher.latest() is not None
    watcher.stop()
    watcher.join()


def test_a_fault_of_our_own_is_told_and_looked_past():
    look, reported = ScriptedPoller(), Heard()
    watcher = watcher_of(look)
    watcher.add(1, reported)
    eventually(lambda: reported.last(PoolUpdate), 10)
    look.broken = True
    eventually(lambda: reported.last(PoolUpdate).snapshot.state == "problem", 10)
    assert reported.last(PoolUpdate).snapshot.sentence == FAILED
    look.broken = False
    eventually(lambda: reported.last(PoolUpdate).snapshot.state == "none", 10)
    watcher.stop()
    watcher.join()


def test_an_order_is_followed_by_a_look():
    look = ScriptedPoller()
    watcher = watcher_of(look, interval_s=60.0)
    watcher.add(1, Heard())
    eventually(lambda: len(look.began) == 1, 10)
    watcher.poll_soon()
    eventually(lambda: len(look.began) == 2, 10)
    watcher.remove(1)
    began = time.monotonic()
    watcher.join()
    assert time.monotonic() - began < 30, "it does not wait for its next look"
