"""Cost, packages and the way to MLflow in Debian's Chromium: real runs with a price, and stories of the rest.

Pictures of what was seen lie in tests/artefacts afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browsers import OpenNotebook, has_browser
from homes import Home
from playwright.sync_api import Locator, expect
from stories import TRACKED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_browser(), reason="needs Debian's chromium"),
    # a page of JupyterLab takes seconds to load on two cores
    pytest.mark.timeout(240),
]

TESTS = Path(__file__).parents[1] / "support"
LOAD = f"%load_ext sgpu_magic\nimport sys\nfrom pathlib import Path\nsys.path.insert(0, {str(TESTS)!r})"
UNTIL_GO = "import time\nfrom pathlib import Path\nwhile not Path('go').exists(): time.sleep(0.05)"
RUN = f"%%distributed -n 4 --type a10 --name train_digits\nprint('epoch 1  train 0.09', flush=True)\n{UNTIL_GO}"


def seen(locator: Locator) -> Locator:
    """Scroll it into view: hidden views draw nothing."""
    locator.wait_for(timeout=30_000)
    locator.scroll_into_view_if_needed()
    return locator


def played(name: str) -> str:
    return f"import story_player\nstory_player.play({name!r}, Path('go'))"


@pytest.fixture(scope="module")
def lab_home() -> Iterator[Home]:
    made = Home({"SGPU_SIMULATE": "a10:4", "SGPU_PRICES": "a10=36", "SGPU_BUDGET": "500"})
    yield made
    made.close()


@pytest.mark.parametrize(
    "dark", [pytest.param(False, marks=pytest.mark.slow, id="light"), pytest.param(True, id="dark")]
)
def test_cost_packages_and_mlflow_are_seen(opened: Callable[..., OpenNotebook], dark: bool) -> None:
    shade = "dark" if dark else "light"
    cells = [RUN, played("making_packages"), played("priced_and_tracked"), "%sgpu_status"]
    notebook = opened(f"cost-{shade}", cells, dark=dark)
    go = notebook.server.home.work / "go"

    notebook.start(1)
    shown = seen(notebook.output(1).locator(".sgpu-run"))
    expect(shown.locator(".sgpu-state")).to_have_text("running", timeout=30_000)
    cost = shown.locator(".sgpu-cost")
    expect(cost).to_have_text(re.compile(r"^\$0\.\d\d \(simulated\)$"), timeout=10_000)
    before = cost.inner_text()
    expect(cost).not_to_have_text(before, timeout=5_000)
    notebook.picture(f"cost-running-{shade}", shown)
    go.touch()
    notebook.wait_done(1)
    expect(notebook.output(1)).to_contain_text(re.compile(r"\$\d\.\d\d for \d+ GPU s \(simulated\)"))
    notebook.picture(f"cost-succeeded-{shade}", notebook.output(1))

    go.unlink()
    notebook.start(2)
    shown = seen(notebook.output(2).locator(".sgpu-run"))
    expect(shown.locator(".sgpu-preparing")).to_contain_text(
        "packages ai-4: installing, 41 of 80 · 12.0 s · gpu-node-2"
    )
    notebook.picture(f"packages-{shade}", shown)
    go.touch()
    notebook.wait_done(2)

    go.unlink()
    notebook.start(3)
    shown = seen(notebook.output(3).locator(".sgpu-run"))
    link = shown.locator(".sgpu-foot a")
    expect(link).to_have_text("MLflow run digits/train_digits")
    assert link.get_attribute("href") == TRACKED.url
    notebook.picture(f"mlflow-{shade}", shown)
    go.touch()
    notebook.wait_done(3)
    # the link that stays in the notebook leads there, too
    link = notebook.output(3).locator("a")
    expect(link).to_have_text("MLflow run digits/train_digits")
    assert link.get_attribute("href") == TRACKED.url
    notebook.picture(f"mlflow-saved-{shade}", notebook.output(3))

    notebook.run(4)
    expect(notebook.output(4)).to_contain_text("cost")
    expect(notebook.output(4)).to_contain_text(re.compile(r"budget: \$\d\.\d\d of \$500\.00 in 30 d"))
    notebook.picture(f"cost-status-{shade}", notebook.output(4))
