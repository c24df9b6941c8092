"""The end of a run in Debian's Chromium: what was looked at stays, in a real JupyterLab."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from browsers import OpenNotebook, has_browser
from playwright.sync_api import Locator, expect
from waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_browser(), reason="needs Debian's chromium"),
    # a page of JupyterLab takes seconds to load on two cores
    pytest.mark.timeout(240),
]

LOAD = "%load_ext sgpu_magic"
STEPS = """%%distributed -n 4 --name train_digits
import time
from pathlib import Path
for step in range(60): print(f'step {step}  loss {1 / (step + 1):.4f}', flush=True)
while not Path('go').exists(): time.sleep(0.05)
print(f'final loss 0.012{rank}', flush=True)"""
FIGURES = """%%distributed -n 4 --name train_digits
import time
from pathlib import Path
from IPython.display import HTML, display
for step in range(60): print(f'step {step}  loss {1 / (step + 1):.4f}', flush=True)
display(HTML(f'<div>first of {rank}</div>'))
while not Path('go').exists(): time.sleep(0.05)
display(HTML(f'<div>figure of {rank}</div>'))"""
SIZE = (1440, 900)
# the distance of the last cell from the top of the run's, in each frame
WATCH = """() => {
    const [first, last] = [1, 2].map((at) => document.querySelectorAll('.jp-Notebook .jp-CodeCell')[at]);
    window.distances = [];
    const note = () => {
        const distance = Math.round(last.getBoundingClientRect().top - first.getBoundingClientRect().top);
        if (window.distances.at(-1) !== distance) window.distances.push(distance);
        requestAnimationFrame(note);
    };
    note();
}"""
# the lines that are inside the log's box, not only in the page
LINES_IN_VIEW = """(log) => {
    const box = log.getBoundingClientRect();
    const inside = (row) => row.top >= box.top - 1 && row.bottom <= box.bottom + 1;
    return [...log.querySelectorAll('.sgpu-row')].filter((row) => inside(row.getBoundingClientRect()))
        .map((row) => row.textContent);
}"""


def places(shown: Locator) -> dict[str, tuple[int, int]]:
    """Return the top of each part of the view, relative to the view's, and the view's height."""
    top, height = whole = [round(shown.bounding_box()[key]) for key in ("y", "height")]
    parts = {"header": ".sgpu-head", "rank 0": "[data-rank='0']", "rank 3": "[data-rank='3']", "log": ".sgpu-log-panel"}
    found = {name: round(shown.locator(css).bounding_box()["y"]) - top for name, css in parts.items()}
    assert whole[1] > 300
    return {**found, "height": height}


def started(opened: Callable[..., OpenNotebook], name: str) -> tuple[OpenNotebook, Locator]:
    notebook = opened(name, [STEPS, "print('the next cell')"], size=SIZE)
    notebook.start(1)
    shown = notebook.output(1).locator(".sgpu-run")
    expect(shown.locator(".sgpu-state")).to_have_text("running", timeout=30_000)
    expect(shown.locator(".sgpu-count")).to_have_text("240 lines", timeout=10_000)
    expect(shown.locator(".sgpu-use").first).to_contain_text("cores", timeout=10_000)
    return notebook, shown


def end(notebook: OpenNotebook, shown: Locator) -> None:
    (notebook.server.home.work / "go").touch()
    notebook.wait_done(1)
    expect(shown.locator(".sgpu-state")).to_have_text("succeeded", timeout=10_000)


def test_the_view_of_an_ended_run_stays_where_it_was(opened: Callable[..., OpenNotebook]) -> None:
    notebook, shown = started(opened, "ended")
    before = places(shown)
    notebook.page.evaluate(WATCH)
    end(notebook, shown)
    notebook.picture("ended", notebook.output(1))
    assert places(shown) == before
    # also in no frame between
    assert len(notebook.page.evaluate("window.distances")) == 1
    log = shown.locator(".sgpu-log")
    expect(shown.locator(".sgpu-count")).to_have_text("244 lines")
    last = eventually(lambda: log.evaluate(LINES_IN_VIEW)[-4:], 5, "no line is in view")
    assert sorted(last) == [f"[{rank}]final loss 0.012{rank}" for rank in range(4)]
    assert shown.locator(".sgpu-last").all_inner_texts() == [f"final loss 0.012{rank}" for rank in range(4)]
    shown.get_by_role("button", name="find").click()
    shown.get_by_role("textbox", name="find in the log").fill("step 7 ")
    expect(shown.locator(".sgpu-found")).to_have_text("4 of 4", timeout=5_000)
    expect(log).to_contain_text("step 7 ")
    # the file has the form that needs no extension
    notebook.cell(2).locator(".cm-content").click()
    outputs = str(notebook.save("final loss 0.0123")["cells"][1]["outputs"])
    assert "sgpu-scroll" in outputs
    notebook.reload()
    expect(notebook.output(1).locator(".sgpu-box")).to_contain_text("final loss 0.0123", timeout=20_000)


def test_what_was_found_in_the_log_stays_in_view(opened: Callable[..., OpenNotebook]) -> None:
    notebook, shown = started(opened, "found-at-the-end")
    shown.get_by_role("tab", name="rank 2").click()
    shown.get_by_role("button", name="find").click()
    shown.get_by_role("textbox", name="find in the log").fill("step 20 ")
    expect(shown.locator(".sgpu-found")).to_have_text("1 of 1", timeout=5_000)
    log = shown.locator(".sgpu-log")
    before, at = places(shown), log.evaluate(LINES_IN_VIEW)
    assert any("step 20 " in line for line in at)
    end(notebook, shown)
    notebook.picture("ended-found", notebook.output(1))
    expect(shown.locator(".sgpu-found")).to_have_text("1 of 1", timeout=5_000)
    expect(shown.get_by_role("tab", name="rank 2")).to_have_attribute("aria-selected", "true")
    assert log.evaluate(LINES_IN_VIEW)[0] == at[0]
    assert places(shown) == before


def test_figures_of_the_ranks_stay_below_the_view(opened: Callable[..., OpenNotebook]) -> None:
    notebook = opened("ended-figures", [FIGURES, "print('the next cell')"], size=SIZE)
    notebook.start(1)
    output = notebook.output(1)
    shown = output.locator(".sgpu-run")
    expect(shown.locator(".sgpu-state")).to_have_text("running", timeout=30_000)
    expect(output).to_contain_text("first of 3", timeout=10_000)
    expect(shown.locator(".sgpu-use").first).to_contain_text("cores", timeout=10_000)
    before = places(shown)
    end(notebook, shown)
    expect(output).to_contain_text("figure of 3")
    notebook.picture("ended-figures", output)
    # the page may have scrolled to the new figures, under the header that stays in sight
    assert {**places(shown), "header": 0} == {**before, "header": 0}
    displayed = output.locator(".jp-OutputArea-output div", has_text="of ").all_inner_texts()
    order = [text for text in displayed if text.startswith(("first of", "figure of"))]
    assert order == [f"{kind} of {rank}" for kind in ("first", "figure") for rank in range(4)]
    notebook.cell(2).locator(".cm-content").click()
    saved = notebook.save("figure of 3")["cells"][1]["outputs"]
    assert "succeeded" in str(saved[0])
    assert "sgpu-scroll" in str(saved[0])
