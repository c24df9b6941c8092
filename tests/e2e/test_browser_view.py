"""The live view in Debian's Chromium: a real JupyterLab, a real Notebook 7, real ranks.

Pictures of what was seen lie in tests/artefacts afterwards.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable

import pytest
from browsers import OpenNotebook, has_browser
from homes import Home
from jupyter_servers import JupyterServer, jupyter_server, new_notebook
from playwright.sync_api import Browser, Locator, expect
from waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_browser(), reason="needs Debian's chromium"),
    # a page of JupyterLab takes seconds to load on two cores
    pytest.mark.timeout(240),
]

LOAD = "%load_ext sgpu_magic\nfrom pathlib import Path"
UNTIL_GO = "import time\nfrom pathlib import Path\nwhile not Path('go').exists(): time.sleep(0.05)"
STEPS = f"""%%distributed -n 4 --name train_digits
for step in range(3): print(f'epoch {{step}}  train 0.09{{rank}}', flush=True)
{UNTIL_GO}
print('over', rank)"""


def view(notebook: OpenNotebook, cell: int = 1) -> Locator:
    return notebook.output(cell).locator(".sgpu-run")


def go(notebook: OpenNotebook) -> None:
    (notebook.server.home.work / "go").touch()


def test_a_run_is_seen_while_it_goes_on_and_kept_when_it_is_over(opened: Callable[..., OpenNotebook]):
    notebook = opened("live", [STEPS])
    notebook.start(1)
    shown = view(notebook)
    expect(shown.locator(".sgpu-state")).to_have_text("running", timeout=30_000)
    expect(shown.locator(".sgpu-card")).to_have_count(4)
    expect(shown.locator(".sgpu-log")).to_contain_text("epoch 2  train 0.093")
    # processes on CPU are measured once a second
    expect(shown.locator(".sgpu-use").first).to_contain_text("cores", timeout=10_000)
    clock = shown.locator(".sgpu-clock")
    at = clock.inner_text()
    expect(clock).not_to_have_text(at, timeout=5_000)
    notebook.picture("running", shown)
    shown.get_by_role("tab", name="rank 2").click()
    expect(shown.locator(".sgpu-log")).to_contain_text("train 0.092")
    expect(shown.locator(".sgpu-log")).not_to_contain_text("train 0.091")
    go(notebook)
    notebook.wait_done(1)
    expect(notebook.output(1)).to_contain_text("succeeded")
    # the extension keeps the view; the file has the form that needs none
    expect(shown.locator(".sgpu-state")).to_have_text("succeeded")
    notebook.picture("succeeded", notebook.output(1))
    saved = notebook.save("over 3")
    outputs = saved["cells"][1]["outputs"]
    assert "over 3" in str(outputs)
    assert "widget-view" not in str(outputs)
    assert "application/vnd.sgpu.run.v1+json" in str(outputs)


def test_cancel_and_stacks_work_while_the_cell_blocks(opened: Callable[..., OpenNotebook]):
    notebook = opened("buttons", ["%%distributed -n 2\nimport time\ndef wait():\n    time.sleep(600)\nwait()"])
    notebook.start(1)
    shown = view(notebook)
    expect(shown.locator(".sgpu-state")).to_have_text("running", timeout=30_000)
    shown.get_by_role("button", name="Stacks").click()
    expect(shown.locator(".sgpu-stacks")).to_contain_text("time.sleep(600)", timeout=10_000)
    notebook.picture("stacks", shown)
    shown.get_by_role("button", name="Cancel").click()
    expect(notebook.output(1)).to_contain_text("cancelled", timeout=10_000)
    notebook.wait_done(1, 10)
    notebook.picture("cancelled", notebook.output(1))
    assert "RunCancelled" in notebook.output(1).inner_text()


def test_a_rank_that_fails_stands_first_and_a_click_goes_to_its_line(opened: Callable[..., OpenNotebook]):
    cell = "%%distributed -n 4\nimport time, torch, torch.distributed as dist\nx = torch.ones(1)\nif rank == 1:\n"
    fails = "    time.sleep(0.5)  # the others wait for it\n    step(118)\n"
    step = "def step(batch):\n    print(batch)\n    raise ValueError(f'NaN in batch {batch}')"
    notebook = opened("failing", [step, f"{cell}{fails}dist.all_reduce(x)"])
    notebook.run(1)
    notebook.run(2)
    shown = notebook.output(2)
    text = shown.inner_text()
    notebook.picture("failed", shown)
    assert "ValueError" in text
    assert "NaN in batch 118" in text
    assert text.index("failed") < text.index("released from all_reduce")
    at_cursor = "document.getSelection().anchorNode?.parentElement.closest('.cm-line')?.textContent"
    failed = shown.locator(".sgpu-failure-culprit")
    for number, line in enumerate(("    step(118)", "    raise ValueError(f'NaN in batch {batch}')")):
        failed.nth(number).click()
        eventually(lambda line=line: notebook.page.evaluate(at_cursor) == line, 10, f"the cursor is not at {line}")
        expect(notebook.cell(2 - number)).to_have_class(re.compile("jp-mod-active"))


def test_an_output_stays_low_however_much_was_printed(opened: Callable[..., OpenNotebook]):
    tall = "display(HTML('<div style=\"height:3000px\">tall</div>'))"
    cell = f"from IPython.display import HTML, display\nfor line in range(50_000): print('line', line)\n{tall}"
    notebook = opened("low", [f"%%distributed -n 2\n{cell}"])
    notebook.run(1)
    box = notebook.output(1).bounding_box()
    assert box is not None
    notebook.picture("low", notebook.output(1))
    assert box["height"] < 1_200
    assert len(json.dumps(notebook.save("tall")["cells"][1]["outputs"])) < 130_000


def test_what_a_rank_prints_is_text(opened: Callable[..., OpenNotebook]):
    nasty = '<img src=x onerror="window.hurt=1"><script>window.hurt=2</script><b>bold</b>'
    notebook = opened("escaped", [f"%%distributed -n 2\nprint({nasty!r}, flush=True)\n{UNTIL_GO}"])
    notebook.start(1)
    expect(view(notebook).locator(".sgpu-log")).to_contain_text("<b>bold</b>", timeout=30_000)
    assert view(notebook).locator(".sgpu-log").locator("img, script, b").count() == 0
    go(notebook)
    notebook.wait_done(1)
    assert "<b>bold</b>" in notebook.output(1).inner_text()
    assert notebook.page.evaluate("window.hurt") is None


def test_sixteen_ranks_in_the_dark(opened: Callable[..., OpenNotebook]):
    bar = "from tqdm import tqdm\nbar = tqdm(total=100, desc='epoch 7/10')\nbar.update(40 + rank); bar.refresh()"
    notebook = opened("many", [f"%%distributed -n 16 --name sweep\n{bar}\n{UNTIL_GO}"], dark=True)
    notebook.start(1)
    shown = view(notebook)
    expect(shown.locator(".sgpu-card")).to_have_count(16, timeout=60_000)
    expect(shown.locator("[role=progressbar][aria-label='progress of rank 15']")).to_have_attribute(
        "aria-valuenow", "55", timeout=30_000
    )
    # all of them and the log's first lines fit a laptop's screen
    shown.scroll_into_view_if_needed()
    grid = shown.locator("[role=list]").bounding_box()
    assert grid is not None
    assert grid["height"] < 500
    assert notebook.page.evaluate("document.body.dataset.jpThemeLight") == "false"
    notebook.picture("sixteen-dark")
    go(notebook)
    notebook.wait_done(1)
    notebook.picture("sixteen-dark-over", notebook.output(1))


def test_displays_stand_below_the_view_with_their_rank(opened: Callable[..., OpenNotebook]):
    table = "<table><tr><td>of rank one</td></tr></table>"
    cell = f"from IPython.display import HTML, display\nif rank == 1: display(HTML('{table}'))"
    notebook = opened("displays", [f"%%distributed -n 2\n{cell}\n{UNTIL_GO}"])
    notebook.start(1)
    area = notebook.output(1)
    expect(area.locator("td", has_text="of rank one")).to_be_visible(timeout=30_000)
    expect(area.locator(".sgpu-caption")).to_have_text("rank 1")
    notebook.picture("display", area)
    go(notebook)
    notebook.wait_done(1)
    expect(area.locator("td", has_text="of rank one")).to_be_visible()


def test_a_million_lines_stay_small_and_can_be_searched(opened: Callable[..., OpenNotebook]):
    flood = "import sys\nfor k in range(250_000): print(f'step {k}  loss {k / 7:.4f}')\nsys.stdout.flush()"
    notebook = opened("flood", [f"%%distributed -n 4\n{flood}\n{UNTIL_GO}"])
    before = notebook.heap_bytes()
    notebook.start(1)
    shown = view(notebook)
    expect(shown.locator(".sgpu-count")).to_have_text("1,000,000 lines", timeout=60_000)
    log = shown.locator(".sgpu-log")
    expect(log).to_contain_text("step 249999", timeout=20_000)
    grown = notebook.heap_bytes() - before
    log.focus()
    notebook.page.keyboard.press("Home")
    expect(log).to_contain_text("step 0 ", timeout=10_000)
    notebook.page.keyboard.press("Control+f")
    shown.get_by_role("textbox", name="find in the log").fill("step 123456 ")
    notebook.page.keyboard.press("Enter")
    expect(log).to_contain_text("step 123456 ", timeout=10_000)
    expect(shown.locator(".sgpu-found")).to_contain_text("4")
    assert shown.locator(".sgpu-row").count() < 300
    notebook.picture("found", shown)
    with notebook.page.expect_download(timeout=60_000) as saved:
        shown.get_by_role("tab", name="rank 3").click()
        shown.get_by_role("button", name="download").click()
    lines = saved.value.path().read_text().splitlines()
    assert (len(lines), lines[0], lines[-1][:11]) == (250_000, "step 0  loss 0.0000", "step 249999")
    after = notebook.heap_bytes() - before
    go(notebook)
    notebook.wait_done(1)
    assert "step 249999" in notebook.output(1).inner_text()
    assert (grown < 150e6, after < 150e6) == (True, True), (grown, after)


WIDER_THAN_ITS_BOX = """(output) => [...output.querySelectorAll('*'), output]
    .filter((each) => each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).overflowX !== 'visible')
    .map((each) => each.outerHTML.slice(0, 80))"""


def test_the_status_needs_no_scroll_bar(opened: Callable[..., OpenNotebook]):
    fails = "%%distributed -n 2 --name fails\nraise ValueError('a long explanation of what is wrong here ' * 9)"
    notebook = opened("status", [fails, "%sgpu_status"], size=(1024, 768))
    notebook.run(1)
    notebook.run(2)
    shown = notebook.output(2)
    expect(shown).to_contain_text("a long explanation")
    expect(shown).to_contain_text("status.ipynb")
    notebook.picture("status", shown)
    assert shown.evaluate(WIDER_THAN_ITS_BOX) == []


def test_a_restarted_kernel_leaves_the_way_back(opened: Callable[..., OpenNotebook]):
    notebook = opened("restart", [f"%%distributed -n 2\nprint('begun', flush=True)\n{UNTIL_GO}"])
    notebook.start(1)
    expect(view(notebook).locator(".sgpu-log")).to_contain_text("begun", timeout=30_000)
    kernel = notebook.server.get("api/kernels").body[0]["id"]
    notebook.server.post(f"api/kernels/{kernel}/restart", {})
    expect(notebook.output(1)).to_contain_text("%sgpu_attach", timeout=20_000)
    notebook.picture("restarted", notebook.output(1))


def test_a_kernel_that_died_leaves_the_way_back(opened: Callable[..., OpenNotebook], lab_home: Home):
    notebook = opened("died", [f"%%distributed -n 2\nprint('begun', flush=True)\n{UNTIL_GO}"])
    notebook.start(1)
    expect(view(notebook).locator(".sgpu-log")).to_contain_text("begun", timeout=30_000)
    (pid,) = [pid for pid, process in lab_home.processes().items() if "ipykernel_launcher" in process.command]
    os.kill(pid, signal.SIGKILL)
    expect(notebook.output(1)).to_contain_text("%sgpu_attach", timeout=30_000)
    expect(notebook.output(1)).to_contain_text("begun")
    notebook.picture("died", notebook.output(1))


def test_the_status_is_live(opened: Callable[..., OpenNotebook]):
    notebook = opened(
        "status",
        [f"%%distributed -n 2 --detach --name sweep\n{UNTIL_GO}", "%sgpu_status"],
    )
    notebook.run(1)
    notebook.run(2)
    expect(notebook.output(2)).to_contain_text("running", timeout=10_000)
    notebook.picture("status", notebook.output(2))
    go(notebook)
    expect(notebook.output(2)).to_contain_text("succeeded", timeout=15_000)


def test_notebook_seven(browser: Browser):
    with jupyter_server("notebook") as server:
        cells = [LOAD, STEPS, "%%distributed -n 2\nimport time; time.sleep(600)"]
        new_notebook(server.home.work / "seven.ipynb", *cells)
        notebook = OpenNotebook(server, browser, "seven.ipynb", is_lab=False)
        notebook.kernel_ready()
        notebook.run(0)
        notebook.start(1)
        expect(view(notebook).locator(".sgpu-log")).to_contain_text("epoch 2", timeout=30_000)
        notebook.picture("running", view(notebook))
        go(notebook)
        notebook.wait_done(1)
        expect(notebook.output(1)).to_contain_text("succeeded")
        notebook.start(2)
        # the view is below the output of the previous cell, and draws nothing while it is out of view
        view(notebook, 2).wait_for(timeout=30_000)
        view(notebook, 2).scroll_into_view_if_needed()
        expect(view(notebook, 2).locator(".sgpu-state")).to_have_text("running", timeout=30_000)
        view(notebook, 2).get_by_role("button", name="Cancel").click()
        expect(notebook.output(2)).to_contain_text("cancelled", timeout=10_000)
        notebook.wait_done(2, 10)
        # Notebook 7.6 has an error of its own: reading 'schema'
        errors = [error for error in notebook.errors if "sgpu" in error]
        notebook.close()
        assert not errors


def test_kernels_end_and_nothing_stays(lab: JupyterServer, lab_home: Home):
    eventually(lambda: not lab.get("api/kernels").body, 20, "the kernels do not end")
    eventually(lambda: not lab_home.rank_pids(), 20, "ranks are left")


WIDGETS = """%%distributed -n 2
import ipywidgets as widgets, time
from IPython.display import display
from tqdm.notebook import tqdm
slider = widgets.IntSlider(description='epochs', value=3, max=100)
display(slider)
for _ in tqdm(range(1000), desc='steps'):
    time.sleep(0.02)
    if slider.value > 40:
        break
