"""A page that loses sight of a run gets it back: reloaded, closed and opened again, its kernel restarted."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browsers import ARTEFACTS, choose_kernel, chromium, console_errors, has_browser
from homes import Home
from jupyter_servers import JupyterServer, new_notebook
from listed_pools import list_pools, listed
from playwright.sync_api import Browser, Page, expect
from playwright.sync_api import TimeoutError as PageTimeout
from served_pools import served_pool
from waiting import eventually

from sgpu_magic.client.pools_file import remove_pool

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(not has_browser(), reason="needs Debian's chromium"),
]

STEPS = """\
%%distributed -n 2 --name {name} {options}
import os, time
from IPython.display import HTML, display
if rank == 1:
    display(HTML('<b>rich at once</b>'))
step = 0
while not os.path.exists({word!r}):
    print('step', step, flush=True)
    step += 1
    time.sleep(0.1)
print('last words of', rank)
"""
# the index of the run's cell
CELL = 1


class Notebook:
    """A notebook in a browser: its first cell loads the extension, its second runs until it is told to end."""

    def __init__(self, browser: Browser, server: JupyterServer, name: str, in_lab: bool, options: str = "") -> None:
        self.name = name
        self.server = server
        self.home = server.home
        self.path = server.home.work / f"{name}.ipynb"
        self._in_lab = in_lab
        steps = STEPS.format(name=name, options=options, word=str(self.home.work / name))
        new_notebook(self.path, "%load_ext sgpu_magic", steps, "print('another cell')")
        self.page: Page = browser.new_page(viewport={"width": 1280, "height": 1000})
        self.console = console_errors(self.page)
        self.open()

    def open(self) -> None:
        # a workspace of its own: JupyterLab reopens what was open before
        path = f"lab/workspaces/{self.name}/tree" if self._in_lab else "notebooks"
        self.page.goto(f"{self.server.url}/{path}/{self.path.name}")
        expect(self.page.locator(".jp-Notebook .jp-CodeCell")).to_have_count(3, timeout=60_000)

    @property
    def cell(self) -> Any:
        """The cell of the run."""
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(CELL)

    @property
    def view(self) -> Any:
        """The run's live view."""
        return self.cell.locator(".sgpu-root")

    @property
    def kernel(self) -> str:
        """The id of its kernel."""
        sessions = self.server.get("api/sessions").body
        return next(session["kernel"]["id"] for session in sessions if session["path"] == self.path.name)

    def run(self, at: int, done: str) -> None:
        """Run a cell until its prompt is `done`; a page that has just come up may not take the keys yet."""
        cell = self.page.locator(".jp-Notebook .jp-CodeCell").nth(at)
        prompt = cell.locator(".jp-InputPrompt")

        def press() -> bool:
            try:
                choose_kernel(self.page)
                cell.locator(".cm-content").first.click(timeout=5_000)
                self.page.keyboard.press("Shift+Enter")
                expect(prompt).to_have_text(re.compile(done), timeout=5_000)
            except (AssertionError, PageTimeout):
                return False
            return True

        dialogs = self.page.locator(".jp-Dialog")
        eventually(press, 60, lambda: f"cell {at} does not run; {dialogs.all_inner_texts()}")

    def start(self, pool: Home | None = None) -> str:
        """Run both cells and return the run's id once its view shows lines; `pool` is another one's home."""
        self.run(0, r"\[\d+\]")
        self.run(CELL, r"\[\*\]")
        run_id = eventually(lambda: (pool or self.home).run_named(self.name), 30, "the run does not start")
        expect(self.view).to_contain_text("step 5", timeout=30_000)
        return run_id

    def end_run(self) -> None:
        """Let the run end."""
        (self.home.work / self.name).touch()

    def press(self, button: str) -> None:
        self.view.get_by_role("button", name=re.compile(f"^{button}")).first.click()

    def save(self) -> list[dict[str, Any]]:
        """Save the notebook and return the cell's outputs as they are in its file."""
        before = self.path.stat().st_mtime_ns
        self.page.keyboard.press("Control+s")

        def saved() -> list[Any]:
            try:
                # the server truncates the file before it writes
                cells = json.loads(self.path.read_text())["cells"]
            except ValueError:
                return []
            return cells if self.path.stat().st_mtime_ns != before else []

        return eventually(saved, 10, "it is not saved")[CELL]["outputs"]

    def picture(self, what: str) -> None:
        ARTEFACTS.mkdir(exist_ok=True)
        self.page.screenshot(path=ARTEFACTS / f"reload-{self.name}-{what}.png")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as made:
        yield made


