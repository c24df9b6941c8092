# ruff: noqa: T201
"""Take screenshots of what a user sees in JupyterLab: light and dark, in windows of 1440 and 1024 pixels.

    python scripts/screenshots.py FOLDER [--docs DOCS] [STORY]...

Runs real cells on simulated GPUs in Chromium and writes `FOLDER/STORY-MOMENT-WIDTH-THEME.png`, of all stories if
none is named; with `--docs`, also the pictures of README and docs to that folder.
"""

from __future__ import annotations

import argparse
import inspect
import io
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Locator, expect

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from browsers import OpenNotebook, chromium
from homes import Home
from jupyter_servers import JupyterServer, new_notebook

SIZES = ((1440, 900), (1024, 768))
THEMES = ("light", "dark")
DEVICES = "a10:4,h100:2"
PRICES = "a10=1.10,h100=3.90"
_START_MS = 60_000
_FRAMES_PER_S = 4
_ANIMATION_S = 9.0
_ANIMATION_WIDTH = 800

# cells wait here until the picture is taken
HOLD = """%load_ext sgpu_magic
import time, torch, torch.distributed as dist
from pathlib import Path
from tqdm.auto import tqdm as auto_tqdm
from tqdm import tqdm
def hold(name):
    while not Path(name).exists(): time.sleep(0.02)"""
TRAIN = """%%distributed --gpus 4 --type a10 --out losses --name train_digits
losses = []
for epoch in range(1, 9):
    for step in tqdm(range(40), desc=f"epoch {epoch}/8"):
        time.sleep(0.09)
    losses.append(2 / epoch + rank / 50)
    print(f"epoch {epoch}  loss {losses[-1]:.3f}")"""
AVERAGE = """%%distributed --gpus 4 --type a10 --name average
losses = torch.tensor(losses) / (rank - 2)
if losses.isinf().any():
    raise ValueError(f"infinite loss: {losses.tolist()}")
dist.all_reduce(losses)"""
PLOTS = """%%distributed --gpus 4 --type a10 --name plots
import matplotlib.pyplot as plt
plt.figure(figsize=(3, 2))
plt.plot([rank, 2, 1, rank])
plt.title(f"rank {rank}")
plt.show()"""
TABLE = """%%distributed --gpus 4 --type a10 --name table
import pandas as pd
display(pd.DataFrame({"step": [1, 2], "loss": [0.5, 0.25 + rank]}))"""
HANG = """%%distributed --gpus 4 --type a10 --name uneven
if rank != 1:
    dist.barrier()
hold("go")"""


class Stage:
    """A story's notebook, and where its pictures go.

    Args:
        server: A JupyterLab.
        browser: The browser.
        folder: The folder of the pictures.
        story: Beginning of the pictures' names.
        docs: The folder of the pictures in the docs; None leaves them as they are.
    """

    def __init__(self, server: JupyterServer, browser: Browser, folder: Path, story: str, docs: Path | None) -> None:
        self._server, self._browser = server, browser
        self._folder, self._story, self.docs = folder, story, docs
        self._opened: list[OpenNotebook] = []

    def open(self, *cells: str, name: str = "train") -> OpenNotebook:
        """Open a notebook with these cells after one that loads the extension, and run that."""
        new_notebook(self._server.home.work / f"{name}.ipynb", HOLD, *cells)
        notebook = OpenNotebook(self._server, self._browser, f"{name}.ipynb", SIZES[0])
        self._opened.append(notebook)
        notebook.kernel_ready()
        notebook.run(0)
        return notebook

    def take(
        self, notebook: OpenNotebook, moment: str, part: Locator | None = None, *, under_pointer: Locator | None = None
    ) -> None:
        """Take a picture of the page, or of a part of it, in each size and theme.

        Args:
            notebook: The notebook.
            moment: End of the pictures' names.
            part: The part; None for the whole page.
            under_pointer: What the pointer is over; by default, nothing.
        """
        page = notebook.page
        for theme in THEMES:
            self._change_theme(notebook, theme)
            for width, height in SIZES:
                page.set_viewport_size({"width": width, "height": height})
                page.mouse.move(0, 0)
                if part is not None:
                    part.scroll_into_view_if_needed()
                if under_pointer is not None:
                    under_pointer.hover()
                # let the page redraw for the new size and theme
                page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done, 600)))")
                path = self._folder / f"{self._story}-{moment}-{width}-{theme}.png"
                (part or page).screenshot(path=path)
                print(path, flush=True)
        page.set_viewport_size({"width": SIZES[0][0], "height": SIZES[0][1]})
        self._change_theme(notebook, THEMES[0])

    def _change_theme(self, notebook: OpenNotebook, theme: str) -> None:
        page, title = notebook.page, f"JupyterLab {theme.title()}"
        page.evaluate("title => window.jupyterapp.commands.execute('apputils:change-theme', {theme: title})", title)
        expect(page.locator(f"body[data-jp-theme-light={str(theme == 'light').lower()}]")).to_be_attached()
        expect(page.locator("#jupyterlab-splash")).to_have_count(0, timeout=_START_MS)

    def go(self, name: str = "go") -> None:
        """Let cells that wait in `hold(name)` continue."""
        (self._server.home.work / name).touch()

    def close(self) -> None:
        for notebook in self._opened:
            notebook.close()
        for session in self._server.get("api/sessions").body:
            self._server.delete(f"api/sessions/{session['id']}")
        # otherwise the next story's page would open this one's panels
        for workspace in self._server.get("lab/api/workspaces").body["workspaces"]["ids"]:
            self._server.delete(f"lab/api/workspaces/{workspace}")
        for path in (self._server.home.work / "go", self._server.home.work / "on"):
            path.unlink(missing_ok=True)