print('left at', slider.value)"""


def test_widgets_of_ranks_are_moved_and_leave_their_text(opened: Callable[..., OpenNotebook]):
    notebook = opened("widgets", [WIDGETS])
    notebook.start(1)
    sliders = notebook.output(1).locator(".widget-slider")
    expect(sliders).to_have_count(2, timeout=30_000)
    bars = notebook.output(1).locator(".widget-hprogress")
    expect(bars).to_have_count(2, timeout=30_000)
    expect(notebook.output(1)).to_contain_text("/1000", timeout=10_000)
    notebook.picture("widgets-live", notebook.output(1))
    for at in range(2):
        readout = sliders.nth(at).locator(".widget-readout")
        readout.fill(str(50 + at))
        readout.press("Enter")
    notebook.wait_done(1, 30)
    expect(notebook.output(1)).to_contain_text("IntSlider", timeout=10_000)
    expect(sliders).to_have_count(0)
    shown = notebook.output(1).inner_text()
    assert "left at 50" in shown
    assert "left at 51" in shown
    notebook.picture("widgets-left", notebook.output(1))
    saved = notebook.save("left at 50")
    assert "widget-view" not in str(saved["cells"][1]["outputs"])
    assert "/1000 [" in str(saved["cells"][1]["outputs"])
