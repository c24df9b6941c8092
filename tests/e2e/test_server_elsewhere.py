"""Runs in another machine's pool over the Jupyter server's REST, as those of this machine: a real pool on a port."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from homes import Home
from jupyter_servers import JupyterServer
from listed_pools import list_pools
from process_table import descriptors
from served_pools import ServedPool, served_pool
from server_kernels import RICH, RunningCell, ServerKernel, ask, loaded_kernel, same, spec_of
from waiting import eventually

from sgpu_magic.client.mirror import SENT, note_sent, sent_run, sent_run_ids
from sgpu_magic.config import Settings
from sgpu_magic.server.run_places import RemotePools
from sgpu_magic.server.runs import IDLE_S

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool() -> Iterator[ServedPool]:
    with served_pool() as made:
        yield made


@pytest.fixture(scope="module")
def server_home(pool: ServedPool) -> Iterator[Home]:
    """The notebook's machine, which lists the pool as `team`."""
    server_home = Home()
    list_pools(server_home, [("team", pool, {})])
    yield server_home
    server_home.close()


@pytest.fixture(scope="module")
def kernel(server: JupyterServer) -> Iterator[ServerKernel]:
    with loaded_kernel(server, "--pool team") as made:
        yield made


class Page:
    """What a page is told of a run that it follows; every line once and in order."""

    def __init__(self, server: JupyterServer, path: str) -> None:
        self._server = server
        self._path = path
        self._known = {"after": 0, "lines": 0, "drawn": 0, "displays": 0}
        self.rows: list[Any] = []
        self.snapshot: dict[str, Any] = {}
        self.is_final = False

    def hear(self) -> None:
        query = "&".join(f"{name}={value}" for name, value in self._known.items())
        answer = self._server.get(f"{self._path}/news?{query}&wait=5")
        assert answer.status == 200, answer
        news = answer.body
        for reported in news["updates"]:
            assert reported["seq"] == self._known["after"] + 1
            assert reported["first"] == len(self.rows)
            self.rows.extend(reported["rows"])
            self._known["after"] = reported["seq"]
        self._known.update(after=news["seq"], lines=news["lines"], displays=news["displays"])
        if news["snapshot"]:
            self.snapshot = news["snapshot"]
            self._known["drawn"] = self.snapshot["seq"]
        self.is_final = news["final"]

    def until(self, condition: Any, deadline_s: float, what: str) -> None:
        eventually(lambda: (self.hear(), condition())[1], deadline_s, lambda: f"{what}: {self.snapshot}")

    def has_all(self, pool: ServedPool, run_id: str) -> bool:
        return all(
            [text for of, _, text, _ in self.rows if of == rank] == pool.home.log(run_id, rank).splitlines()
            for rank in (0, 1)
        )


def test_it_is_listed_followed_and_its_outputs_are_the_kernels(
    server: JupyterServer, kernel: ServerKernel, server_home: Home, pool: ServedPool
):
    cell = RunningCell(server_home, kernel, "followed", "--pool team", pool.home)
    (listed,) = [run for run in server.get(f"sgpu/runs?kernel={kernel.id}").body if run["run_id"] == cell.run_id]
    assert (listed["cell"], listed["state"], listed["final"]) == ("cell-followed", "running", False)
    page = Page(server, cell.path)
    page.until(lambda: len(page.rows) > 60, 20, "few lines")
    assert page.snapshot["state"] == "running"
    # the requests of a view
    lines = ask(server, cell.path, kind="lines", first=0, count=3, rank=1)
    assert lines["rows"] == [[1, 0, "begun on 1", False], [1, 1, "step 1", False], [1, 2, "step 2", False]]
    assert ask(server, cell.path, kind="log", offset=0, rank=0)["text"].startswith("begun on 0\nstep 1\n")
    assert "time.sleep(0.05)" in "\n".join(ask(server, cell.path, kind="stacks")["lines"])
    assert server.get(f"{cell.path}/outputs").status == 409
    kernels = cell.end()
    page.until(lambda: page.is_final, 20, "the end is not told")
    assert page.snapshot["state"] == "succeeded"
    assert page.has_all(pool, cell.run_id)
    same(server.get(f"{cell.path}/outputs").body["outputs"], kernels)
    (listed,) = [run for run in server.get(f"sgpu/runs?kernel={kernel.id}").body if run["run_id"] == cell.run_id]
    assert (listed["state"], listed["final"]) == ("succeeded", True)


