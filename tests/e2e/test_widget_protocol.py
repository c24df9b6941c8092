"""The live view as a front end sees it over the wire, on the oldest and the newest ipykernels; no browser."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from front_end import WIDGET_MIME, LiveView
from ipykernels import variables_for
from kernels import Cell, Home, Kernel, Reply, eventually
from lazy_modules import nbclient, nbformat, papermill
from time_limits import GRACE_S

STEPS = "import time\nfor i in range({0}): print('step', i, flush=True); time.sleep({1})\n"
FOREVER = "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.02)\n"
# the ranks of a cell that a test looks at go on until the test has seen it
UNTIL_SEEN = "import os, time\nwhile not os.path.exists('seen'): time.sleep(0.02)\n"
FIGURE = "from IPython.display import HTML, display\n"


class Lab(Kernel):
    """A kernel on some version of ipykernel, and what JupyterLab can do with it."""

    _last: Cell | None = None

    def start(self, code: str, **options: bool) -> Cell:
        self._last = super().start(code, **options)
        return self._last

    def free(self) -> None:
        """Interrupt a cell that goes on."""
        if self._last is not None and not self._last.idle:
            self.interrupt()
            self._last.wait(10)

    def seen(self) -> None:
        """Let ranks go on that run `UNTIL_SEEN`."""
        self.home.work.joinpath("seen").touch()

    def __init__(self, home: Home, version: str) -> None:
        super().__init__(home, variables=variables_for(version))
        assert self.value("__import__('ipykernel').__version__") == version
        numbers = tuple(int(number) for number in version.split("."))
        self.has_subshells = numbers >= (7, 1)
        # how a front end may send requests while a cell blocks: 7.4 needs no subshell of the front end's
        self.ways = ["control", *["subshell"][: self.has_subshells], *["shell"][: numbers >= (7, 4)]]


VERSIONS = (
    pytest.param("6.31.0", marks=pytest.mark.slow),
    pytest.param("7.3.0", marks=pytest.mark.slow),
    "7.4.0",
)


@pytest.fixture(scope="module", params=VERSIONS)
def lab(request: pytest.FixtureRequest, home: Home) -> Iterator[Lab]:
    """A warm kernel on this version of ipykernel, with the subshell that JupyterLab makes for widgets."""
    made = Lab(home, request.param)
    try:
        made.check(f"%%distributed -n 2\n{STEPS.format(3, 0.1)}")
        made.check("print('x' * 200_000)")
        if made.has_subshells:
            assert made.front_end.subshell
        home.check_leaks()
        yield made
        made.front_end.drop_subshell()
    finally:
        made.close()


def asked(cell: Cell, question: dict[str, object], over: str, view: LiveView | None = None) -> dict[str, object]:
    """The answer, which has to come while the cell blocks."""
    front_end = cell.kernel.front_end
    view = view or front_end.view
    number = front_end.ask(view, question, over)
    cell.until(lambda: number in view.answers, 10, f"the answer to {question} over {over}")
    assert not cell.idle, "the cell was over before the answer came"
    return view.answers[number]


def assert_static(reply: Reply) -> None:
    """No widget is left in what would be saved."""
    for output in reply.outputs:
        assert WIDGET_MIME not in output.data, reply.story
    assert any("application/vnd.sgpu.run.v1+json" in output.data for output in reply.outputs), reply.story


@pytest.fixture(autouse=True)
def no_cell_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A failed check does not leave its cell to the next test."""
    yield
    if "lab" in request.fixturenames:
        lab = request.getfixturevalue("lab")
        lab.free()
        lab.home.work.joinpath("seen").unlink(missing_ok=True)


# ---------------------------------------------------------------- from its opening to its end


def test_a_quick_run_opens_no_view(lab: Lab):
    before = len(lab.front_end.views)
    # on a busy machine no run takes less than 100 ms
    lab.check("import sgpu_magic.views.publisher as publisher\nfirst_after_s = publisher.FIRST_AFTER_S")
    lab.check("publisher.FIRST_AFTER_S = 30")
    try:
        reply = lab.check("%%distributed -n 2\nprint('quick')")
    finally:
        lab.check("publisher.FIRST_AFTER_S = first_after_s")
    assert len(lab.front_end.views) == before
    assert not [kind for kind in reply.messages if kind.startswith("comm_")]
    assert_static(reply)


