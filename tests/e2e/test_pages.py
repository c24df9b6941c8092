"""The live view and the panel in Chromium as they ask a real kernel, on a page without JupyterLab.

Pictures of what was seen lie in tests/artefacts afterwards.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bare_pages import BarePage
from browsers import has_browser
from front_end import LiveView
from kernels import Cell, Home, Kernel
from playwright.sync_api import Browser

pytestmark = pytest.mark.skipif(not has_browser(), reason="needs Debian's chromium")

HOME_VARIABLES = {"SGPU_SIMULATE": "a10:4,h100:8", "SGPU_CPU_SLOTS": "16"}
UNTIL_GO = "import time\nfrom pathlib import Path\nwhile not Path('go').exists(): time.sleep(0.05)"
STEPS = f"""%%distributed -n 4 --type cpu --name train_digits
for step in range(3): print(f'epoch {{step}}  train 0.09{{rank}}', flush=True)
{UNTIL_GO}
print('over', rank)"""


RUN_MIME = "application/vnd.sgpu.run.v1+json"

NewPage = Callable[..., BarePage]


@pytest.fixture
def new_page(browser: Browser) -> Iterator[NewPage]:
    pages: list[BarePage] = []

    def make(kernel: Kernel, view: LiveView, *, vscode: bool = False) -> BarePage:
        pages.append(BarePage(browser, kernel, view, vscode=vscode))
        return pages[-1]

    yield make
    for page in pages:
        page.close()
        assert not page.errors


def live_view(cell: Cell) -> LiveView:
    """The view of the cell's run, once there is one; a session of an earlier test may still open one of its own."""
    shown: list[LiveView] = []

    def is_there() -> bool:
        shown[:] = [output.view for output in cell.reply.outputs if output.view is not None]
        return bool(shown)

    cell.until(is_there, 30, "the live view")
    return shown[0]


def test_a_run_is_seen_while_it_goes_on(kernel: Kernel, home: Home, new_page: NewPage):
    cell = kernel.start(STEPS)
    page = new_page(kernel, live_view(cell))
    cell.until(lambda: page.texts(".sgpu-state") == ["running"], 30, page.text("body"))
    assert len(page.texts(".sgpu-card")) == 4
    cell.until(lambda: "epoch 2  train 0.093" in page.text(".sgpu-log"))
    # processes on CPU are measured once a second
    cell.until(lambda: "cores" in page.text(".sgpu-use"))
    at = page.texts(".sgpu-clock")
    cell.until(lambda: page.texts(".sgpu-clock") != at, 10, f"the clock stands at {at}")
    page.picture("running")
    page.press(cell, "tab", "rank 2")
    cell.until(lambda: "train 0.092" in page.text(".sgpu-log") and "train 0.091" not in page.text(".sgpu-log"))
    (home.work / "go").touch()
    reply = cell.wait()
    assert "succeeded" in reply.text
    assert reply.lines(3)[-1] == "over 3"
    assert "application/vnd.sgpu.run.v1+json" in {kind for output in reply.outputs for kind in output.data}


@pytest.mark.slow
def test_cancel_works_while_the_cell_blocks(kernel: Kernel, new_page: NewPage):
    cell = kernel.start("%%distributed -n 2 --type cpu\nimport time\ntime.sleep(600)")
    page = new_page(kernel, live_view(cell))
    page.press(cell, "button", "Cancel")
    reply = cell.wait(20)
    assert (reply.status, reply.ename) == ("error", "RunCancelled"), reply.story


@pytest.mark.slow
def test_a_run_in_vs_code_is_drawn_in_its_colours_and_cancelled_over_the_shell(
    new_kernel: Callable[..., Kernel], home: Home, new_page: NewPage
):
    (home.work / "go").unlink(missing_ok=True)
    kernel = new_kernel()
    kernel.check("__vsc_ipynb_file__ = '/work/train.ipynb'")
    cell = kernel.start(STEPS)
    page = new_page(kernel, live_view(cell), vscode=True)
    cell.until(lambda: page.texts(".sgpu-state") == ["running"], 30, page.text("body"))
    style = "name => getComputedStyle(document.querySelector('.sgpu-run'))[name]"
    colours = [page.page.evaluate(style, name) for name in ("color", "backgroundColor")]
    assert colours == ["rgb(204, 204, 204)", "rgb(31, 31, 31)"]
    page.picture("vscode")
    page.press(cell, "button", "Stacks")
    cell.until(lambda: "time.sleep(0.05)" in page.text(".sgpu-stacks"), 10, "no stacks come")
    page.press(cell, "button", "Cancel")
    reply = cell.wait(20)
    assert (reply.status, reply.ename) == ("error", "RunCancelled"), reply.story
    records = [o.data[RUN_MIME] for o in reply.outputs if RUN_MIME in o.data]
    assert Path(records[0]["directory"], "run.json").exists()


def test_the_panel_connects_with_a_click_for_the_type_and_one_to_apply(
    new_kernel: Callable[..., Kernel], new_page: NewPage
):
    # the choice belongs to the notebook, and a session is found by its kernel's id
    kernel = new_kernel(server_id=str(uuid.uuid4()))
    cell = kernel.start("%sgpu_env --panel")
    cell.wait()
    page = new_page(kernel, kernel.front_end.view)
    cell.until(lambda: "4 of 4 free" in page.text("body"), 30, "it does not say what is free")
    page.press(cell, "radio", "A10")
    page.press(cell, "button", "Apply and connect")
    cell.until(lambda: "Connected: 1" in page.text("[data-stage=connected]"), 60, "it does not connect")
    page.picture("panel-connected")
    assert kernel.check("%%distributed\nprint('ranks', world_size)").lines(0) == ["ranks 1"]
    page.press(cell, "button", "End session")
    cell.until(lambda: "Session ended" in page.text("[data-stage=ended]"), 30, "it does not end")