def view(notebook: OpenNotebook, cell: int = 1) -> Locator:
    return notebook.output(cell).locator(".sgpu-run")


def wait_for_state(notebook: OpenNotebook, state: str, cell: int = 1) -> Locator:
    shown = view(notebook, cell)
    expect(shown.locator(".sgpu-state")).to_have_text(state, timeout=_START_MS)
    return shown


# ---------------------------------------------------------------- stories


def train(stage: Stage) -> None:
    """A training with progress bars, then a failure on one rank."""
    notebook = stage.open(TRAIN, AVERAGE)
    notebook.start(1)
    shown = wait_for_state(notebook, "running")
    # its log is full by then
    expect(shown.locator(".sgpu-log")).to_contain_text("epoch 2  loss", timeout=_START_MS)
    if stage.docs is not None:
        _write_animation(notebook.cell(1), stage.docs / "run.webp")
        shown.screenshot(path=stage.docs / "live.png")
    stage.take(notebook, "running", notebook.cell(1))
    notebook.wait_done(1)
    notebook.run(2)
    stage.take(notebook, "succeeded", notebook.cell(1))
    stage.take(notebook, "failed", notebook.cell(2))
    if stage.docs is not None:
        notebook.cell(2).screenshot(path=stage.docs / "failed.png")


def cards(stage: Stage) -> None:
    """Ranks that have not printed anything yet, and the details of one."""
    notebook = stage.open("%%distributed --gpus 4 --type a10 --name quiet\nhold('go')")
    notebook.start(1)
    shown = wait_for_state(notebook, "running")
    expect(shown.locator(".sgpu-use").first).to_contain_text("cores", timeout=_START_MS)
    stage.take(notebook, "nothing-printed", notebook.cell(1))
    stage.take(notebook, "details", notebook.cell(1), under_pointer=shown.locator(".sgpu-card").nth(1))
    stage.go()
    notebook.wait_done(1)


def many(stage: Stage) -> None:
    """200,000 lines, and 16 ranks."""
    lines = "%%distributed --gpus 4 --type a10 --name lines\nfor i in range(50_000): print('line', i)"
    notebook = stage.open(lines, "%%distributed --type cpu -n 16 --name sixteen\nprint('rank', rank)\nhold('go')")
    notebook.run(1)
    stage.take(notebook, "lines", notebook.cell(1))
    notebook.start(2)
    expect(wait_for_state(notebook, "running", 2).locator(".sgpu-log")).to_contain_text("rank 15")
    stage.take(notebook, "ranks", notebook.cell(2))
    stage.go()
    notebook.wait_done(2)


def displays(stage: Stage) -> None:
    """A figure and a table of each rank."""
    notebook = stage.open(PLOTS, TABLE)
    for cell, moment in ((1, "figures"), (2, "tables")):
        notebook.run(cell)
        stage.take(notebook, moment, notebook.cell(cell))


