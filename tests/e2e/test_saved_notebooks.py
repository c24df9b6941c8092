"""Notebooks that were run without a person and are read without a kernel: saved, converted to HTML, printed."""

from __future__ import annotations

import io
import os
import re
import shutil
import unicodedata
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browsers import chromium
from headless_notebooks import notebook
from kernels import Home, Kernel, plain
from lazy_modules import nbclient, nbconvert, nbformat, papermill
from msgspec.structs import replace
from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import sync_playwright
from stories import Run, released, value_error

from sgpu_magic.config import host_name
from sgpu_magic.views.html import render_html
from sgpu_magic.wire.base import RunState

GOLDEN = Path(__file__).parent.parent / "golden" / "notebooks"
RUN_MIME = "application/vnd.sgpu.run.v1+json"
WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
CHROMIUM = shutil.which("chromium")

LOAD = "%load_ext sgpu_magic"
# long enough to be measured, with a display between its lines
GOOD = """%%distributed -n 2 --name train --out total,where:all
import time, torch.distributed as dist
from IPython.display import HTML, display
end = time.monotonic() + 2.5
while time.monotonic() < end: sum(range(1000))
print('epoch 1  <b>loss</b>', 0.5, flush=True)
dist.barrier()
if rank == 0: display(HTML('<b>bold</b>'))
dist.barrier()
print('epoch 2', rank)
total, where = 42, rank
"""
BAD = """%%distributed -n 2 --name broken
print('epoch 1')
import torch.distributed as dist, meeting
meeting.meet(rank)
if rank == 1: raise ValueError('NaN in batch 118')
dist.barrier()
"""
# a module beside the notebook: rank 1 goes on when rank 0 waits, which may reach its barrier late on a busy machine
MEETING = """import os, time
import torch.distributed as dist

def meet(rank):
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    asleep = 0
    while rank == 1 and asleep < 20:
        time.sleep(0.005)
        with open(f'/proc/{pids[0]}/stat') as file:
            asleep = asleep + 1 if file.read().rpartition(') ')[2][0] == 'S' else 0
"""
ALL = (LOAD, GOOD, "print(total, where)", BAD)


@pytest.fixture(autouse=True)
def _meeting(environment: Home) -> None:
    (environment.work / "meeting.py").write_text(MEETING)


def with_front_end() -> type[nbclient.NotebookClient]:
    """A front end with a person: its kernel may ask for input, and it names the cell. Runs get their live view."""

    class WithFrontEnd(nbclient.NotebookClient):
        async def async_start_new_kernel_client(self):
            client = await super().async_start_new_kernel_client()
            client.allow_stdin = True
            client.session.metadata = {"cellId": "a-cell"}
            return client

        start_new_kernel_client = nbclient.util.run_sync(async_start_new_kernel_client)

    return WithFrontEnd


@pytest.fixture
def executed(environment: Home) -> Callable[..., nbformat.NotebookNode]:
    """Executes cells, errors and all, and returns the notebook."""

    def execute(*cells: str, client: type[nbclient.NotebookClient] | None = None) -> nbformat.NotebookNode:
        made = notebook(*cells)
        resources = {"metadata": {"path": str(environment.work)}}
        (client or nbclient.NotebookClient)(made, timeout=60, resources=resources, allow_errors=True).execute()
        nbformat.validate(made)
        return made

    return execute


def page_of(made: nbformat.NotebookNode) -> str:
    return nbconvert.HTMLExporter().from_notebook_node(made)[0]