@pytest.fixture(scope="module", params=["jupyterlab", pytest.param("notebook", marks=pytest.mark.slow)])
def server(server_home: Home, request: pytest.FixtureRequest) -> Iterator[JupyterServer]:
    made = JupyterServer(server_home, request.param, token="")
    yield made
    made.close()


@pytest.fixture
def in_lab(request: pytest.FixtureRequest) -> bool:
    return "jupyterlab" in request.node.callspec.id


@pytest.fixture
def opened(
    browser: Browser, server: JupyterServer, in_lab: bool, request: pytest.FixtureRequest
) -> Iterator[Callable[[str], Notebook]]:
    """Opens notebooks; on failure the pages' pictures are kept."""
    made: list[Notebook] = []

    def make(name: str, options: str = "") -> Notebook:
        made.append(Notebook(browser, server, f"{name}-{'lab' if in_lab else 'notebook'}", in_lab, options))
        return made[-1]

    yield make
    for notebook in made:
        notebook.end_run()
        notebook.picture("last")
        notebook.page.close()
    # remaining runs end with their kernel
    for kernel in server.get("api/kernels").body:
        server.delete(f"api/kernels/{kernel['id']}")


def first_step(text: str) -> int:
    return min(int(step) for step in re.findall(r"step (\d+)", text))


@pytest.mark.slow
def test_a_reloaded_page_has_the_live_view_again_and_the_outputs_at_the_end(
    opened: Callable[[str], Notebook], in_lab: bool
):
    notebook = opened("reload")
    run_id = notebook.start()
    notebook.save()
    notebook.page.reload()
    begin = time.monotonic()
    expect(notebook.view).to_contain_text("running", timeout=20_000)
    expect(notebook.view).to_contain_text(f"run {run_id[:4]}")
    assert time.monotonic() - begin < 15
    expect(notebook.cell.locator(".jp-InputPrompt")).to_have_text("[*]:")
    if in_lab:
        expect(notebook.page.locator(".lm-TabBar-tab.jp-mod-current.jp-mod-dirty")).to_have_count(0)
    # a rank's rich display is below the view, once
    expect(notebook.cell.locator(".jp-OutputArea b", has_text="rich at once")).to_have_count(1)
    notebook.picture("live")

    # the run continues: these lines are written after the reload
    step = notebook.home.log(run_id, 0).count("\n") + 10
    expect(notebook.view).to_contain_text(f"step {step}", timeout=10_000)
    # and every line from before is there
    log = notebook.view.locator("[role=log], .sgpu-log, .sgpu-lines").first
    log.hover()
    notebook.page.mouse.wheel(0, -1_000_000)
    expect(notebook.view).to_contain_text(re.compile(r"step 0\D"), timeout=10_000)

    notebook.end_run()
    output = notebook.cell.locator(".jp-OutputArea")
    expect(output).to_contain_text("succeeded", timeout=20_000)
    expect(output).to_contain_text("last words of 1")
    # the view stays, above what the ranks displayed
    expect(notebook.view.locator(".sgpu-state")).to_have_text("succeeded")
    expect(notebook.cell.locator(".jp-OutputArea b", has_text="rich at once")).to_have_count(1)
    expect(notebook.cell.locator(".jp-InputPrompt")).to_have_text("[2]:")
    notebook.picture("end")
    saved = notebook.save()
    assert [output["output_type"] for output in saved] == ["display_data"] * 3
    assert "".join(saved[1]["data"]["text/plain"]) == "[1]"
    assert "".join(saved[2]["data"]["text/html"]) == "<b>rich at once</b>"
    record = saved[0]["data"]["application/vnd.sgpu.run.v1+json"]
    assert (record["run_id"], record["state"]) == (run_id, "succeeded")
    assert saved == [
        {**output, "data": {kind: _lines(kind, content) for kind, content in output["data"].items()}}
        for output in notebook.server.get(f"sgpu/runs/{run_id}/outputs").body["outputs"]
    ]
    # both the kernel and the page accept further cells
    notebook.run(2, r"\[\d+\]")
    expect(notebook.page.locator(".jp-Notebook .jp-CodeCell").nth(2)).to_contain_text("another cell")


@pytest.mark.slow
def test_a_run_in_another_machines_pool_survives_a_reload_as_well(opened: Callable[..., Notebook], in_lab: bool):
    if not in_lab:
        pytest.skip("the server's half is the same")
    with served_pool() as pool:
        notebook = opened("far", "--pool team")
        list_pools(notebook.home, [("team", pool, {})])
        notebook.start(pool.home)
        notebook.page.reload()
        expect(notebook.view).to_contain_text("running", timeout=20_000)
        step = len(re.findall(r"step", pool.home.log(pool.home.run_named(notebook.name), 0))) + 10
        expect(notebook.view).to_contain_text(f"step {step}", timeout=10_000)
        notebook.picture("live")
        notebook.end_run()
        output = notebook.cell.locator(".jp-OutputArea")
        expect(output).to_contain_text("succeeded", timeout=20_000)
        expect(output).to_contain_text("last words of 1")
        notebook.picture("end")
        saved = notebook.save()
        assert saved[0]["data"]["application/vnd.sgpu.run.v1+json"]["state"] == "succeeded"
        # the kernel disconnects before the pool ends; other tests' runs expect a single pool
        notebook.server.delete(f"api/kernels/{notebook.kernel}")
        remove_pool("team", listed(notebook.home))