def test_the_view_opens_after_100_ms_and_is_told_everything(lab: Lab):
    cell = lab.start(f"%%distributed -n 2 --name told\n{STEPS.format(25, 0.06)}{UNTIL_SEEN}")
    cell.until_shown("[1] step 0")
    output = next((output for output in cell.reply.outputs if WIDGET_MIME in output.data), None)
    assert output is not None, cell.reply.story
    view = lab.front_end.view
    assert view.opened_at - cell.began > 0.1
    # for users without widgets, and for a notebook that is saved now
    assert "told · 2 ranks on local" in output.data["text/plain"]
    assert "%sgpu_attach" in output.data["text/html"]
    assert view.state["comms"] == ("subshell" if lab.has_subshells else "blocking")
    assert view.state["_esm"]
    lab.seen()
    reply = cell.wait()
    assert view.seqs == list(range(1, len(view.seqs) + 1))
    assert len(view.seqs) > 3
    seen = [text for _, (_, text) in sorted(view.lines.items())]
    # later lines are in the final form
    assert set(seen[:40]) <= {f"step {i}" for i in range(25)}
    assert view.snapshot["name"] == "told"
    assert view.snapshot["state"] == "running"
    drawn = [sent.data["state"]["snapshot"]["seq"] for sent in view.sent if "snapshot" in sent.data.get("state", {})]
    assert drawn
    assert drawn == sorted(set(drawn))
    for rank in (0, 1):
        assert reply.lines(rank) == [f"step {i}" for i in range(25)]
    assert_static(reply)
    # the same output, updated
    assert reply.outputs[0].display_id == output.display_id
    assert view.closed_at is not None
    assert lab.value("len(__import__('ipywidgets').widgets.widget._instances)") == 0


@pytest.mark.slow
def test_two_runs_have_a_view_each(lab: Lab):
    for number in range(2):
        before = set(lab.front_end.views)
        reply = lab.check(f"%%distributed -n 2 --name run{number}\n{STEPS.format(6, 0.05)}")
        (new,) = set(lab.front_end.views) - before
        assert lab.front_end.views[new].snapshot["name"] == f"run{number}"
        assert_static(reply)


def test_what_ranks_display_stands_below_the_view_and_in_its_place_at_the_end(lab: Lab):
    cell = lab.start(
        f"%%distributed -n 2\n{FIGURE}import time\nprint('before', flush=True)\ntime.sleep(0.2)\n"
        "if rank == 1: display(HTML('<b>one</b>')); print('between', flush=True); display(HTML('<b>two</b>'))\n"
        f"{UNTIL_SEEN}print('after')"
    )
    cell.until(lambda: any("two" in output.html for output in cell.reply.outputs), what="the display")
    live = cell.reply.outputs
    assert WIDGET_MIME in live[0].data
    assert [output.html for output in live if "<b>" in output.html] == ["<b>one</b>", "<b>two</b>"]
    assert [output.text for output in live[1:] if not output.html.startswith("<b>")] == ["[1]"] * 2
    lab.seen()
    reply = cell.wait()
    assert_static(reply)
    # each output of the live form has its part of the final one
    assert all(output.text or output.html for output in reply.outputs)
    order = ["[1] before", "[1] between", "[1] after", "succeeded", "[1]\n<b>one</b>", "[1]\n<b>two</b>"]
    whole = "\n".join(output.text if "<b>" not in output.html else output.html for output in reply.outputs)
    assert [whole.index(part) for part in order] == sorted(whole.index(part) for part in order), whole


def test_of_one_rank_text_between_displays_keeps_its_place(lab: Lab):
    reply = lab.check(
        f"%%distributed -n 1\n{FIGURE}import time\nprint('first', flush=True)\ntime.sleep(0.25)\n"
        "for i in range(3): display(HTML(f'<b>{i}</b>')); print('text', i, flush=True); time.sleep(0.15)"
    )
    whole = "\n".join(output.text if "<b>" not in output.html else output.html for output in reply.outputs)
    order = ["[0] first", "<b>0</b>", "[0] text 0", "<b>1</b>", "[0] text 1", "<b>2</b>", "[0] text 2", "succeeded"]
    assert [whole.index(part) for part in order] == sorted(whole.index(part) for part in order), whole
    assert_static(reply)


# ---------------------------------------------------------------- while the cell blocks


def lines_told(cell: Cell, over: str) -> list[int]:
    return asked(cell, {"kind": "hello", "over": over}, over)["snapshot"]["lines"]