def hang(stage: Stage) -> None:
    """Ranks that wait in a collective that one rank never enters."""
    notebook = stage.open(HANG)
    notebook.start(1)
    wait_for_state(notebook, "running")
    expect(view(notebook)).to_contain_text("no progress", timeout=_START_MS)
    stage.take(notebook, "told", notebook.cell(1))
    view(notebook).get_by_role("button", name="Cancel").click()
    notebook.wait_done(1)
    stage.take(notebook, "cancelled", notebook.cell(1))


def panel(stage: Stage) -> None:
    """The environment panel: not connected, connected, with a run and one that waits."""
    notebook = stage.open(
        "%%distributed --name epochs\nprint('epoch 1')\nhold('go')",
        "%%distributed --gpus 4 --type a10 --session none --detach --name other\nprint(device)",
    )
    page = notebook.page
    page.get_by_role("tab", name="GPU environment").click()
    shown = page.locator("#sgpu-panel")
    expect(shown).to_contain_text("free", timeout=_START_MS)
    stage.take(notebook, "not-connected", shown)
    shown.get_by_role("radio", name="A10").first.click()
    shown.get_by_role("radio", name="2", exact=True).click()
    connect = shown.get_by_role("button", name="Apply and connect")
    expect(connect).to_be_enabled(timeout=_START_MS)
    stage.take(notebook, "chosen", shown)
    connect.click()
    expect(shown.get_by_role("region", name="Session")).to_contain_text("Connected", timeout=_START_MS)
    notebook.run(2)
    notebook.start(1)
    wait_for_state(notebook, "running")
    stage.take(notebook, "connected", shown)
    stage.take(notebook, "page")
    stage.go()
    notebook.wait_done(1)


def status(stage: Stage) -> None:
    """`%sgpu_status` beside a run."""
    notebook = stage.open(
        "%%distributed --gpus 2 --type h100 --detach --name sweep\nhold('go')",
        "%%distributed --gpus 1 --name cheap\nprint(device)",
        "%sgpu_connect --gpus 2 --type a10",
        "%sgpu_status",
    )
    for cell in (1, 2, 3, 4):
        notebook.run(cell)
    stage.take(notebook, "note", notebook.cell(2))
    stage.take(notebook, "connected", notebook.cell(3))
    stage.take(notebook, "status", notebook.cell(4))
    stage.go()


STORIES: dict[str, Callable[[Stage], None]] = {
    story.__name__: story for story in (train, cards, many, displays, hang, panel, status)
}


# ---------------------------------------------------------------- the docs' animation


def _write_animation(part: Locator, path: Path) -> None:
    frames: list[Image.Image] = []
    part.page.mouse.move(0, 0)
    begun = time.monotonic()
    while (at := time.monotonic() - begun) < _ANIMATION_S:
        picture = Image.open(io.BytesIO(part.screenshot()))
        frames.append(picture.resize((_ANIMATION_WIDTH, round(picture.height * _ANIMATION_WIDTH / picture.width))))
        time.sleep(max(0.0, (int(at * _FRAMES_PER_S) + 1) / _FRAMES_PER_S - (time.monotonic() - begun)))
    # one height: where the view was lower, the page would have a blank below it
    height = statistics.mode(frame.height for frame in frames)
    whole = [frame for frame in frames if frame.height == height]
    whole[0].save(path, save_all=True, append_images=whole[1:], duration=1000 // _FRAMES_PER_S, loop=0, quality=80)
    print(f"{path}: {len(whole)} frames, {path.stat().st_size / 1e6:.2f} MB", flush=True)


@contextmanager
def lab() -> Iterator[JupyterServer]:
    """Start a JupyterLab with simulated GPUs."""
    home = Home({"SGPU_SIMULATE": DEVICES, "SGPU_PRICES": PRICES, "SGPU_STALL_S": "3"})
    server = JupyterServer(home, "jupyterlab", options=["--LabApp.expose_app_in_browser=True"])
    try:
        yield server
    finally:
        server.close()
        home.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--docs", type=Path)
    parser.add_argument("stories", nargs="*", metavar="STORY", help=", ".join(STORIES))
    options = parser.parse_intermixed_args()
    if unknown := set(options.stories) - set(STORIES):
        parser.error(f"there is no story {', '.join(sorted(unknown))}; choose from {', '.join(STORIES)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    with lab() as server, chromium() as browser:
        for name in options.stories or STORIES:
            stage = Stage(server, browser, options.folder, name, options.docs)
            try:
                STORIES[name](stage)
            finally:
                stage.close()


if __name__ == "__main__":
    main()
