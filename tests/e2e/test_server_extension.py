"""Runs over the Jupyter server's REST, while their kernel is busy: a real server, a real kernel, real runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.cookiejar import CookieJar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from homes import Home
from jupyter_servers import JupyterServer
from process_table import descriptors
from server_kernels import RICH, RunningCell, ServerKernel, ask, loaded_kernel, same, spec_of
from waiting import eventually

from sgpu_magic.config import Settings
from sgpu_magic.files.run_directory import EventFile
from sgpu_magic.pool.run_log import RunLog
from sgpu_magic.server.run_places import LocalRun, RemotePools, run_here
from sgpu_magic.server.runs import IDLE_S, Followers, RunNotHere
from sgpu_magic.wire.events import Noted, Submitted

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def kernel(server: JupyterServer) -> Iterator[ServerKernel]:
    with loaded_kernel(server) as made:
        yield made


@pytest.fixture
def running(
    server_home: Home, kernel: ServerKernel, server: JupyterServer, request: pytest.FixtureRequest
) -> Iterator[RunningCell]:
    cell = RunningCell(server_home, kernel, f"w{abs(hash(request.node.name)):x}"[:9])
    yield cell
    if server.get(f"{cell.path}/outputs").status != 200:
        cell.end()


# ------------------------------------------------------------ what is there


def test_the_runs_of_a_kernel_are_listed_with_their_cells(
    server: JupyterServer, kernel: ServerKernel, server_home: Home
):
    begin = time.time()
    kernel.run("%%distributed -n 1 --name listed\nprint(1)", cell="the-cell")

    def listed() -> dict[str, Any]:
        (found,) = [run for run in server.get(f"sgpu/runs?kernel={kernel.id}").body if run["cell"] == "the-cell"]
        return found

    # the pool writes its ledger some milliseconds after it reports the end
    eventually(lambda: listed()["final"], 5, "the end of the run in the ledger")
    found = listed()
    assert found["run_id"] == server_home.run_named("listed")
    assert found["state"] == "succeeded"
    assert found["final"] is True
    assert begin - 1 < found["began"] <= found["ended"] < time.time() + 1
    assert isinstance(found["execution_count"], int)
    assert server.get("sgpu/runs?kernel=another").body == []
    assert server.get("sgpu/runs").status == 400


def test_a_run_is_listed_while_its_cell_blocks_the_kernel(
    server: JupyterServer, kernel: ServerKernel, running: RunningCell
):
    newest = server.get(f"sgpu/runs?kernel={kernel.id}").body[-1]
    assert newest["run_id"] == running.run_id
    assert newest["state"] == "running"
    assert (newest["final"], newest["ended"]) == (False, None)
    assert newest["cell"].startswith("cell-w")


# ------------------------------------------------------------ what is new


def test_news_are_followed_without_a_gap_until_the_end(server: JupyterServer, running: RunningCell, server_home: Home):
    known = {"after": 0, "lines": 0, "drawn": 0, "displays": 0}
    rows: list[Any] = []
    states: list[str] = []

    def hear() -> dict[str, Any]:
        query = "&".join(f"{name}={value}" for name, value in known.items())
        answer = server.get(f"{running.path}/news?{query}&wait=20")
        assert answer.status == 200, answer
        news = answer.body
        for reported in news["updates"]:
            assert reported["seq"] == known["after"] + 1
            assert reported["first"] == len(rows)
            rows.extend(reported["rows"])
            known["after"] = reported["seq"]
        known.update(after=news["seq"], lines=news["lines"], displays=news["displays"])
        if news["snapshot"]:
            assert news["snapshot"]["seq"] > known["drawn"]
            known["drawn"] = news["snapshot"]["seq"]
            states.append(news["snapshot"]["state"])
        return news

    eventually(lambda: (hear(), len(rows))[1] > 60, 20, lambda: f"{len(rows)} lines")
    running.end()
    eventually(lambda: hear()["final"], 20, "the end is not told")
    assert states[0] == "running"
    assert states[-1] == "succeeded"
    for rank in (0, 1):
        output = [text for of, _, text, _ in rows if of == rank]
        assert output == server_home.log(running.run_id, rank).splitlines()
        assert [number for of, number, *_ in rows if of == rank] == list(range(len(output)))


def test_a_question_for_news_waits_until_there_are_some(server: JupyterServer, kernel: ServerKernel, server_home: Home):
    message = kernel.start("%%distributed -n 1 --name silent\nimport time\nprint('one', flush=True)\ntime.sleep(60)")
    run_id = eventually(lambda: server_home.run_named("silent"), 30)
    eventually(lambda: "one" in server_home.log(run_id, 0), 30)
    path = f"sgpu/runs/{run_id}"
    far = "after=5&lines=1&drawn=999999&displays=0"
    begin = time.monotonic()
    waited = server.get(f"{path}/news?{far}&wait=2")
    assert 1.9 < time.monotonic() - begin < 6
    assert waited.body == {"snapshot": None, "updates": [], "seq": 5, "lines": 1, "displays": 0, "final": False}
    assert server.get(f"{path}/news?after=x").status == 400
    ask(server, path, kind="cancel")
    kernel.finish(message)


# ------------------------------------------------------------ questions


def test_questions_are_answered_while_the_cell_blocks(server: JupyterServer, running: RunningCell):
    hello = ask(server, running.path, kind="hello", over="server")
    assert hello["snapshot"]["run_id"] == running.run_id
    assert hello["snapshot"]["state"] == "running"
    # the events arrive a moment after the log
    eventually(
        lambda: sum(ask(server, running.path, kind="hello")["snapshot"]["lines"]) >= 8, 5, "no lines are told of"
    )
    lines = ask(server, running.path, kind="lines", first=0, count=3, rank=1)
    assert lines["rows"] == [[1, 0, "begun on 1", False], [1, 1, "step 1", False], [1, 2, "step 2", False]]
    found = ask(server, running.path, kind="find", text="BEGUN", rank=0)
    assert (found["matches"], found["total"]) == ([0], 1)
    log = ask(server, running.path, kind="log", offset=0, rank=0)
    assert log["text"].startswith("begun on 0\nstep 1\n")
    stacks = "\n".join(ask(server, running.path, kind="stacks")["lines"])
    assert "time.sleep(0.05)" in stacks


def test_what_is_no_question_is_refused(server: JupyterServer, running: RunningCell):
    assert server.post(f"{running.path}/ask", {"kind": "rm", "n": 1}).status == 400
    assert server.post(f"{running.path}/ask", {"kind": "log", "n": 1, "offset": "../key"}).status == 400
    assert server.post(f"{running.path}/ask", {"kind": "find", "n": 1, "text": "x" * 20_000}).status == 413
    assert ask(server, running.path, kind="lines", first=0, count=1, rank=9)["kind"] == "refusal"


def test_cancel_works_while_the_cell_blocks(server: JupyterServer, running: RunningCell):
    answer = ask(server, running.path, kind="cancel")
    eventually(lambda: server.get(f"{running.path}/outputs").status == 200, 5, "it goes on")
    assert "is being stopped" in answer["lines"][0]
    kernels = running.end()
    outputs = server.get(f"{running.path}/outputs").body["outputs"]
    assert outputs[-1]["ename"] == "RunCancelled"
    same(outputs, kernels)


# ------------------------------------------------------------ the end


def test_outputs_are_refused_while_the_run_goes_on(server: JupyterServer, running: RunningCell):
    refused = server.get(f"{running.path}/outputs")
    assert refused.status == 409
    assert refused.body["message"] == "the run has not ended yet."


@pytest.mark.parametrize(
    ("name", "body"),
    [
        pytest.param("plain", "print('hello from', rank)", id="lines"),
        pytest.param("rich", RICH, id="displays and values"),
        pytest.param("quiet", "print(rank)\n41 + rank;", id="a semicolon"),
        pytest.param("raises", "print('x')\nif rank == 1:\n    raise ValueError('bad batch')", id="an error"),
        pytest.param("dies", "import os\nif rank == 1:\n    os.kill(os.getpid(), 9)", id="a death"),
        pytest.param(
            "late", "import time\nprint('soon over', flush=True)\ntime.sleep(1)\nrank", id="a live view before"
        ),
    ],
)
def test_the_outputs_are_those_that_the_kernel_has_given_the_cell(
    server: JupyterServer, kernel: ServerKernel, server_home: Home, name: str, body: str
):
    # an error is short if the page shows the view above it
    of_kernel = kernel.run(f"%%distributed -n 2 --name {name}\n{body}", cell=f"cell-{name}", prompts=name == "raises")
    answer = server.get(f"sgpu/runs/{server_home.run_named(name)}/outputs")
    assert answer.status == 200
    same(answer.body["outputs"], of_kernel)
    assert len(of_kernel) >= 1


def test_displays_are_told_of_and_given_while_the_run_goes_on(
    server: JupyterServer, kernel: ServerKernel, server_home: Home
):
    body = "from IPython.display import HTML, display\nimport time\ndisplay(HTML('<i>early</i>'))\ntime.sleep(60)"
    message = kernel.start(f"%%distributed -n 1 --name displays\n{body}")
    run_id = eventually(lambda: server_home.run_named("displays"), 30)
    path = f"sgpu/runs/{run_id}"
    eventually(lambda: server.get(f"{path}/news?wait=1").body.get("displays"), 20, "no display is told of")
    (shown,) = server.get(f"{path}/displays").body["outputs"]
    assert shown["data"]["text/html"] == "<i>early</i>"
    ask(server, path, kind="cancel")
    kernel.finish(message)


@pytest.mark.slow
def test_a_run_whose_pool_was_killed_is_over(server: JupyterServer, kernel: ServerKernel, server_home: Home):
    body = "import time\nprint('begun', flush=True)\ntime.sleep(600)"
    kernel.run(f"%%distributed -n 1 --detach --name orphan\n{body}")
    run_id = eventually(lambda: server_home.run_named("orphan"), 30)
    eventually(lambda: "begun" in server_home.log(run_id, 0), 30)
    assert server.get(f"sgpu/runs/{run_id}/outputs").status == 409
    for pid in (server_home.pool_pid(), *server_home.agent_pids()):
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    answer = eventually(
        lambda: (found := server.get(f"sgpu/runs/{run_id}/outputs")).status == 200 and found, 30, "it goes on for ever"
    )
    text = "".join(answer.body["outputs"][0]["data"]["text/plain"])
    assert "the pool service ended while the run was active" in text
    assert f"%sgpu_attach {run_id[:4]}" in text
    # the kernel's next run starts another pool
    kernel.run("%%distributed -n 1 --ui none\npass")


# ------------------------------------------------------------ access


@pytest.mark.parametrize("path", ["sgpu/runs?kernel=x", "sgpu/runs/{run}/news", "sgpu/runs/{run}/outputs"])
def test_without_a_token_nothing_is_told(server: JupyterServer, running: RunningCell, path: str):
    found = path.format(run=running.run_id)
    assert server.get(found, token="wrong").status == 403
    assert server.post(f"{running.path}/ask", {"kind": "hello", "n": 1}, token="wrong").status == 403


def test_a_page_elsewhere_can_not_press_a_button(server: JupyterServer, running: RunningCell):
    """A browser sends its cookies to whoever asks: with them alone nothing is done."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    opener.open(f"{server.url}/login?token={server.token}", timeout=20).close()
    assert opener.open(f"{server.url}/api/status", timeout=20).status == 200
    body = json.dumps({"kind": "cancel", "n": 1}).encode()
    with pytest.raises(urllib.error.HTTPError) as refused:
        opener.open(urllib.request.Request(f"{server.url}/{running.path}/ask", data=body, method="POST"), timeout=20)
    refused.value.close()
    assert refused.value.code == 403
    assert server.get(f"{running.path}/outputs").status == 409


