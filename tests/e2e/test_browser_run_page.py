"""A run's tab and the comparison of two runs in JupyterLab, with Debian's Chromium, a real kernel and a simulated pool.

Pictures of what was seen lie in tests/artefacts afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_pages import axe_problems
from browsers import OpenNotebook, has_browser
from homes import Home
from jupyter_servers import JupyterServer, new_notebook
from mlflow_interpreters import MlflowInterpreter
from mlflow_stores import lay_store
from playwright.sync_api import Browser, Locator, expect
from process_table import is_alive
from waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_browser(), reason="needs Debian's chromium"),
    # a page of JupyterLab takes seconds to load on two cores
    pytest.mark.timeout(240),
]

LOAD = "%load_ext sgpu_magic\nweights, rate = bytes(2_000_000), 0.25"
TRAIN = """\
%%distributed -n 2 --type a10 --timeout 5m
# Fit the line
import os
folder = os.environ["SGPU_CHECKPOINT_DIR"]
os.makedirs(folder, exist_ok=True)
with open(os.path.join(folder, f"rank-{rank}.txt"), "w") as file:
    file.write("weights of rank " + str(rank))
print("loss", round(1 / (1 + rate), 3), len(weights))
"""


@pytest.fixture(scope="module")
def lab_home(empty_store: Path) -> Iterator[Home]:
    made = Home({"SGPU_SIMULATE": "a10:4", "SGPU_PRICES": "a10=2.5", "SGPU_TRACK": "auto"})
    lay_store(empty_store, made.state)
    yield made
    made.close()


@pytest.fixture
def own_lab(lab_home: Home) -> Iterator[JupyterServer]:
    """A JupyterLab that the test may close."""
    made = JupyterServer(lab_home, "jupyterlab")
    yield made
    made.close()


@pytest.fixture
def notebook(lab: JupyterServer, browser: Browser) -> Iterator[OpenNotebook]:
    changed = TRAIN.replace("--timeout 5m", "--timeout 9m").replace("1 / (1 + rate)", "2 / (1 + rate)")
    new_notebook(lab.home.work / "fit.ipynb", LOAD, TRAIN, changed)
    page = OpenNotebook(lab, browser, "fit.ipynb")
    page.kernel_ready()
    yield page
    errors = page.errors
    page.close()
    assert not errors


def rows(section: Locator) -> dict[str, str]:
    """The rows of a section's table: the head of each and its first value."""
    cells = [row.locator("th, td").all_inner_texts() for row in section.locator("tbody tr").all()]
    return {cell[0]: cell[1] for cell in cells}


def opens_tab(notebook: OpenNotebook, cell: int) -> Locator:
    """The button below a run that opens its tab."""
    return notebook.cell(cell).get_by_role("button", name="Open in a tab")


def run_of(notebook: OpenNotebook, cell: int) -> str:
    arguments = opens_tab(notebook, cell).get_attribute("data-commandlinker-args")
    assert arguments is not None
    return json.loads(arguments)["run_id"]


def panel_row(notebook: OpenNotebook, cell: int) -> Locator:
    """The row of a cell's run in the panel's list."""
    head = notebook.page.locator(f'[data-run="{run_of(notebook, cell)}"]')
    return notebook.page.locator("#sgpu-panel .sgpu-run-row").filter(has=head)


