"""The panel's half in the Jupyter server with pools of other machines: their list, one followed, one away.

team    reserved, 2 a10
gone    on demand; nothing listens there
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from homes import Home
from jupyter_servers import JupyterServer
from listed_pools import list_nowhere, list_pools, listed
from served_pools import ServedPool
from test_panel_server import ServedPage, written
from waiting import eventually

from sgpu_magic.client.pools_file import remove_pool
from sgpu_magic.system.secure_sockets import KeyPair, write_key_pair

WAITS = "import time\nprint('begun', flush=True)\nwhile True: time.sleep(0.05)"


@pytest.fixture(scope="module")
def team() -> Iterator[ServedPool]:
    made = ServedPool({"SGPU_SIMULATE": "a10:2"})
    yield made
    made.close()


@pytest.fixture(scope="module")
def server_home() -> Iterator[Home]:
    server_home = Home({"SGPU_PRICES": "a10=9"})
    yield server_home
    server_home.close()


@pytest.fixture(scope="module")
def keys(server_home: Home, team: ServedPool) -> KeyPair:
    made = list_pools(server_home, [("team", team, {"reserved": True, "prices": {"a10": 1.5}})])
    list_nowhere(server_home, "gone")
    return made


@pytest.fixture(scope="module")
def server(server_home: Home, keys: KeyPair) -> Iterator[JupyterServer]:
    made = JupyterServer(server_home)
    yield made
    made.close()


@pytest.fixture
def open_page(server: JupyterServer) -> Iterator[Callable[..., ServedPage]]:
    made: list[ServedPage] = []

    def make(pool: str = "") -> ServedPage:
        page = ServedPage(server)
        made.append(page)
        page.order("watch", pool=pool)
        return page

    yield make
    for page in made:
        page.close()


@pytest.mark.slow
def test_all_pools_are_listed_with_how_each_is_now(server_home: Home, open_page: Callable[..., ServedPage]):
    page = open_page()
    page.until(lambda: "can't be reached" in str(page.pools))
    # a run of another test may not have released its device yet, and all pools are polled every 10 s
    page.until(lambda: "2 of 2 A10 free" in str(page.pools), 60)
    assert [(pool["name"], pool["about"], pool["reserved"], pool["default"]) for pool in page.pools] == [
        ("team", "reserved · 2 of 2 A10 free · $1.50", True, True),
        ("gone", "on demand · can't be reached", False, False),
        ("local", "this machine", False, False),
    ]
    assert server_home.pool_pid() is None, "looking has started a pool"


@pytest.mark.slow
def test_the_chosen_one_is_followed_as_this_machines_own(
    team: ServedPool, keys: KeyPair, server: JupyterServer, open_page: Callable[..., ServedPage]
):
    page = open_page()
    picture = page.until_state("up")
    assert (picture["pool"], picture["sentence"], picture["remedy"]) == ("team", "", "")
    assert picture["about"].startswith("team · ")
    kinds = {kind["type"]: (kind["total"], kind["free"], kind["price"]) for kind in picture["types"]}
    assert kinds == {"a10": (2, 2, 1.5), "cpu": (16, 16, None)}
    bob = team.user("bob")
    run = bob.client.begin(WAITS, ranks=1, device_type="a10").run.run_id
    page.until(lambda: page.row(run).get("state") == "running")
    row = page.row(run)
    assert (row["user"], row["here"], row["device_type"]) == ("bob", False, "a10")
    page.until(lambda: [device["free"] for device in page.snapshot["devices"]].count(False) == 1)
    # runs of other users can't be cancelled
    page.order("cancel-run", run_id=run, pool="team")
    sent = page.until_said()
    assert not sent["ok"]
    assert sent["text"].startswith("No run that is active here has an id that begins with")
    bob.client.pool.cancel(run, "by bob")
    page.until(lambda: page.row(run).get("state") == "cancelled")
    # this user's own run is cancelled
    own = team.user("ann2")
    (own.home.path / "client.key").unlink()
    write_key_pair(own.home.path / "client.key", keys)
    run = own.client.begin(WAITS, ranks=1, device_type="a10").run.run_id
    page.until(lambda: page.row(run).get("state") == "running")
    page.order("cancel-run", run_id=run, pool="team")
    assert page.until_said()["ok"]
    page.until(lambda: page.row(run).get("state") == "cancelled")


@pytest.mark.slow
def test_one_that_is_away_says_so_with_a_button_and_holds_up_no_other(
    server: JupyterServer, open_page: Callable[..., ServedPage]
):
    page = open_page("gone")
    picture = page.until_state("lost")
    assert picture["sentence"].startswith("The pool gone can't be reached: nothing answers at tcp://127.0.0.1:")
    assert (picture["remedy"], picture["remedy_words"]) == ("retry", "Check again")
    page.order("start-pool", pool="gone")
    sent = page.until_said()
    assert not sent["ok"]
    assert "The pool gone runs on another machine" in sent["text"]
    other = open_page("local")
    assert other.until_state("none")["pool"] == "local"
    page.order("watch", pool="team")
    page.until(lambda: page.snapshot["pool"] == "team")
    answer = server.get("sgpu/panel?pool=team").body
    assert answer["pool"]["snapshot"]["state"] == "up"
    # which of the others is the default, and so comes first, depends on whether this reply knows that one is gone
    first, *others = [pool["name"] for pool in answer["pools"]["pools"]]
    assert (first, set(others)) == ("team", {"gone", "local"})


@pytest.mark.slow
def test_the_runs_of_all_pools_are_listed_also_of_one_that_was_lost(
    team: ServedPool, server_home: Home, server: JupyterServer, open_page: Callable[..., ServedPage]
):
    written(server_home, 3)
    page = open_page("local")
    page.until(lambda: len(page.listed.get("local", ())) == 3, 60)
    assert "gone" not in page.listed
    dan = team.user("dan")
    run = dan.client.begin(WAITS, ranks=1, device_type="a10").run.run_id
    states = lambda: {row["run_id"]: row["state"] for row in page.listed.get("team", ())}  # noqa: E731
    # all pools are polled every 10 s
    page.until(lambda: states().get(run) == "running", 60)
    assert run not in page.runs
    dan.client.pool.cancel(run, "by dan")
    page.until(lambda: states().get(run) == "cancelled", 60)
    team.kill()
    try:
        page.until(lambda: "team" in [pool["name"] for pool in page.pools if not pool["reachable"]], 60)
        assert states()[run] == "cancelled"
        assert len(page.listed["local"]) == 3
        listed_once = server.get("sgpu/panel?pool=local").body["pools"]["runs"]
        assert {each["pool"] for each in listed_once} == {"local", "team"}
    finally:
        team.start()
    page.until(lambda: "team" not in [pool["name"] for pool in page.pools if not pool["reachable"]], 60)


@pytest.mark.slow
def test_one_that_is_killed_is_lost_and_found_again(team: ServedPool, open_page: Callable[..., ServedPage]):
    page = open_page("team")
    page.until_state("up")
    team.kill()
    picture = page.until_state("lost")
    # either nothing answers, or the last request had no reply
    assert "the pool team" in picture["sentence"].lower()
    assert picture["remedy"] == "retry"
    page.until(lambda: "team" in [pool["name"] for pool in page.pools if "can't be reached" in pool["about"]], 30)
    team.start()
    page.order("watch", pool="team")
    page.until_state("up")


@pytest.mark.slow
def test_a_list_that_changes_is_read_again(
    server_home: Home, team: ServedPool, server: JupyterServer, open_page: Callable[..., ServedPage]
):
    added = list_nowhere(server_home, "third")
    try:
        names = lambda: [pool["name"] for pool in server.get("sgpu/panel").body["pools"]["pools"]]  # noqa: E731
        assert "third" in names()
        page = open_page("third")
        assert page.until_state("lost")["pool"] == "third"
    finally:
        remove_pool(added.name, listed(server_home))
    eventually(lambda: "third" not in names(), 10)
    late = open_page("third")
    assert late.until_state("problem")["sentence"] == (
        "There is no pool 'third' here. You have: local, team, gone. Choose one of them."
    )