@pytest.mark.parametrize(
    "run", ["0000dead", "nonsense", "..", "%2e%2e%2fkernel", "..%2f..%2fetc", "DEADBEEF", "0000dea"]
)
def test_an_unknown_run_is_not_found(server: JupyterServer, run: str):
    for name in ("news", "outputs", "displays"):
        assert server.get(f"sgpu/runs/{run}/{name}").status == 404
    assert server.post(f"sgpu/runs/{run}/ask", {"kind": "hello", "n": 1}).status == 404


def test_a_link_out_of_the_runs_is_not_followed(server: JupyterServer, kernel: ServerKernel, server_home: Home):
    kernel.run("%%distributed -n 1 --name target\nprint('private')")
    target = server_home.run_dir(server_home.run_named("target"))
    link = server_home.run_dir("abcdef01")
    link.symlink_to(target)
    try:
        answer = server.get("sgpu/runs/abcdef01/outputs")
    finally:
        link.unlink()
    assert answer.status == 404
    assert "this machine has no directory for run abcd" in answer.body["message"]


# ------------------------------------------------------------ its own manners


def test_no_file_of_a_run_stays_open(server: JupyterServer, running: RunningCell):
    ask(server, running.path, kind="hello")
    ask(server, running.path, kind="log", offset=0, rank=0)
    running.end()
    eventually(lambda: server.get(f"{running.path}/outputs").status == 200, 10)
    assert [name for name in descriptors(server.pid) if running.run_id in str(name)] == []