def test_questions_are_answered_while_the_cell_blocks(lab: Lab):
    cell = lab.start(f"%%distributed -n 2\nfor i in range(300): print('line', i)\n{FOREVER}")
    cell.until_shown("[1] up")
    cell.until_shown("[0] up")
    for over in lab.ways:
        hello = asked(cell, {"kind": "hello", "over": over}, over)
        assert (hello["kind"], hello["snapshot"]["state"]) == ("hello", "running")
        # a server that has just begun to follow the run may be some events behind the kernel
        eventually(lambda: lines_told(cell, over) == [301, 301], 10, "all lines are counted")  # noqa: B023
        lines = asked(cell, {"kind": "lines", "first": 10, "count": 3, "rank": 1}, over)
        assert lines["rows"] == [[1, 10, "line 10", False], [1, 11, "line 11", False], [1, 12, "line 12", False]]
        found = asked(cell, {"kind": "find", "text": "LINE 299", "rank": None}, over)
        assert found["total"] == 2
        log = asked(cell, {"kind": "log", "offset": 0, "rank": 0}, over)
        assert log["text"].startswith("line 0\nline 1\n")
        stacks = asked(cell, {"kind": "stacks"}, over)
        assert any("while True" in line for line in stacks["lines"]), stacks
        refusal = asked(cell, {"kind": "dance"}, over)
        assert refusal["kind"] == "refusal"
    lab.interrupt()
    assert cell.wait().ename == "RunCancelled"


def test_cancel_ends_the_cell(lab: Lab):
    for over in lab.ways:
        cell = lab.start(f"%%distributed -n 2\n{FOREVER}")
        cell.until_shown("[1] up")
        answer = asked(cell, {"kind": "cancel"}, over)
        assert "is being stopped" in answer["lines"][0]
        pressed = time.monotonic()
        reply = cell.wait()
        assert time.monotonic() - pressed < GRACE_S
        assert reply.ename == "RunCancelled"
        assert "Cancel button" in reply.evalue
        assert_static(reply)
    # a cancel that comes too late is refused
    view, number = lab.front_end.view, lab.front_end.ask(lab.front_end.view, {"kind": "cancel"})
    lab.front_end.until(lambda: number in view.answers, 5, "the refusal")
    assert view.answers[number]["kind"] == "refusal"


def test_an_interrupt_frees_the_cell(lab: Lab):
    cell = lab.start(f"%%distributed -n 2\n{FOREVER}")
    cell.until_shown("[0] up")
    lab.interrupt()
    reply = cell.wait(5)
    assert reply.ename == "RunCancelled"
    assert_static(reply)
    assert lab.front_end.view.closed_at is not None


def test_attach_shows_the_same_view(lab: Lab):
    reply = lab.check(f"%%distributed -n 2 --detach --name back\n{STEPS.format(40, 0.05)}")
    assert WIDGET_MIME not in json.dumps([output.data for output in reply.outputs])
    cell = lab.start("%sgpu_attach")
    cell.until_shown("[1] step 5")
    assert lab.front_end.view.snapshot["name"] == "back"
    assert asked(cell, {"kind": "lines", "first": 0, "count": 1, "rank": 0}, "control")["rows"] == [
        [0, 0, "step 0", False]
    ]
    reply = cell.wait()
    assert len(reply.lines(1)) == 40
    assert_static(reply)


# ---------------------------------------------------------------- front ends that can't


@pytest.mark.slow
def test_a_front_end_that_does_not_draw_the_view_gets_html(home: Home, new_kernel: Callable[..., Kernel]):
    kernel = new_kernel(greets=False)
    cell = kernel.start(f"%%distributed -n 2\n{STEPS.format(70, 0.1)}")
    cell.until(lambda: cell.reply.outputs and WIDGET_MIME in cell.reply.outputs[0].data, what="the view")
    opened = time.monotonic()
    cell.until(lambda: WIDGET_MIME not in cell.reply.outputs[0].data, 10, "the live HTML")
    assert time.monotonic() - opened > 4.5
    cell.until_shown("anywidget")
    cell.until_shown("[1] step 60")
    assert "pip install" in cell.reply.html
    assert kernel.front_end.view.closed_at is not None
    reply = cell.wait()
    assert_static(reply)
    assert "anywidget" not in reply.text
    assert kernel.value("len(get_ipython().kernel.comm_manager.comms)") == 0


