"""The environment panel in Debian's Chromium: a real JupyterLab and Notebook 7, real kernels, a simulated pool.

Pictures of what was seen lie in tests/artefacts afterwards.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator

import pytest
from browsers import OpenNotebook, has_browser
from homes import Home
from jupyter_servers import JupyterServer, jupyter_server, new_notebook
from playwright.sync_api import Browser, Locator, Page, expect
from waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_browser(), reason="needs Debian's chromium"),
    # a page of JupyterLab takes seconds to load on two cores
    pytest.mark.timeout(240),
]

VARIABLES = {"SGPU_SIMULATE": "a10:4,h100:8", "SGPU_PRICES": "a10=2.5,h100=7", "SGPU_CPU_SLOTS": "16"}
LOAD = "%load_ext sgpu_magic"
UNTIL_GO = "import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.05)"
TIMES = "\u00a0\u00d7\u00a0"
# a session's ranks import torch, on two cores
CONNECTED_MS = 90_000


@pytest.fixture(scope="module")
def lab_home() -> Iterator[Home]:
    made = Home(VARIABLES)
    yield made
    made.close()


Opener = Callable[..., OpenNotebook]


@pytest.fixture
def notebooks(lab: JupyterServer, browser: Browser) -> Iterator[Opener]:
    """Opens a notebook with these cells: `notebooks("name", [cells], dark=True)`."""
    pages: list[OpenNotebook] = []

    def make(name: str, cells: list[str], dark: bool = False) -> OpenNotebook:
        (lab.home.work / "go").unlink(missing_ok=True)
        new_notebook(lab.home.work / f"{name}.ipynb", *cells)
        page = OpenNotebook(lab, browser, f"{name}.ipynb", dark=dark)
        pages.append(page)
        page.kernel_ready()
        return page

    yield make
    for page in pages:
        errors = page.errors
        page.close()
        assert not errors
    end_sessions(lab)


def end_sessions(lab: JupyterServer) -> None:
    for session in lab.get("api/sessions").body:
        lab.delete(f"api/sessions/{session['id']}")
    eventually(lambda: not lab.get("api/kernels").body, 20, "the kernels do not end")


def panel(page: Page) -> Locator:
    return page.locator("#sgpu-panel")


def open_panel(page: Page) -> Locator:
    page.get_by_role("tab", name="GPU environment").click()
    shown = panel(page)
    expect(shown.get_by_role("heading", name="GPU environment")).to_be_visible(timeout=20_000)
    return shown


def choose(shown: Locator, label: str, gpus: int | None = None) -> None:
    """Choose a type, and how many."""
    shown.get_by_role("radio", name=label).first.click()
    if gpus is not None:
        shown.get_by_role("radio", name=str(gpus), exact=True).click()


def session(shown: Locator) -> Locator:
    return shown.get_by_role("region", name="Session")


def connect(shown: Locator, label: str, gpus: int) -> None:
    choose(shown, label, gpus)
    shown.get_by_role("region", name="Apply").get_by_role("button", name="connect").click()
    expect(session(shown)).to_contain_text("Connected", timeout=CONNECTED_MS)


def disconnect(shown: Locator) -> None:
    session(shown).get_by_role("button", name="End session").click()
    expect(session(shown)).to_contain_text("Session ended", timeout=30_000)


def assert_fits(page: Page) -> None:
    """At 250 px the session's state has one line, nothing is wider than the panel, and only the panel scrolls."""
    panel(page).evaluate("panel => { panel.querySelector('.sgpu-panel-root').style.width = '250px' }")
    line = panel(page).locator(".sgpu-state-line")
    lines, hidden = line.evaluate("line => [line.offsetHeight / 18, line.scrollWidth - line.clientWidth]")
    assert (lines, hidden) == (1, 0)
    scrolling = """panel => [...panel.querySelectorAll('*')].filter((each) => {
        const { overflowX, overflowY } = getComputedStyle(each)
        const scrolls = (overflow) => ['auto', 'scroll'].includes(overflow)
        return scrolls(overflowY) || (scrolls(overflowX) && each.scrollWidth > each.clientWidth)
    }).map((each) => each.className)"""
    assert panel(page).evaluate(scrolling) == ["sgpu-panel"]
    assert panel(page).locator(".sgpu-panel").evaluate("panel => panel.scrollWidth - panel.clientWidth") == 0
    panel(page).evaluate("panel => { panel.querySelector('.sgpu-panel-root').style.width = '' }")