def test_runs_that_nobody_looks_at_are_forgotten(tmp_path: Path):
    now = 100.0
    settings = Settings(state_dir=str(tmp_path))
    followers = Followers(settings, RemotePools(settings, IDLE_S), clock=lambda: now)
    log = RunLog(tmp_path / "runs" / "0123abcd", "0123abcd")
    log.append(Submitted(spec=spec_of("0123abcd")), 1.0)
    log.close()
    first = followers.get("0123abcd")
    now += IDLE_S - 1
    followers.drop_idle()
    assert followers.get("0123abcd") is first
    now += IDLE_S + 1
    followers.drop_idle()
    assert followers._followers == {}
    assert followers.get("0123abcd") is not first
    with pytest.raises(RunNotHere, match="no directory for run"):
        followers.get("../0123abcd")


def test_a_run_whose_files_are_read_slowly_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = Settings(state_dir=str(tmp_path))
    elsewhere = RemotePools(settings, 0.0, clock=lambda: 100.0)
    followers = Followers(settings, elsewhere)
    for run_id in ("0123abcd", "4567abcd"):
        log = RunLog(tmp_path / "runs" / run_id, run_id)
        log.append(Submitted(spec=spec_of(run_id)), 1.0)
        log.close()
    reading, go = threading.Event(), threading.Event()

    def slowly(settings: Settings, run_id: str) -> LocalRun | None:
        if run_id == "0123abcd":
            reading.set()
            assert go.wait(30)
        return run_here(settings, run_id)

    monkeypatch.setattr("sgpu_magic.server.runs.run_here", slowly)
    with ThreadPoolExecutor() as threads:
        both = [threads.submit(followers.get, "0123abcd") for _ in range(2)]
        assert reading.wait(10)
        try:
            # the calls of the server's loop
            for call in (
                lambda: followers.record_view("0123abcd"),
                followers.drop_idle,
                lambda: followers.get("4567abcd"),
            ):
                threads.submit(call).result(10)
        finally:
            go.set()
        assert both[0].result(10) is both[1].result(10) is followers.get("0123abcd")


