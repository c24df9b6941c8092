"""The environment panel below a cell, in Debian's Chromium: a real kernel, a real pool with simulated devices.

Pictures of what was seen lie in tests/artefacts afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from browsers import OpenNotebook, has_browser
from homes import Home
from playwright.sync_api import Locator, expect

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_browser(), reason="needs Debian's chromium"),
    # a page of JupyterLab takes seconds to load on two cores
    pytest.mark.timeout(240),
]

LOAD = "%load_ext sgpu_magic\nfrom pathlib import Path"
PANEL = "%sgpu_env --panel"
WAIT = """%%distributed
import time
print('rank', rank, 'is here', flush=True)
while not Path('go').exists(): time.sleep(0.05)"""
SLOW_MS = 60_000


@pytest.fixture(scope="module")
def lab_home() -> Iterator[Home]:
    made = Home({"SGPU_SIMULATE": "a10:4,h100:8", "SGPU_PRICES": "a10=2.5,h100=7"})
    yield made
    made.close()


def panel(notebook: OpenNotebook, cell: int = 1) -> Locator:
    return notebook.output(cell).locator(".sgpu-panel")


def connect(shown: Locator) -> None:
    """From what a first look finds to ranks that are there: start the pool where there is none, type, Connect."""
    start = shown.locator(".sgpu-state-card").get_by_role("button", name="Start")
    types = shown.get_by_role("radio", name=re.compile("^A10"))
    expect(start.or_(types).first).to_be_visible(timeout=SLOW_MS)
    if start.is_visible():
        start.click()
    types.click(timeout=SLOW_MS)
    shown.get_by_role("radio", name="2", exact=True).click()
    shown.locator(".sgpu-primary").click(timeout=SLOW_MS)
    expect(shown.locator("[data-stage=connected]")).to_contain_text("Connected: 2", timeout=SLOW_MS)


def test_the_widget_connects_and_watches_while_a_cell_blocks(opened: Callable[..., OpenNotebook]) -> None:
    notebook = opened("widget", [PANEL, WAIT])
    notebook.run(1)
    shown = panel(notebook)
    connect(shown)
    notebook.picture("panel-widget-connected", shown)
    notebook.start(2)
    expect(notebook.output(2)).to_contain_text("is here", timeout=SLOW_MS)
    # the ranks' own use, while the cell blocks
    expect(shown.locator(".sgpu-own")).to_have_count(2)
    times = shown.locator(".sgpu-times")
    expect(times).to_contain_text("$")
    before = times.inner_text()
    expect(times).not_to_have_text(before, timeout=10_000)
    expect(shown.locator(".sgpu-run-words").first).to_contain_text("running", timeout=10_000)
    notebook.picture("panel-widget-running", shown)
    (notebook.server.home.work / "go").touch()
    notebook.wait_done(2)
    shown.get_by_role("button", name="End session", exact=True).click()
    expect(shown.locator("[data-stage=ended]")).to_contain_text("Session ended", timeout=SLOW_MS)
    expect(shown.locator(".sgpu-primary")).to_be_enabled(timeout=SLOW_MS)


def test_the_widget_says_that_its_kernel_has_gone(opened: Callable[..., OpenNotebook]) -> None:
    notebook = opened("widget_gone", [PANEL])
    notebook.run(1)
    shown = panel(notebook)
    expect(shown.locator(".sgpu-add")).to_be_visible(timeout=SLOW_MS)
    # a restart from the same page is reported at once
    page = notebook.page
    page.locator(".lm-MenuBar-item", has_text="Kernel").click()
    page.locator(".lm-Menu-item", has_text="Restart Kernel…").first.click()
    page.get_by_role("button", name="Confirm Kernel Restart").click()
    expect(shown).to_contain_text("%sgpu_env --panel shows a new one.", timeout=SLOW_MS)
    # a server that is stopped during a kernel's restart waits half a minute for it
    expect(page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]")).to_be_visible(timeout=SLOW_MS)