def from_menu(page: Page, menu: str, label: str) -> None:
    page.locator(".lm-MenuBar-itemLabel").get_by_text(menu, exact=True).click()
    page.locator(".lm-Menu-itemLabel").get_by_text(label, exact=True).click()


def chip(notebook: OpenNotebook) -> Locator:
    return notebook.page.locator(".sgpu-chip button")


def test_first_use_is_connected_after_three_clicks(notebooks: Opener) -> None:
    notebook = notebooks("first", [LOAD])
    notebook.run(0)
    page = notebook.page
    expect(chip(notebook)).to_be_hidden()
    shown = open_panel(page)
    expect(shown).to_contain_text("4 of 4 free", timeout=30_000)
    shown.get_by_role("radio", name="A10").click()
    button = shown.get_by_role("button", name="Apply and connect")
    expect(button).to_be_enabled(timeout=20_000)
    notebook.picture("panel-chosen")
    button.click()
    expect(session(shown)).to_contain_text("Connected", timeout=CONNECTED_MS)
    notebook.picture("panel-connected")
    assert_fits(page)
    expect(chip(notebook)).to_contain_text(f"1{TIMES}A10 (simulated) · connected", timeout=10_000)
    saved = notebook.save()["metadata"]["sgpu"]
    assert (saved["choice"]["gpus"], saved["choice"]["type"]) == (1, "a10")
    disconnect(shown)
    expect(chip(notebook)).to_be_hidden(timeout=10_000)
    notebook.picture("panel-disconnected")


def test_a_kernel_without_the_extension_is_connected_after_two_clicks(notebooks: Opener) -> None:
    notebook = notebooks("bare", ["1"])
    shown = open_panel(notebook.page)
    expect(shown).to_contain_text("This kernel has not loaded sgpu-magic.", timeout=20_000)
    assert "UNKNOWN CONTROL MESSAGE" not in notebook.server.log(), "only kernels with the extension are asked"
    shown.get_by_role("button", name=f"Run {LOAD}").click()
    expect(notebook.cell(0)).to_contain_text(LOAD)
    expect(notebook.cell(0).locator(".jp-InputPrompt").first).to_have_text(re.compile(r"\[\d+\]:"), timeout=30_000)
    notebook.picture("panel-loaded")
    expect(shown.get_by_role("radio", name="H100")).to_be_visible(timeout=30_000)
    # second click: type and number are preselected
    button = shown.get_by_role("button", name="Apply and connect")
    expect(button).to_be_enabled(timeout=20_000)
    button.click()
    expect(session(shown)).to_contain_text("Connected: 1", timeout=CONNECTED_MS)
    disconnect(shown)


def test_it_follows_the_notebook_in_front_and_its_kernels_restart(notebooks: Opener, lab: JupyterServer) -> None:
    new_notebook(lab.home.work / "second.ipynb", "2")
    notebook = notebooks("follows", [LOAD])
    notebook.run(0)
    page = notebook.page
    shown = open_panel(page)
    connect(shown, "A10", 2)
    page.get_by_role("tab", name="File Browser").click()
    page.get_by_text("second.ipynb").dblclick()
    expect(page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook-ExecutionIndicator")).to_have_attribute(
        "data-status", "idle", timeout=60_000
    )
    shown = open_panel(page)
    expect(shown.locator("[data-notebook='second.ipynb']")).to_be_visible()
    expect(shown).to_contain_text("This kernel has not loaded sgpu-magic.", timeout=20_000)
    expect(session(shown)).to_have_text("Not connected")
    notebook.picture("panel-second")
    page.locator(".lm-DockPanel-tabBar").get_by_text("follows.ipynb").click()
    expect(session(shown)).to_contain_text(f"Connected: 2{TIMES}A10 · local", timeout=10_000)
    from_menu(page, "Kernel", "Restart Kernel…")
    page.get_by_role("button", name="Confirm Kernel Restart").click()
    expect(shown).to_contain_text("This kernel has not loaded sgpu-magic.", timeout=60_000)
    # its session ends with the old process
    expect(session(shown)).to_contain_text("Session ended", timeout=60_000)
    expect(session(shown)).to_contain_text("the kernel was restarted")
    notebook.picture("panel-restarted")
    # the new process has loaded nothing: a cell loads the extension and restores the connection
    session(shown).get_by_role("button", name="Reconnect").click()
    expect(session(shown)).to_contain_text(f"Connected: 2{TIMES}A10 · local", timeout=CONNECTED_MS)
    expect(notebook.cell(1)).to_contain_text("%sgpu_connect --gpus 2 --type a10")
    notebook.picture("panel-reconnected")
    # once the extension is loaded, the kernel connects it
    disconnect(shown)
    expect(shown.get_by_role("radio", name="2", exact=True)).to_be_checked(timeout=20_000)
    session(shown).get_by_role("button", name="Reconnect").click()
    expect(session(shown)).to_contain_text(f"Connected: 2{TIMES}A10 · local", timeout=CONNECTED_MS)
    disconnect(shown)
    assert "UNKNOWN CONTROL MESSAGE" not in lab.log()
    assert [text for text in notebook.console if "Comm not found" in text] == []