@pytest.mark.slow
def test_a_front_end_that_can_only_ask_when_the_cell_is_over_keeps_its_view(
    home: Home, new_kernel: Callable[..., Kernel]
):
    kernel = new_kernel(greets=False, variables=variables_for("7.3.0"))
    kernel.check("__vsc_ipynb_file__ = '/somewhere/notebook.ipynb'")
    cell = kernel.start(f"%%distributed -n 2\n{STEPS.format(70, 0.1)}")
    cell.until(lambda: cell.reply.outputs and WIDGET_MIME in cell.reply.outputs[0].data, what="the view")
    cell.until(lambda: time.monotonic() - kernel.front_end.view.opened_at > 5.5, 10, "later than any hello may be")
    assert WIDGET_MIME in cell.reply.outputs[0].data
    cell.until_shown("[1] step 60")
    assert_static(cell.wait())


@pytest.mark.slow
def test_without_anywidget_the_live_form_is_html(home: Home, new_kernel: Callable[..., Kernel]):
    (home.path / "broken").mkdir()
    (home.path / "broken" / "anywidget.py").write_text("raise ImportError('it is of another version')")
    kernel = new_kernel(variables={"PYTHONPATH": str(home.path / "broken")})
    cell = kernel.start(f"%%distributed -n 2\n{STEPS.format(20, 0.1)}")
    cell.until_shown("[1] step 5")
    assert kernel.front_end.views == {}
    assert "step 5" in cell.reply.html
    assert_static(cell.wait())


def test_ui_text_and_none_open_no_view(lab: Lab):
    before = len(lab.front_end.views)
    for ui in ("text", "none"):
        lab.check(f"%%distributed -n 2 --ui {ui}\n{STEPS.format(4, 0.05)}")
    assert len(lab.front_end.views) == before


def test_a_kernel_that_nobody_watches_opens_no_view(lab: Lab):
    before = len(lab.front_end.views)
    lab.client.allow_stdin = False
    try:
        assert "[1] step 3" in lab.check(f"%%distributed -n 2\n{STEPS.format(4, 0.05)}").text
        assert len(lab.front_end.views) == before
        lab.check(f"%%distributed -n 2 --ui widget\n{STEPS.format(4, 0.05)}")
        assert len(lab.front_end.views) == before + 1
    finally:
        lab.client.allow_stdin = True


@pytest.mark.slow
def test_nbclient_and_papermill_save_no_widget(home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name, value in home.environ.items():
        monkeypatch.setenv(name, value)
    cells = ["%load_ext sgpu_magic", f"%%distributed -n 2\n{STEPS.format(6, 0.05)}"]
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "test", "language": "python"}
    nbformat.write(made, tmp_path / "in.ipynb")
    options = {"cwd": str(home.work), "progress_bar": False}
    papermill.execute_notebook(str(tmp_path / "in.ipynb"), str(tmp_path / "out.ipynb"), **options)
    nbclient.NotebookClient(made, timeout=60, resources={"metadata": {"path": str(home.work)}}).execute()
    for done in (made, nbformat.read(tmp_path / "out.ipynb", 4)):
        assert "widgets" not in done.metadata
        assert WIDGET_MIME not in nbformat.writes(done)
        assert "[1] step 5" in nbformat.writes(done)


# ---------------------------------------------------------------- nothing stays


@pytest.mark.slow
def test_a_hundred_runs_leave_nothing_behind(lab: Lab):
    run = "get_ipython().run_cell_magic('distributed', '-n 1', 'import time; time.sleep(0.11)')"
    ours = ("RunViewWidget", "Layout", "Feed", "WidgetPublisher", "RunView")
    sizes = (
        "{'comms': len(get_ipython().kernel.comm_manager.comms),"
        " 'widgets': len(__import__('ipywidgets').widgets.widget._instances),"
        " 'threads': __import__('threading').active_count(),"
        " 'objects': (__import__('gc').collect(), sum(type(o).__name__ in"
        f" {ours} for o in __import__('gc').get_objects()))[1],"
        " 'kb': int(open('/proc/self/status').read().split('VmRSS:')[1].split()[0])}"
    )
    names = "[thread.name for thread in __import__('threading').enumerate()]"

    def settled() -> dict[str, int]:
        # these threads read the installed packages once, and end
        eventually(lambda: not {"sgpu-packages", "sgpu-locks"} & set(lab.value(names)), 30, "the packages are told")
        return lab.value(sizes)

    lab.check(f"for _ in range(5): {run}")
    before = settled()
    opened = len(lab.front_end.views)
    lab.check(f"from IPython.display import clear_output\nfor _ in range(100): {run}; clear_output()", 120)
    after = settled()
    assert len(lab.front_end.views) - opened >= 95
    assert all(view.closed_at is not None for view in lab.front_end.views.values())
    assert after["kb"] - before["kb"] < 12_000, (before, after)
    del before["kb"], after["kb"]
    assert after == before