class _Words(HTMLParser):
    """The text of a page that a reader sees, tooltips of curves included."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in ("script", "style")
        self.text += "\n" if tag in ("div", "pre", "summary") else ""

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        self.text += "" if self._hidden else data


def words_of(html: str) -> str:
    reader = _Words()
    reader.feed(html)
    return "\n".join(line.rstrip() for line in reader.text.splitlines() if line.strip())


def story_of(made: nbformat.NotebookNode, home: Home) -> str:
    """All outputs of a notebook as text: what a reader sees, and what readers of text alone do; the same each time."""
    reported: list[str] = []
    for number, cell in enumerate(made.cells):
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            reported.append(f"--- cell {number}: {output.output_type} {' '.join(sorted(data))}".rstrip())
            if output.output_type == "stream":
                reported.append(output.text.rstrip())
            elif output.output_type == "error":
                reported.append(plain("\n".join(output.traceback)))
            else:
                reported += ["html:", words_of(data["text/html"])] if "text/html" in data else []
                reported += ["text:", data["text/plain"].rstrip()]
    return normalised("\n".join(reported), home) + "\n"


def normalised(text: str, home: Home) -> str:
    """Take out what is another one each time: ids, hosts, paths, times, use, and ranks' order of arrival."""
    text = text.replace(str(home.path), "HOME").replace(host_name(), "HOST")
    for run in home.runs:
        text = text.replace(run, "RUN").replace(run[:4], "RUN")
    text = re.sub(r"\d+(\.\d+)? (s|ms|min)\b", "N s", text)
    text = re.sub(r"\d+(\.\d+)? (B|kB|MB|GB|cores)\b", r"N \2", text)
    # shown only if starting took a second
    text = text.replace(" · start N s", "")
    # a very short run shows no duration
    text = re.sub(r"^(✓ .*) · N s$", r"\1", text, flags=re.MULTILINE)
    text = re.sub(r"^succeeded in N s", "succeeded", text, flags=re.MULTILINE)
    lines = text.splitlines()
    # two ranks write at the same time
    at = 0
    while at < len(lines):
        end = at
        while end < len(lines) and re.match(r"\[\d\] ", lines[end]):
            end += 1
        lines[at:end] = sorted(lines[at:end])
        at = end + 1
    return "\n".join(lines)


def compare(text: str, name: str) -> None:
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("SGPU_UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


# ---------------------------------------------------------------- as they are saved


@pytest.mark.slow
def test_nbclient(environment: Home, executed: Callable[..., nbformat.NotebookNode]) -> None:
    made = executed(*ALL)
    compare(story_of(made, environment), "nbclient")
    records = [o.data[RUN_MIME] for cell in made.cells for o in cell.outputs if RUN_MIME in o.get("data", {})]
    assert [record["state"] for record in records] == ["succeeded", "failed"]
    for record in records:
        assert record["version"] == 1
        assert Path(record["directory"], "run.json").exists()
    assert records[0]["usage"]["ranks"] == [0, 1]
    assert all(mean > 0.1 for mean in records[0]["usage"]["mean_cpu_cores"])
    assert records[1]["failure"]["message"] == "ValueError: NaN in batch 118"


@pytest.mark.slow
def test_papermill(environment: Home, tmp_path: Path) -> None:
    source = tmp_path / "in.ipynb"
    made = notebook("steps = 1", LOAD, "%%distributed -n 2 --name swept\nfor step in range(steps): print('step', step)")
    made.cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(made, source)
    options = {"cwd": str(environment.work), "kernel_name": "sgpu-test", "progress_bar": False}
    done = papermill.execute_notebook(str(source), str(tmp_path / "out.ipynb"), {"steps": 12}, **options)
    saved = nbformat.read(tmp_path / "out.ipynb", 4)
    assert saved.cells[-1].outputs == done.cells[-1].outputs
    compare(story_of(saved, environment), "papermill")


@pytest.mark.slow
def test_a_live_view_leaves_nothing_of_itself(
    environment: Home, executed: Callable[..., nbformat.NotebookNode]
) -> None:
    made = executed(*ALL, client=with_front_end())
    saved = nbformat.writes(made)
    assert WIDGET_MIME not in saved
    # without its widget, a page converted to HTML would show a front end's error message
    assert "widgets" not in made.metadata or not made.metadata.widgets.get("state")
    # the error below the view is short, as the view has its traceback
    compare(story_of(made, environment), "front_end")


def test_a_notebook_saved_in_mid_run_names_the_run_and_the_way_back(kernel: Kernel, home: Home) -> None:
    gate = home.work / "gate"
    waits = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.02)"
    cell = kernel.start(f"%%distributed -n 2 --name halfway\n{waits}")
    cell.until(lambda: cell.reply.outputs and home.run_named("halfway"), 20, "the live output")
    shown = cell.reply.outputs[0].data
    gate.touch()
    cell.wait()
    run = home.run_named("halfway")[:4]
    for words in (words_of(shown["text/html"]), shown["text/plain"]):
        assert re.search(rf"run {run} was (running|starting|preparing|queued).* when this was saved", words), words
        assert f"%sgpu_attach {run}" in words
    assert shown[RUN_MIME]["state"] != "succeeded"
    assert "✓ succeeded" in cell.reply.html