def test_nobody_waits_for_links_that_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    elsewhere = RemotePools(Settings(state_dir=str(tmp_path)), 1.0, clock=lambda: now)
    closing, go = threading.Event(), threading.Event()

    def close() -> None:
        closing.set()
        go.wait(30)

    monkeypatch.setattr(elsewhere, "_pools", SimpleNamespace(close=close))
    with ThreadPoolExecutor() as threads:
        try:
            threads.submit(elsewhere.rest).result(10)
            assert not closing.is_set(), "one was needed a moment ago"
            now += 2.0
            threads.submit(elsewhere.rest).result(10)
            assert closing.wait(10)
        finally:
            go.set()


def test_events_that_a_killed_pool_left_half_written_are_read_when_they_are_whole(tmp_path: Path):
    log = RunLog(tmp_path, "0123abcd")
    log.append(Submitted(spec=spec_of("0123abcd")), 1.0)
    log.append(Noted(text="one"), 2.0)
    log.close()
    events = tmp_path / "events.msgpack"
    whole = events.read_bytes()
    reader = EventFile(tmp_path)
    assert [event.seq for event, _ in reader.new_events()] == [1, 2]
    events.write_bytes(whole + whole[:50])
    assert list(reader.new_events()) == []
    # the next service truncates it and continues
    log = RunLog(tmp_path, "0123abcd")
    log.append(Noted(text="two"), 3.0)
    log.close()
    assert [event.body.text for event, _ in reader.new_events() if isinstance(event.body, Noted)] == ["two"]
    assert list(reader.new_events()) == []


def test_the_server_imports_nothing_of_the_kernels_and_the_ranks():
    code = "import sys, sgpu_magic.server.run_handlers; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert (
        loaded & {"torch", "ipykernel", "IPython", "anywidget", "ipywidgets", "numpy", "pynvml", "cloudpickle"} == set()
    )


@pytest.mark.skipif(
    not (ROOT / "labextension" / "node_modules").is_dir() or shutil.which("node") is None,
    reason="needs Node and `npm ci` in labextension",
)
def test_the_built_plugin_is_what_its_sources_give(tmp_path: Path):
    made = tmp_path / "labextension"
    command = ["node", "build_plugin.mjs", f"--outdir={made}"]
    subprocess.run(command, cwd=ROOT / "labextension", check=True, timeout=60)
    committed = ROOT / "sgpu_magic" / "labextension"
    files = {path.relative_to(made): path.read_bytes() for path in made.rglob("*") if path.is_file()}
    kept = {path.relative_to(committed): path.read_bytes() for path in committed.rglob("*") if path.is_file()}
    assert set(files) == set(kept), "npm run build:plugin"
    assert files == kept, "npm run build:plugin"


def test_an_installed_package_has_both_extensions_where_jupyter_looks(tmp_path: Path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if "No module named hatchling" in done.stderr:
        pytest.skip("hatchling is not installed here")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        data = {name.partition(".data/data/")[2]: name for name in archive.namelist()}
        lab = "share/jupyter/labextensions/@sgpu-magic/labextension"
        manifest = json.loads(archive.read(data[f"{lab}/package.json"]))
        config = json.loads(archive.read(data["etc/jupyter/jupyter_server_config.d/sgpu_magic.json"]))
    assert f"{lab}/{manifest['jupyterlab']['_build']['load']}" in data
    assert config["ServerApp"]["jpserver_extensions"] == {"sgpu_magic.server": True}