@pytest.mark.slow
def test_cancel_works_on_a_reloaded_page_while_the_cell_blocks(opened: Callable[[str], Notebook]):
    notebook = opened("cancel")
    notebook.start()
    notebook.save()
    notebook.page.reload()
    expect(notebook.view).to_contain_text("running", timeout=20_000)
    notebook.press("Cancel")
    begin = time.monotonic()
    output = notebook.cell.locator(".jp-OutputArea")
    expect(output).to_contain_text("RunCancelled", timeout=10_000)
    assert time.monotonic() - begin < 5
    expect(output).to_contain_text("cancelled")
    saved = notebook.save()
    assert saved[-1]["ename"] == "RunCancelled"


@pytest.mark.slow
def test_a_page_that_was_not_saved_has_the_run_all_the_same(opened: Callable[[str], Notebook]):
    """Its file does not mention the run, which ends while no page is open."""
    notebook = opened("unsaved")
    run_id = notebook.start()
    notebook.page.goto("about:blank")
    notebook.end_run()
    eventually(lambda: notebook.server.get(f"sgpu/runs/{run_id}/outputs").status == 200, 10, "it goes on")
    notebook.open()
    output = notebook.cell.locator(".jp-OutputArea")
    expect(output).to_contain_text("last words of 0", timeout=20_000)
    expect(output).to_contain_text("succeeded")


@pytest.mark.slow
def test_a_notebook_that_is_closed_and_opened_again_has_its_run(opened: Callable[[str], Notebook], in_lab: bool):
    if not in_lab:
        pytest.skip("a notebook's tab is the browser's own here: closing it is leaving the page")
    notebook = opened("tab")
    notebook.start()
    notebook.save()
    tab = notebook.page.locator(".lm-TabBar-tab.jp-mod-current")
    # the page learns that the file is saved a moment after it is
    expect(tab.and_(notebook.page.locator(".jp-mod-dirty"))).to_have_count(0)
    tab.locator(".lm-TabBar-tabCloseIcon").click()
    expect(notebook.page.locator(".jp-Notebook")).to_have_count(0)
    notebook.page.locator(f".jp-DirListing-item:has-text('{notebook.path.name}')").dblclick()
    expect(notebook.view).to_contain_text("running", timeout=20_000)
    notebook.end_run()
    expect(notebook.cell.locator(".jp-OutputArea")).to_contain_text("succeeded", timeout=20_000)


@pytest.mark.slow
def test_a_restarted_kernel_leaves_what_became_of_its_run(opened: Callable[[str], Notebook]):
    notebook = opened("restart")
    run_id = notebook.start()
    kernel = notebook.kernel
    notebook.page.locator("[data-jp-item-name='restart']").first.click()
    notebook.page.locator(".jp-Dialog .jp-mod-accept").click()
    output = notebook.cell.locator(".jp-OutputArea")
    expect(output).to_contain_text("cancelled", timeout=30_000)
    expect(output).to_contain_text(f"%sgpu_attach {run_id[:4]}")
    expect(notebook.view.locator(".sgpu-state")).to_have_text("cancelled")
    assert notebook.kernel == kernel
    # the page has forgotten all comms before the kernel hears of its restart
    assert [text for text in notebook.console if "Comm not found" in text] == []


@pytest.mark.slow
def test_a_cell_that_this_page_follows_is_left_to_its_kernel(opened: Callable[[str], Notebook]):
    """The server is asked about an active run only by a page that has lost it."""
    notebook = opened("followed")
    asked: list[str] = []
    notebook.page.on("request", lambda request: asked.append(request.url) if "/sgpu/runs/" in request.url else None)
    run_id = notebook.start()
    assert asked == []
    notebook.end_run()
    expect(notebook.cell.locator(".jp-OutputArea")).to_contain_text("succeeded", timeout=20_000)
    assert os.path.isdir(notebook.home.run_dir(run_id))


def _lines(kind: str, content: Any) -> Any:
    """Content as a notebook's file has it: texts as lists of lines."""
    return content.splitlines(keepends=True) if isinstance(content, str) else content