@pytest.mark.parametrize(
    ("name", "body"),
    [("shows", RICH), ("raises", "print('x')\nif rank == 1:\n    raise ValueError('bad batch')")],
)
def test_outputs_of_a_run_that_ended_while_nobody_looked(
    server: JupyterServer, kernel: ServerKernel, pool: ServedPool, name: str, body: str
):
    # an error is short if the page shows the view above it
    cell = f"%%distributed -n 2 --pool team --name {name}\n{body}"
    kernels = kernel.run(cell, cell=f"cell-{name}", prompts=name == "raises")
    path = f"sgpu/runs/{pool.home.run_named(name)}"
    eventually(lambda: server.get(f"{path}/outputs").status == 200, 10, "it goes on")
    same(server.get(f"{path}/outputs").body["outputs"], kernels)


def test_cancel_reaches_the_pool(server: JupyterServer, kernel: ServerKernel, server_home: Home, pool: ServedPool):
    cell = RunningCell(server_home, kernel, "cancelled", "--pool team", pool.home)
    answer = ask(server, cell.path, kind="cancel")
    assert "is being stopped" in answer["lines"][0]
    kernels = cell.wait()
    assert kernels[-1]["ename"] == "RunCancelled"
    eventually(lambda: server.get(f"{cell.path}/outputs").status == 200, 10, "it goes on")
    same(server.get(f"{cell.path}/outputs").body["outputs"], kernels)


@pytest.mark.slow
def test_a_killed_pool_service_is_told_and_the_next_one_followed(
    server: JupyterServer, kernel: ServerKernel, server_home: Home, pool: ServedPool
):
    cell = RunningCell(server_home, kernel, "killed", "--pool team", pool.home)
    page = Page(server, cell.path)
    page.until(lambda: len(page.rows) > 10, 20, "few lines")
    pool.kill()
    page.until(lambda: "the pool team can't be reached now" in json.dumps(page.snapshot), 30, "it is not told")
    # a page that is opened now has the run as well; ended runs need no request to the pool
    listed = {run["run_id"]: run["final"] for run in server.get(f"sgpu/runs?kernel={kernel.id}").body}
    assert not listed.pop(cell.run_id)
    assert listed
    assert all(listed.values())
    pool.start()
    seen = len(page.rows)
    page.until(lambda: len(page.rows) > seen + 20, 30, "it does not go on")
    assert "can't be asked" not in json.dumps(page.snapshot)
    cell.end()
    page.until(lambda: page.is_final, 20, "the end is not told")
    assert page.has_all(pool, cell.run_id)


def test_a_run_that_its_pool_has_forgotten_is_over(
    server: JupyterServer, kernel: ServerKernel, server_home: Home, pool: ServedPool
):
    kernel.run("%%distributed -n 2 --pool team --name forgotten\nprint('x')")
    run_id = pool.home.run_named("forgotten")
    shutil.rmtree(pool.home.run_dir(run_id))
    page = Page(server, f"sgpu/runs/{run_id}")
    page.until(lambda: page.is_final, 20, "it goes on for ever")
    assert "the pool team no longer has this run" in json.dumps(page.snapshot)


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
def test_links_that_nobody_needs_are_closed(server_home: Home, pool: ServedPool, monkeypatch: pytest.MonkeyPatch):
    for name, value in server_home.environ.items():
        monkeypatch.setenv(name, value)
    now = 100.0
    elsewhere = RemotePools(Settings(state_dir=str(server_home.state)), IDLE_S, clock=lambda: now)
    before = descriptors(os.getpid())
    (run_id, *_) = sent_run_ids(Settings(state_dir=str(server_home.state)))
    run = elsewhere.run(run_id)
    assert run is not None
    run.bring_events(0)
    assert run.silence == ""
    assert elsewhere.is_connected
    now += IDLE_S - 1
    elsewhere.rest()
    assert elsewhere.is_connected
    now += 2
    elsewhere.rest()
    eventually(lambda: not elsewhere.is_connected, 5, "the links stay")
    eventually(lambda: len(descriptors(os.getpid())) <= len(before), 10, "descriptors are left")
    assert elsewhere.run("../" + run_id) is None


@pytest.mark.slow
def test_the_newest_notes_are_kept(tmp_path: Any):
    settings = Settings(state_dir=str(tmp_path))
    ids = [f"{number:08x}" for number in range(0x10000000, 0x10000000 + 503)]
    for run_id in ids:
        note_sent(settings, "team", spec_of(run_id))
        # a file system's clock may not advance between two of them
        os.utime(tmp_path / SENT / f"{run_id}.msgpack", ns=(int(run_id, 16),) * 2)
    assert sorted(sent_run_ids(settings)) == ids[3:]
    found = sent_run(settings, ids[-1])
    assert found is not None
    assert (found.pool, found.spec.run_id) == ("team", ids[-1])
    (tmp_path / SENT / f"{ids[-1]}.msgpack").write_bytes(b"of another version")
    assert sent_run(settings, ids[-1]) is None
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / SENT).iterdir()} == {0o600}