def test_a_lost_pool_is_said_and_started_again(notebooks: Opener, lab_home: Home) -> None:
    notebook = notebooks("lost", [LOAD])
    notebook.run(0)
    shown = open_panel(notebook.page)
    expect(shown).to_contain_text("4 of 4 free", timeout=30_000)
    pid = lab_home.pool_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    start = shown.get_by_role("button", name="Start it again")
    expect(start).to_be_visible(timeout=30_000)
    expect(shown).to_contain_text("The pool ended unexpectedly.")
    notebook.picture("panel-lost")
    start.click()
    expect(start).to_have_count(0, timeout=30_000)
    expect(shown).to_contain_text("4 of 4 free", timeout=30_000)
    assert lab_home.pool_pid() not in (None, pid)


def test_a_busy_kernels_run_is_watched_opened_and_cancelled_after_a_reload(notebooks: Opener) -> None:
    notebook = notebooks(
        "busy", [LOAD, f"%%distributed -n 2 --type a10 --name busy_one\nprint('begun', flush=True)\n{UNTIL_GO}"]
    )
    notebook.run(0)
    shown = open_panel(notebook.page)
    notebook.start(1)
    row = shown.locator(".sgpu-run-row").filter(has_text="busy_one")
    expect(row).to_contain_text("running", timeout=60_000)
    notebook.picture("panel-busy")
    notebook.reload()
    # the sidebar is restored
    expect(shown.get_by_role("heading", name="GPU environment")).to_be_visible(timeout=30_000)
    expect(row).to_contain_text("running", timeout=20_000)
    # the kernel answers while its cell goes on
    expect(shown.get_by_role("radio", name="A10")).to_be_visible(timeout=20_000)
    expect(row.locator(".sgpu-run-name")).to_contain_text("busy.ipynb\u00a0· busy_one")
    row.locator(".sgpu-run-head").click()
    tab = notebook.page.locator(".sgpu-run-tab .sgpu-run")
    expect(tab.locator(".sgpu-log")).to_contain_text("begun", timeout=20_000)
    notebook.picture("panel-run-tab")
    row.get_by_role("button", name="Actions").click()
    row.get_by_role("button", name="End run").click()
    row.get_by_role("button", name="End", exact=True).click()
    expect(row).to_contain_text("cancelled", timeout=20_000)
    expect(tab.locator(".sgpu-state")).to_have_text("cancelled", timeout=20_000)
    notebook.picture("panel-cancelled")
    # the tab belongs to no kernel: one click closes it, and another shows the run in the notebook again
    notebook.page.locator(".lm-TabBar-tab").filter(has_text="busy_one").locator(".lm-TabBar-tabCloseIcon").click()
    expect(tab).to_have_count(0)
    notebook.wait_done(1)
    row.get_by_role("button", name="Attach").click()
    expect(notebook.cell(1)).to_contain_text("%sgpu_attach")
    notebook.wait_done(1)
    expect(notebook.output(1)).to_contain_text("begun")


def test_questions_are_answered_by_a_busy_kernel_which_stays_busy(notebooks: Opener) -> None:
    notebook = notebooks("asked", [LOAD, UNTIL_GO])
    notebook.run(0)
    shown = open_panel(notebook.page)
    expect(shown.get_by_role("radio", name="A10")).to_be_visible(timeout=30_000)
    notebook.start(1)
    choose(shown, "A10", 3)
    expect(shown.get_by_role("button", name="Apply and connect")).to_be_enabled(timeout=10_000)
    # requests are not execution: neither the page nor the server takes a request's end for the cell's
    indicator = notebook.page.locator(".jp-Notebook-ExecutionIndicator")
    expect(indicator).to_have_attribute("data-status", "busy")
    (kernel,) = notebook.server.get("api/kernels").body
    assert kernel["execution_state"] == "busy"
    (notebook.server.home.work / "go").touch()
    notebook.wait_done(1)