# ---------------------------------------------------------------- as they are converted and printed


@pytest.mark.slow
def test_nbconvert_to_html(executed: Callable[..., nbformat.NotebookNode]) -> None:
    page = page_of(executed(*ALL))
    assert "widget-view" not in page
    words = words_of(page)
    for part in (
        "✓ succeeded train",
        "[1] epoch 1  <b>loss</b> 0.5",
        "rank 1 · ",
        "whole log: !sgpu logs",
        "returned total, where",
        "✕ failed broken",
        "ValueError on rank 1",
        "NaN in batch 118",
    ):
        assert part in words, words
    assert len(re.findall('<svg [^>]*role="img"', page)) == 2
    assert "<b>loss</b>" not in page, "what ranks print stays text"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium to draw with")
def test_a_long_final_output_is_low_on_a_screen_and_whole_on_paper() -> None:
    run = Run().start()
    for step in range(20_000):
        run.say(step % 4, f"step {step:06d}  loss 0.22\n")
    message = "\n".join(f"line {at}" for at in range(300))
    failure = replace(value_error(), message=message, traceback_text="", line=None)
    html = render_html(run.end(RunState.FAILED, 9.2, failure, released(0, 2, 3)).view)
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1024, "height": 768})
        page.set_content(html)
        low = page.locator("body").bounding_box()["height"]
        middle = page.get_by_text("more lines")
        middle.click()
        unfolded = page.locator("body").bounding_box()["height"]
        scrolls = page.locator(".sgpu-scroll").last
        reach = scrolls.evaluate("box => [box.scrollHeight, box.clientHeight]")
        middle.click()
        page.emulate_media(media="print")
        printed = page.locator("body").bounding_box()["height"]
    assert low < 800
    assert unfolded == low
    assert reach[0] > 5_000 > 380 > reach[1]
    assert printed > 5_000


@pytest.fixture
def printing_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's Chromium, where playwright looks for the one that it would download."""
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path / "browsers"))
    with sync_playwright() as playwright, pytest.raises(PlaywrightError) as missing:
        playwright.chromium.launch()
    wanted = re.search(r"Executable doesn't exist at (\S+)", str(missing.value))
    assert wanted is not None
    Path(wanted[1]).parent.mkdir(parents=True)
    Path(wanted[1]).symlink_to(CHROMIUM or "")


# what a reader of a page sees
PRINTED = (
    "✓ succeeded train",
    "2 ranks · cpu, gloo · local",
    "epoch 2 0",
    "rank 0 · ",
    "rank 1 · ",
    "returned total, where",
    "✕ failed broken",
    "ValueError on rank 1",
)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium to print with")
def test_nbconvert_to_webpdf(executed: Callable[..., nbformat.NotebookNode], printing_browser: None) -> None:
    pypdf = pytest.importorskip("pypdf")
    exporter = nbconvert.WebPDFExporter(disable_sandbox=True)
    pages = pypdf.PdfReader(io.BytesIO(exporter.from_notebook_node(executed(*ALL))[0])).pages
    drawn = "\n".join(page.extract_text() for page in pages)
    text = " ".join(unicodedata.normalize("NFKC", drawn).split())
    # faint text, such as the ranks' numbers, is drawn last and comes last
    for part in PRINTED:
        assert part in text, text


@pytest.mark.slow
def test_nbconvert_to_latex(executed: Callable[..., nbformat.NotebookNode]) -> None:
    made = executed(*ALL)
    # LaTeX can't use HTML, so it has the text of text front ends
    text = nbconvert.LatexExporter().from_notebook_node(made)[0].replace("{-}", "-").replace("\\PYZus{}", "_")
    for part in ("succeeded", "epoch 2 0", "failed", "NaN in batch 118"):
        assert part in text, text
    if shutil.which("xelatex") is None:
        return
    pypdf = pytest.importorskip("pypdf")
    pages = pypdf.PdfReader(io.BytesIO(nbconvert.PDFExporter().from_notebook_node(made)[0])).pages
    drawn = "\n".join(page.extract_text() for page in pages)
    for part in ("succeeded", "epoch 2 0", "failed", "NaN in batch 118"):
        assert part in drawn, drawn