def test_a_runs_tab_is_its_page_and_two_runs_are_compared(notebook: OpenNotebook, tmp_path: Path) -> None:
    page = notebook.page
    for cell in range(3):
        notebook.run(cell)
    notebook.picture("run-page-button")
    tab = page.locator(".sgpu-run-tab")
    first, second = panel_row(notebook, 1), panel_row(notebook, 2)
    run = run_of(notebook, 2)
    opens_tab(notebook, 2).click()
    expect(tab.locator(".sgpu-run")).to_have_attribute("data-run", run)
    expect(tab.get_by_role("button", name="Open in a tab")).to_have_count(0)
    page.locator(".lm-TabBar-tab.lm-mod-current").filter(has_text="Fit the line").locator(
        ".lm-TabBar-tabCloseIcon"
    ).click()
    expect(tab).to_have_count(0)

    page.get_by_role("tab", name="GPU environment").click()
    second.locator(".sgpu-run-head").click(timeout=30_000)
    shown = tab.get_by_role("article", name="run page")
    code = shown.get_by_role("region", name="code")
    expect(code).to_contain_text("%%distributed -n 2 --type a10 --timeout 9m", timeout=20_000)
    expect(code).to_contain_text('print("loss", round(2 / (1 + rate), 3), len(weights))')
    assert rows(shown.get_by_role("region", name="options")) == {"--gpus": "2", "--type": "a10", "--timeout": "9 min"}
    shipped = rows(shown.get_by_role("region", name="shipped"))
    assert list(shipped) == ["weights", "rate"]
    assert shipped["weights"] == "2.0 MB"
    assert list(rows(shown.get_by_role("region", name="phases")))[-1] == "running"
    about = rows(shown.get_by_role("region", name="run", exact=True))
    assert about["devices"].startswith("2 \u00d7 A10 (simulated")
    assert about["cost"].startswith("$")
    expect(shown.get_by_role("region", name="environment")).to_contain_text(
        "The same as in the notebook's previous run"
    )
    files = shown.get_by_role("region", name="files")
    notebook.picture("run-page")
    files.scroll_into_view_if_needed()
    notebook.picture("run-page-files")
    with page.expect_download() as started:
        files.get_by_role("link", name="checkpoints/rank-1.txt").click()
    started.value.save_as(tmp_path / "saved")
    assert (tmp_path / "saved").read_text() == "weights of rank 1"
    assert started.value.suggested_filename == "rank-1.txt"

    for run in (first, second):
        run.get_by_role("button", name="Actions").click()
        run.get_by_role("button", name="Compare").click()
    compared = page.locator(".sgpu-comparison-tab").get_by_role("article", name="comparison")
    expect(compared).to_be_visible()
    lines = compared.get_by_role("region", name="code difference")
    expect(lines.locator(".sgpu-diff-old")).to_contain_text(["--timeout 5m", "round(1 / (1 + rate)"])
    expect(lines.locator(".sgpu-diff-new")).to_contain_text(["--timeout 9m", "round(2 / (1 + rate)"])
    expect(compared.locator("tr.sgpu-differs").filter(has_text="--timeout")).to_contain_text("5 min9 min")
    notebook.picture("run-comparison")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_runs_tab_and_the_comparison_are_reached_by_keyboard_and_please_axe(
    lab: JupyterServer, browser: Browser, front_end: Path, theme: str
) -> None:
    name = f"keys-{theme}.ipynb"
    new_notebook(lab.home.work / name, LOAD, TRAIN, TRAIN.replace("--timeout 5m", "--timeout 9m"))
    # as high as the page: axe can't check the colours of content that is scrolled out of sight
    notebook = OpenNotebook(lab, browser, name, size=(1440, 2000), dark=theme == "dark")
    page = notebook.page
    found: dict[str, list[str]] = {}
    try:
        notebook.kernel_ready()
        for cell in range(3):
            notebook.run(cell)
        page.get_by_role("tab", name="GPU environment").click()
        runs = page.locator("#sgpu-panel .sgpu-run-row").filter(has_text=name)
        expect(runs).to_have_count(2, timeout=30_000)
        opens_tab(notebook, 2).press("Enter")
        shown = page.locator(".sgpu-run-tab").get_by_role("article", name="run page")
        expect(shown).to_contain_text("checkpoints/rank-1.txt", timeout=20_000)
        notebook.picture(f"run-page-{theme}")
        found["run page"] = axe_problems(notebook, front_end, [".sgpu-run-tab"], 20)
        for run in (runs.nth(1), runs.nth(0)):
            run.get_by_role("button", name="Actions").press("Enter")
            run.get_by_role("button", name="Compare").press("Enter")
        compared = page.locator(".sgpu-comparison-tab").get_by_role("article", name="comparison")
        expect(compared.locator(".sgpu-diff-new")).to_contain_text(["--timeout 9m"])
        notebook.picture(f"comparison-{theme}")
        found["comparison"] = axe_problems(notebook, front_end, [".sgpu-comparison-tab"], 20)
        assert not notebook.errors
    finally:
        notebook.close()
    assert not any(found.values()), "\n\n".join(f"{part}: {text}" for part, texts in found.items() for text in texts)


TRACKED = """\
%%distributed -n 1 --name tracked
import mlflow
mlflow.log_metric("loss", 0.25)
"""


def test_a_tracked_runs_tab_opens_it_in_mlflow(
    lab_home: Home, browser: Browser, tmp_path: Path, own_lab: JupyterServer
) -> None:
    lab = own_lab
    new_notebook(lab.home.work / "tracked.ipynb", "%load_ext sgpu_magic", TRACKED)
    notebook = OpenNotebook(lab, browser, "tracked.ipynb", size=(1440, 900))
    notebook.kernel_ready()
    page = notebook.page
    notebook.run(0)
    notebook.run(1)
    page.get_by_role("tab", name="GPU environment").click()
    page.locator("#sgpu-panel .sgpu-run-row").filter(has_text="tracked").locator(".sgpu-run-head").click()
    shown = page.locator(".sgpu-run-tab").get_by_role("region", name="mlflow")
    store = f"sqlite:///{lab_home.state}/mlflow/mlflow.db"
    commands = shown.locator("pre")
    expect(commands.nth(0)).to_contain_text("-m pip install mlflow==", timeout=30_000)
    expect(commands.nth(1)).to_have_text(f"mlflow ui --backend-store-uri {store}")
    shown.scroll_into_view_if_needed()
    notebook.picture("run-page-mlflow-missing")

    interpreter = MlflowInterpreter(tmp_path)
    interpreter.install()
    record = lab_home.run_dir(lab_home.run_named("tracked")) / "run.json"
    record.write_text(json.dumps(json.loads(record.read_bytes()) | {"executable": str(interpreter.path)}))
    page.locator(".sgpu-run-tab").get_by_role("button", name="Refresh").click()
    with page.expect_popup() as opened:
        shown.get_by_role("button", name="Open in MLflow").click()
    address = shown.get_by_role("link")
    expect(address).to_be_visible(timeout=30_000)
    notebook.picture("run-page-mlflow")
    run_id = shown.locator("code").first.inner_text()
    expect(opened.value).to_have_url(f"{address.inner_text()}")
    assert address.inner_text().endswith(f"/runs/{run_id}")
    assert not notebook.errors
    notebook.close()
    (pid,) = interpreter.started()
    assert interpreter.started()[pid] == store
    lab.close()
    eventually(lambda: not is_alive(pid), 20, "mlflow ui runs on after the server's end")