SETS = """\
%%distributed
import torch
weights = torch.zeros(256 if rank < 3 else 128, 64)
history = [0.5] * 1200
lr = 0.001
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_variables_of_a_session_are_listed_after_each_cell(notebooks: Opener, dark: bool) -> None:
    theme = "dark" if dark else "light"
    cells = [LOAD, "s = %sgpu_connect -n 4 --type a10\ns.wait(60)", SETS, "%%distributed\nepoch = 2"]
    notebook = notebooks(f"variables-{theme}", cells, dark=dark)
    page = notebook.page
    notebook.run(0)
    shown = open_panel(page)
    expect(shown.locator("h2").get_by_role("button").filter(has_text="Variables")).to_have_count(0)
    notebook.run(1)
    heading = shown.locator("h2").get_by_role("button").filter(has_text="Variables")
    expect(heading).to_have_attribute("aria-expanded", "false", timeout=30_000)
    heading.focus()
    page.keyboard.press("Enter")
    expect(shown.get_by_text("No variables yet")).to_be_visible(timeout=20_000)
    notebook.run(2)
    table = shown.get_by_role("table", name="Variables on the ranks")
    expect(table.get_by_role("columnheader")).to_have_text(["name", "type", "size"])
    expect(table.get_by_role("rowheader")).to_have_text(["history", "lr", "weightsdiffers"], timeout=20_000)
    rows = table.get_by_role("row").filter(has_text="Tensor")
    expect(rows).to_contain_text(
        [
            "(256, 64) \u00b7 float32 \u00b7 cpu \u00b7 ranks 0, 1, 2",
            "(128, 64) \u00b7 float32 \u00b7 cpu \u00b7 rank 3",
        ]
    )
    for width, height in [(1440, 900), (1024, 768)]:
        page.set_viewport_size({"width": width, "height": height})
        notebook.picture(f"panel-variables-{theme}-{width}")
    notebook.run(3)
    expect(table.get_by_role("rowheader").filter(has_text="epoch")).to_be_visible(timeout=20_000)


def test_the_chip_and_the_commands(notebooks: Opener) -> None:
    notebook = notebooks("chip", [LOAD, "%sgpu_connect -n 2 --type h100"], dark=True)
    page = notebook.page
    notebook.run(0)
    notebook.run(1, CONNECTED_MS / 1000)
    expect(chip(notebook)).to_contain_text(f"2{TIMES}H100 (simulated) · connected", timeout=CONNECTED_MS)
    notebook.picture("panel-chip", notebook.page.locator(".jp-NotebookPanel-toolbar"))
    chip(notebook).click()
    shown = panel(page)
    expect(session(shown)).to_contain_text("Connected", timeout=20_000)
    notebook.picture("panel-dark")
    from_menu(page, "Kernel", "End GPU Session")
    expect(session(shown)).to_contain_text("Session ended", timeout=30_000)
    expect(chip(notebook)).to_be_hidden(timeout=10_000)


def test_notebook_seven_has_a_button_for_it(browser: Browser) -> None:
    with jupyter_server("notebook", VARIABLES, base_url="/user/ann/") as server:
        new_notebook(server.home.work / "seven.ipynb", LOAD)
        notebook = OpenNotebook(server, browser, "seven.ipynb", is_lab=False)
        notebook.kernel_ready()
        notebook.run(0)
        notebook.page.get_by_role("button", name="Open the GPU environment").click()
        shown = panel(notebook.page)
        expect(shown).to_contain_text("4 of 4 free", timeout=30_000)
        connect(shown, "A10", 1)
        expect(chip(notebook)).to_contain_text("connected", timeout=10_000)
        notebook.picture("panel-seven")
        # Notebook shows one document at a time: a run opens below it
        shown.locator(".sgpu-run-row").filter(has_text="session main").locator(".sgpu-run-head").click()
        expect(notebook.page.locator(".sgpu-run-tab .sgpu-state")).to_have_text("connected", timeout=20_000)
        notebook.picture("panel-seven-run")
        disconnect(shown)
        # Notebook 7.6 has an error of its own: reading 'schema'
        errors = [error for error in notebook.errors if "sgpu" in error]
        notebook.close()
        assert not errors
