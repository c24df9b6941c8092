"""The kernel's half of the environment panel: real kernels, asked over the control channel, and a simulated pool."""

from __future__ import annotations

import functools
import json
import os
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from front_end import LiveView
from ipykernels import variables_for
from kernels import Cell, Home, Kernel, eventually
from small_index import SmallIndex

from sgpu_magic.packages.uv_command import uv_path
from sgpu_magic.runs.choice.known_notebooks import NOTEBOOKS_FILE

HOME_VARIABLES = {"SGPU_SIMULATE": "a10:4,h100:8", "SGPU_CPU_SLOTS": "16"}
TELL = "if rank == 0: print('ranks', world_size)"
# a cell that runs until the test creates the file
BLOCKED = "import pathlib, time\nprint('up')\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)\nprint('over')"


class Panel:
    """A front end's panel, which asks a kernel over the control channel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._number = 0

    def ask(self, kind: str, **fields: object) -> dict[str, Any]:
        """Return the answer, which carries the question's number."""
        answer = self.kernel.front_end.control("sgpu_request", self._content(kind, fields), 60)["answer"]
        assert answer["n"] == self._number
        return answer

    def begin(self, kind: str, **fields: object) -> Callable[[], dict[str, Any]]:
        """Ask, and return what waits for the answer."""
        reply = self.kernel.front_end.begin_control("sgpu_request", self._content(kind, fields))
        return lambda: reply(60)["answer"]

    def _content(self, kind: str, fields: dict[str, object]) -> dict[str, Any]:
        self._number += 1
        return {"model_id": "panel", "question": {"kind": kind, "n": self._number, **fields}}

    def state(self, kept: dict[str, Any] | None = None) -> dict[str, Any]:
        answer = self.ask("kernel", kept=kept)
        assert answer["kind"] == "kernel-answer", answer
        return answer

    def plan(self, choice: dict[str, Any], connect: bool = False) -> dict[str, Any]:
        answer = self.ask("plan", choice=choice, connect=connect)
        assert answer["kind"] == "plan-answer", answer
        return answer["plan"]

    def apply(self, choice: dict[str, Any], connect: bool = False, confirmed: bool = False) -> dict[str, Any]:
        answer = self.ask("apply", choice=choice, connect=connect, confirmed=confirmed)
        assert answer["kind"] == "kernel-answer", answer
        return answer

    def refused(self, kind: str, **fields: object) -> str:
        answer = self.ask(kind, **fields)
        assert answer["kind"] == "panel-refusal", answer
        return answer["text"]

    def disconnect_all(self) -> None:
        while self.state()["snapshot"]["sessions"]:
            self.ask("disconnect", name="")


@pytest.fixture
def panel(kernel: Kernel) -> Iterator[Panel]:
    """A panel beside the module's kernel; afterwards nothing is chosen and nothing connected."""
    made = Panel(kernel)
    made.state()
    yield made
    made.disconnect_all()
    made.state(made.apply({})["kept"])
    # the metadata are empty again
    assert made.state()["snapshot"]["choice"] is None


@pytest.fixture
def blocked(home: Home, kernel: Kernel) -> Iterator[Callable[[], Cell]]:
    """Starts a cell that blocks the kernel; calling it again lets it go on."""
    go = home.work / "go"
    cells: list[Cell] = []

    def switch() -> Cell:
        if not cells:
            cells.append(kernel.start(BLOCKED))
            cells[0].until_shown("up")
        else:
            go.touch()
        return cells[0]

    yield switch
    go.touch()
    if cells and not cells[0].idle:
        cells[0].wait()
    go.unlink()


def choice(**fields: object) -> dict[str, Any]:
    return dict(fields)


def foreign(**fields: object) -> dict[str, Any]:
    """A choice of another user, as stored in a notebook's metadata."""
    return {"choice": dict(fields), "version": 1}


# ---------------------------------------------------------------- what the kernel tells


def test_it_tells_packages_bases_and_that_nothing_is_chosen(panel: Panel):
    answer = panel.state()
    snapshot = answer["snapshot"]
    assert (snapshot["version"], snapshot["pool"], snapshot["choice"], snapshot["choice_words"]) == (
        2,
        "local",
        None,
        "",
    )
    assert snapshot["sessions"] == []
    assert snapshot["python"].startswith(f"Python {'.'.join(map(str, sys.version_info[:3]))} · torch ")
    assert snapshot["packages"] > 50
    assert [base["name"] for base in snapshot["bases"][:3]] == ["", "4", "ai-4"]
    minor = ".".join(map(str, sys.version_info[:2]))
    assert [base["label"] for base in snapshot["bases"][:3]] == [
        f"this notebook's packages, Python {minor}",
        "4: Databricks serverless GPU, Python 3.12",
        "ai-4: Databricks serverless GPU with AI libraries, Python 3.12",
    ]
    assert (answer["kept"], answer["notice"], answer["installing"]) == (None, "", False)


def test_it_answers_while_a_cell_blocks_the_kernel(panel: Panel, blocked: Callable[[], Cell]):
    panel.state()
    cell = blocked()
    for _ in range(5):
        panel.state()
    assert not cell.idle
    blocked()
    assert cell.wait().text.split() == ["up", "over"]


@pytest.mark.parametrize(
    "version",
    [
        pytest.param("6.31.0", marks=pytest.mark.slow),
        pytest.param("7.3.0", marks=pytest.mark.slow),
        "7.4.0",
    ],
)
def test_it_answers_on_every_ipykernel(home: Home, new_kernel: Callable[..., Kernel], version: str):
    kernel = new_kernel(variables=variables_for(version))
    panel = Panel(kernel)
    assert panel.state()["snapshot"]["sessions"] == []
    cell = kernel.start(BLOCKED.replace("'go'", "'go-6-7'"))
    cell.until_shown("up")
    kept = panel.apply(choice(gpus=1, type="cpu"), connect=True)["kept"]
    eventually(lambda: panel.state(kept)["snapshot"]["sessions"][0]["state"] == "running", 60, "connected")
    assert not cell.idle
    go = home.work / "go-6-7"
    go.touch()
    assert cell.wait().text.split() == ["up", "over"]
    go.unlink()
    assert "ranks 1" in kernel.check(f"%%distributed\n{TELL}").text
    assert panel.ask("disconnect", name="")["snapshot"]["sessions"] == []


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("nonsense", {}, "This request is not valid"),
        ("apply", {}, "This request is not valid"),
        ("apply", {"choice": {"gpus": "four"}}, "This request is not valid"),
        ("kernel", {"kept": {"choice": 3}}, "This request is not valid"),
        ("apply", {"choice": {"gpus": -1}}, "-1 is not a number of ranks"),
        ("apply", {"choice": {"type": "toaster"}}, "`toaster` is not a device type"),
        ("apply", {"choice": {"type": "a100"}}, "The pool has no A100. It has: 4 A10, 8 H100"),
        ("apply", {"choice": {"type": "a10", "gpus": 5}}, "The pool has 4 A10, but 5 are requested"),
        ("apply", {"choice": {"gpus": 9}}, "The pool has 8 of one type"),
        ("apply", {"choice": {"pool": "team"}}, "no pool named `team`"),
        ("apply", {"choice": {"gpus": 2, "type": "a10", "env_version": "nothing-like-it"}}, "nothing-like-it"),
        ("apply", {"choice": {"dependencies": ["peft =="]}}, "is not a requirement"),
        ("apply", {"choice": {"dependencies": ["--index-url=http://evil"]}}, "is not a requirement"),
        ("apply", {"choice": {"dependencies": ["p @ https://me:secret@host/p.whl"]}}, "password"),
        ("apply", {"choice": {"removed": ["-r"]}}, "not a package name"),
        ("disconnect", {"name": "ghost"}, "no session 'ghost'"),
        ("disconnect", {}, "no session"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(
    panel: Panel, home: Home, kind: str, fields: dict[str, Any], words: str
):
    before, chosen = set(home.runs), panel.state()["snapshot"]["choice"]
    assert words in panel.refused(kind, **({"connect": True} | fields if kind == "apply" else fields))
    snapshot = panel.state()["snapshot"]
    assert (snapshot["choice"], snapshot["sessions"]) == (chosen, [])
    assert set(home.runs) == before


# ---------------------------------------------------------------- a choice in effect


def test_a_bare_cell_uses_the_choice_and_each_option_wins_by_itself(panel: Panel, home: Home, kernel: Kernel):
    answer = panel.apply(choice(gpus=3, type="A10"))
    kept = answer["kept"]
    assert kept["choice"]["type"] == "a10"
    assert stat.S_IMODE(os.stat(home.state / NOTEBOOKS_FILE).st_mode) == 0o600
    snapshot = panel.state(kept)["snapshot"]
    assert (snapshot["confirmed"], snapshot["choice_words"]) == (True, "3 on A10, local, this notebook's packages")
    reply = kernel.check(f"%%distributed --name bare\n{TELL}")
    assert "ranks 3" in reply.text
    assert "a10" in reply.text.lower()
    reply = kernel.check(f"%%distributed --gpus 1\n{TELL}")
    assert "ranks 1" in reply.text
    assert "a10" in reply.text.lower()
    reply = kernel.check(f"%%distributed --type h100\n{TELL}")
    assert "ranks 3" in reply.text
    assert "h100" in reply.text.lower()
    # the same from Python
    code = (
        "import sgpu_magic\n@sgpu_magic.distributed\ndef count(world_size): return world_size\n"
        "print('python', count.distributed())"
    )
    assert "python [3, 3, 3]" in kernel.check(code).streams


def test_the_first_answer_after_applying_does_not_undo_it(panel: Panel, kernel: Kernel):
    before = panel.apply(choice(gpus=2, type="a10"))["kept"]
    panel.state(before)
    chosen = panel.apply(choice(gpus=1, type="h100"))["kept"]
    # requested before the page has written it
    late = panel.state(before)
    assert late["kept"] == chosen
    assert late["snapshot"]["choice_words"].startswith("1 on H100")
    assert panel.state(chosen)["kept"] is None
    # from here on the metadata apply: the user has undone the change
    assert panel.state(before)["snapshot"]["choice_words"].startswith("2 on A10")


def test_a_strangers_choice_is_refused_until_it_is_confirmed(panel: Panel, home: Home, kernel: Kernel):
    strange = foreign(gpus=2, type="h100")
    snapshot = panel.state(strange)["snapshot"]
    assert (snapshot["confirmed"], snapshot["choice"]["gpus"]) == (False, 2)
    before = set(home.runs)
    for code in (f"%%distributed\n{TELL}", "%sgpu_connect", f"%%distributed --gpus 1\n{TELL}"):
        reply = kernel.run(code)
        assert reply.ename == "UsageError", reply.story
        assert "2 on H100" in reply.evalue
        assert "you have not chosen that on this machine" in reply.evalue
        assert "%sgpu_env --accept" in reply.evalue
    reply = kernel.run("import sgpu_magic; sgpu_magic.connect()")
    assert reply.ename == "UsageError"
    assert 'gpu_type="TYPE"' in reply.evalue
    assert kernel.run("sgpu_magic.map(lambda item: item, [1, 2], ui='none')").ename == "UsageError"
    assert set(home.runs) == before
    # a cell that names everything does not use the choice
    assert "ranks 1" in kernel.check(f"%%distributed --gpus 1 --type a10\n{TELL}").text
    assert "you have not chosen that on this machine" in kernel.check("%sgpu_env").text
    assert "confirmed: this notebook asks for 2 on H100" in kernel.check("%sgpu_env --accept").text
    assert "ranks 2" in kernel.check(f"%%distributed\n{TELL}").text
    answer = panel.state(strange)
    assert (answer["kept"], answer["snapshot"]["confirmed"]) == (None, True)


def test_a_choice_that_asks_for_nothing_needs_no_confirmation(panel: Panel, kernel: Kernel):
    assert panel.state(foreign())["snapshot"]["confirmed"]
    assert "ranks 2" in kernel.check(f"%%distributed --type cpu\n{TELL}").text


def test_there_may_be_nothing_to_confirm(panel: Panel, kernel: Kernel):
    assert "so there is nothing to confirm" in kernel.run("%sgpu_env --accept").evalue
    assert "only without other arguments" in kernel.run("%sgpu_env --accept --panel").evalue


# ---------------------------------------------------------------- sessions


VARIABLES = """\
%%distributed
import torch, pathlib
def told(name):
    def method(self, *arguments, **options):
        pathlib.Path("user-code-ran").write_text(name)
    return method
Odd = type("Odd", (), {name: told(name) for name in ("__repr__", "__len__", "__getattribute__", "__eq__")})
odd = Odd()
x = torch.zeros(10 + rank, 4)
for i in range(130): globals()[f"z{i:03}"] = i
"""


def test_it_lists_the_ranks_variables_without_running_their_code(panel: Panel, kernel: Kernel, home: Home):
    assert panel.ask("variables")["variables"]["session"] == ""
    kernel.check("s = %sgpu_connect -n 2\ns.wait(30)")
    try:
        assert panel.ask("variables")["variables"]["variables"] == []
        kernel.check(VARIABLES)
        # at once after the cell
        found = panel.ask("variables")["variables"]
        assert (found["session"], found["busy"], found["notes"]) == ("main", False, [])
        forms = {each["name"]: each["forms"] for each in found["variables"]}
        assert [list(form.values()) for form in forms["x"]] == [
            ["Tensor", "(10, 4)", "float32", "cpu", "160 B", "0"],
            ["Tensor", "(11, 4)", "float32", "cpu", "176 B", "1"],
        ]
        assert [form["type"] for form in forms["odd"]] == ["Odd"]
        assert not (home.work / "user-code-ran").exists()
        # Odd, i, odd, told, x and those of the loop
        assert (len(forms), found["more"]) == (100, 35)
    finally:
        kernel.check("globals().pop('s', None)")


def test_while_a_cell_runs_in_the_session_it_lists_nothing_and_the_cell_is_not_delayed(
    panel: Panel, kernel: Kernel, home: Home
):
    kernel.check("s = %sgpu_connect -n 2\ns.wait(30)")
    cell = kernel.start("%%distributed\nimport os, time\nprint('up')\nwhile not os.path.exists('go'): time.sleep(0.01)")
    try:
        cell.until_shown("up")
        found = panel.ask("variables")["variables"]
        assert (found["session"], found["busy"], found["variables"]) == ("main", True, [])
    finally:
        (home.work / "go").touch()
        cell.wait()
        (home.work / "go").unlink()
        kernel.check("globals().pop('s', None)")
    assert panel.ask("variables")["variables"]["busy"] is False


def test_it_connects_while_a_cell_runs(panel: Panel, kernel: Kernel, blocked: Callable[[], Cell]):
    cell = blocked()
    plan = panel.plan(choice(gpus=2, type="a10"), connect=True)
    assert plan == {"sentences": [], "loses": False, "problem": "", "button": "Apply and connect"}
    answer = panel.apply(choice(gpus=2, type="a10"), connect=True)
    assert answer["notice"] == "%%distributed cells run in session main from now on."
    (session,) = answer["snapshot"]["sessions"]
    assert (session["name"], session["current"], session["words"]) == ("main", True, "2 on A10")
    eventually(lambda: panel.state(answer["kept"])["snapshot"]["sessions"][0]["state"] == "running", 60, "connected")
    assert not cell.idle
    blocked()
    # nothing was printed into the cell
    assert cell.wait().text.split() == ["up", "over"]
    assert "ranks 2" in kernel.check(f"%%distributed\nx = rank\n{TELL}").text
    plan = panel.plan(choice(gpus=2, type="a10"), connect=True)
    assert plan["button"] == "Connect"
    assert "already connected with this choice" in plan["sentences"][0]
    # a choice has no effect in a session
    panel.state(foreign(gpus=8, type="h100"))
    assert "ranks 2" in kernel.check(f"%%distributed\n{TELL}").text


def test_another_choice_restarts_the_session_when_that_is_confirmed(panel: Panel, kernel: Kernel):
    kept = panel.apply(choice(gpus=2, type="a10"), connect=True)["kept"]
    panel.state(kept)
    kernel.check("%%distributed\nweights = [rank] * 3")
    plan = panel.plan(choice(gpus=4, type="a10"), connect=True)
    assert plan["loses"]
    assert plan["sentences"] == ["Session main restarts: its ranks' variables are lost (weights)."]
    assert "Nothing was done" in panel.refused("apply", choice=choice(gpus=4, type="a10"), connect=True)
    assert panel.state(kept)["snapshot"]["sessions"][0]["words"] == "2 on A10"
    # the session's own devices are enough for it
    answer = panel.apply(choice(gpus=4, type="a10"), connect=True, confirmed=True)
    assert [session["words"] for session in answer["snapshot"]["sessions"]] == ["4 on A10"]
    reply = kernel.check(f"%%distributed\n{TELL}\nprint('weights' in globals())")
    assert "ranks 4" in reply.text
    assert "True" not in reply.text


def test_a_cell_that_runs_in_the_session_is_named_before_it_is_stopped(panel: Panel, kernel: Kernel, home: Home):
    kept = panel.apply(choice(gpus=1, type="a10"), connect=True)["kept"]
    panel.state(kept)
    kernel.check("%%distributed\npass")
    cell = kernel.start(
        "%%distributed --name epoch\nimport time\nprint('up', flush=True)\nwhile True: time.sleep(0.01)"
    )
    cell.until_shown("up")
    (words,) = panel.plan(choice(gpus=2, type="a10"), connect=True)["sentences"]
    assert "and what runs in it is stopped (epoch)" in words
    answer = panel.apply(choice(gpus=2, type="a10"), connect=True, confirmed=True)
    assert [session["words"] for session in answer["snapshot"]["sessions"]] == ["2 on A10"]
    assert cell.wait().status == "error"
    assert "ranks 2" in kernel.check(f"%%distributed\n{TELL}").text


def test_it_disconnects_while_a_cell_runs(panel: Panel, kernel: Kernel, home: Home, blocked: Callable[[], Cell]):
    panel.apply(choice(gpus=1, type="cpu"), connect=True)
    cell = blocked()
    answer = panel.ask("disconnect", name="main")
    assert answer["notice"] == "Session main has ended."
    assert answer["snapshot"]["sessions"] == []
    assert not cell.idle
    blocked()
    assert cell.wait().text.split() == ["up", "over"]
    assert kernel.value("__import__('sgpu_magic.runs.sessions.registry').runs.sessions.registry.names()") == []


def test_plain_cells_run_here_again_after_disconnecting_and_no_cell_is_told(panel: Panel, kernel: Kernel):
    panel.apply(choice(gpus=1, type="cpu"), connect=True)
    kernel.check("%sgpu_auto on")
    assert panel.ask("disconnect", name="main")["notice"] == "Session main has ended."
    assert kernel.check("print('here')").text == "here"


def test_devices_that_others_have_are_told_before(panel: Panel, kernel: Kernel):
    kernel.check("%sgpu_connect --name other --gpus 3 --type a10")
    eventually(lambda: panel.state()["snapshot"]["sessions"][0]["state"] == "running", 60, "connected")
    plan = panel.plan(choice(gpus=2, type="a10"), connect=True)
    assert plan["sentences"] == ["1 of the 2 A10 that this needs is free now: the session waits in the queue."]
    assert not plan["loses"]


# ---------------------------------------------------------------- the notebook's own file


@pytest.mark.slow
def test_the_notebooks_file_is_read_where_no_front_end_tells(
    panel: Panel, home: Home, new_kernel: Callable[..., Kernel]
):
    panel.apply({})
    file = home.work / "mine.ipynb"

    def write(kept: object) -> None:
        file.write_text(json.dumps({"cells": [], "metadata": {"sgpu": kept}, "nbformat": 4, "nbformat_minor": 5}))

    write(foreign(gpus=3, type="a10"))
    other = new_kernel(variables={"JPY_SESSION_NAME": str(file)})
    other.check("%sgpu_env --accept")
    assert "ranks 3" in other.check(f"%%distributed\n{TELL}").text
    # the same metadata in another user's notebook
    copied = file.with_name("copied.ipynb")
    copied.write_text(file.read_text())
    copy = new_kernel(variables={"JPY_SESSION_NAME": str(copied)})
    assert f"you chose that in {file}, not here" in copy.run(f"%%distributed\n{TELL}").evalue
    copy.check("%sgpu_env --accept")
    assert "ranks 3" in copy.check(f"%%distributed\n{TELL}").text
    write(foreign(gpus=7, type="h100"))
    assert "you have not chosen that on this machine" in other.run(f"%%distributed\n{TELL}").evalue
    write({"choice": {"gpus": "many"}})
    reply = other.run(f"%%distributed --gpus 1 --type cpu\n{TELL}")
    assert "ranks 1" in reply.text
    assert "can't be read" in other.check("%sgpu_env").text
    # metadata from a front end take precedence
    write(foreign(gpus=7, type="h100"))
    Panel(other).state(None)
    assert "ranks 1" in other.check(f"%%distributed --type h100 --gpus 1\n{TELL}").text
    assert "this notebook asks" not in other.check("%sgpu_env").text


# ---------------------------------------------------------------- packages of the notebook


@pytest.fixture(scope="module")
def index() -> Iterator[SmallIndex]:
    made = SmallIndex()
    made.add("clipboardish", "1.0")
    made.add("paperclippy", "2.0", needs=["clipboardish"])
    made.add("brokenish", "1.0", needs=["there-is-no-such-thing-at-all"])
    yield made
    made.close()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of a virtual environment that sees this one's packages, and that may be changed."""
    folder = tmp_path_factory.mktemp("scratch") / "venv"
    subprocess.run([uv_path(), "venv", "--quiet", "--python", sys.executable, str(folder)], check=True, timeout=60)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (site / "beside.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return str(folder / "bin" / "python")


@pytest.mark.slow
def test_packages_are_installed_into_the_notebooks_own_environment_and_removed_from_it(
    home: Home, new_kernel: Callable[..., Kernel], scratch: str, index: SmallIndex
):
    kernel = new_kernel(python=scratch, variables={"SGPU_INDEX_URL": index.url, "UV_CACHE_DIR": str(home.path / "uv")})
    panel = Panel(kernel)
    panel.state()
    wanted = choice(gpus=1, type="cpu", dependencies=["paperclippy"])
    plan = panel.plan(wanted)
    (packages, _) = plan["sentences"]
    assert packages.startswith("2 packages will be installed: clipboardish 1.0, paperclippy 2.0")
    assert (plan["problem"], plan["loses"], plan["button"]) == ("", False, "Apply")
    assert kernel.run("import paperclippy").ename == "ModuleNotFoundError"
    answer = panel.apply(wanted)
    assert answer["notice"] == "paperclippy installed."
    # they are among the notebook's packages now
    assert answer["kept"]["choice"]["dependencies"] == []
    lines = {line["name"]: line for line in answer["snapshot"]["differences"]}
    assert lines["paperclippy"]["words"] == "paperclippy 2.0"
    assert (lines["paperclippy"]["sign"], lines["paperclippy"]["removable"]) == ("+", True)
    assert kernel.check("import paperclippy; print(paperclippy.__version__)").text == "2.0"
    reply = kernel.check("%%distributed\nimport paperclippy; print('rank has', paperclippy.__version__)")
    assert "rank has 2.0" in reply.text
    # an install failure is shown in the installer's words, and the choice stays
    panel.state(answer["kept"])
    assert "there-is-no-such-thing-at-all" in panel.refused("apply", choice=choice(gpus=2, dependencies=["brokenish"]))
    assert panel.state(answer["kept"])["snapshot"]["choice"]["gpus"] == 1
    gone = choice(gpus=1, type="cpu", removed=["paperclippy"])
    assert panel.plan(gone)["loses"]
    assert "will be removed" in panel.refused("apply", choice=gone)
    assert panel.apply(gone, confirmed=True)["notice"] == "paperclippy removed."
    names = {line["name"] for line in panel.state()["snapshot"]["differences"]}
    assert "paperclippy" not in names
    assert "clipboardish" in names


@pytest.mark.slow
def test_while_packages_are_installed_the_panel_goes_on(
    home: Home, new_kernel: Callable[..., Kernel], scratch: str, index: SmallIndex
):
    index.add("slowish", "1.0")
    kernel = new_kernel(python=scratch, variables={"SGPU_INDEX_URL": index.url, "UV_CACHE_DIR": str(home.path / "uv2")})
    panel = Panel(kernel)
    panel.state()
    panel.state(panel.apply(choice(gpus=1, type="cpu"), connect=True)["kept"])
    kernel.check("%%distributed\nweights = 3")
    wanted = choice(gpus=1, type="cpu", dependencies=["slowish"])
    index.hold()
    try:
        began = time.monotonic()
        plan = panel.plan(wanted, connect=True)
        assert time.monotonic() - began < 10
        # the index has not answered within two seconds
        assert plan["sentences"] == [
            "1 package and its dependencies will be installed, in this notebook's environment.",
            "Session main restarts: its ranks' variables are lost (weights).",
        ]
        answer = panel.begin("apply", choice=wanted, connect=True, confirmed=True)
        eventually(lambda: panel.state()["installing"], 30, "it installs")
        assert "Another choice is being applied" in panel.refused("apply", choice=wanted)
        # cells run meanwhile
        assert kernel.check("print('here')").text == "here"
    finally:
        index.open.set()
    applied = answer()
    assert applied["kind"] == "kernel-answer", applied
    assert applied["notice"].startswith("slowish installed. %%distributed cells run in session main")
    assert not panel.state(applied["kept"])["installing"]
    reply = kernel.check(
        "%%distributed\nimport slowish\nprint('rank has', slowish.__version__, 'weights' in globals())"
    )
    assert "rank has 1.0 False" in reply.text
    panel.disconnect_all()


@pytest.mark.slow
def test_a_base_with_changes_is_what_the_ranks_have(new_home: Callable[..., Home], index: SmallIndex):
    home = new_home({"SGPU_INDEX_URL": index.url})
    base = home.work / "team.txt"
    index.add("inbase", "1.0")
    index.add("notwanted", "1.0")
    base.write_text("inbase==1.0\nnotwanted==1.0\n")
    kernel = Kernel(home, variables={"UV_CACHE_DIR": str(home.path / "uv")})
    try:
        panel = Panel(kernel)
        wanted = choice(gpus=1, type="cpu", env_version=str(base), dependencies=["paperclippy"], removed=["notwanted"])
        answer = panel.apply(wanted)
        assert answer["kept"]["choice"]["dependencies"] == ["paperclippy"]
        snapshot = answer["snapshot"]
        assert [(line["sign"], line["words"]) for line in snapshot["differences"]] == [
            ("-", "notwanted 1.0"),
            ("+", "paperclippy"),
        ]
        assert (
            snapshot["choice_words"] == f"1 on CPU, local, the packages of {base}, paperclippy added, notwanted removed"
        )
        assert f"{base.name}: a file" in [found["label"] for found in snapshot["bases"]]
        code = (
            "import importlib.util as find, inbase, paperclippy\n"
            "print('ranks have', inbase.__version__, paperclippy.__version__, find.find_spec('notwanted'))"
        )
        reply = kernel.check(f"%%distributed\n{code}", 120)
        assert "ranks have 1.0 2.0 None" in reply.text
        assert "team+paperclippy-notwanted.txt" in reply.text
        assert kernel.run("import inbase").ename == "ModuleNotFoundError"
    finally:
        kernel.close()


# ---------------------------------------------------------------- the panel in text, and its end


def test_where_no_widget_can_be_shown_the_panel_is_text(panel: Panel, kernel: Kernel):
    panel.apply(choice(gpus=2, type="a10"))
    kernel.client.allow_stdin = False
    try:
        text = kernel.check("%sgpu_env --panel").streams
    finally:
        kernel.client.allow_stdin = True
    assert "this notebook asks for 2 on A10, local, this notebook's packages." in text
    assert "h100" in text.lower()
    assert "packages" in text


@pytest.fixture
def widget(new_kernel: Callable[..., Kernel]) -> tuple[Kernel, Cell, LiveView]:
    """A kernel with a panel below a cell."""
    kernel = new_kernel()
    cell = kernel.start("%sgpu_env --panel")
    reply = cell.wait()
    assert reply.status == "ok", reply.story
    (output,) = reply.outputs
    assert output.view is not None
    assert "this notebook has no choice of its own" in output.data["text/plain"]
    return kernel, cell, output.view


def reported(view: LiveView, kind: str) -> list[dict[str, Any]]:
    return [sent.data for sent in view.sent if sent.kind == kind]


def order(kernel: Kernel, view: LiveView, **fields: object) -> None:
    """A widget's message without a number."""
    data = {"method": "custom", "content": fields}
    kernel.client.shell_channel.send(kernel.client.session.msg("comm_msg", {"comm_id": view.model_id, "data": data}))


def panel_threads(kernel: Kernel) -> list[str]:
    names = kernel.value("[thread.name for thread in __import__('threading').enumerate()]")
    return [name for name in names if name.startswith("sgpu-panel")]


def test_the_panel_below_a_cell_tells_of_the_pool_while_it_is_watched(widget: tuple[Kernel, Cell, LiveView]):
    kernel, cell, view = widget
    assert view.state["model_key"] == view.model_id
    assert len(view.state["_esm"]) > 10_000
    order(kernel, view, kind="watch", pool="")
    cell.until(lambda: reported(view, "runs"), 30, "the runs")
    assert reported(view, "pools")[0]["pools"][0]["name"] == "local"
    # the pool may still be starting, without devices
    pictures = functools.partial(reported, view, "pool")
    cell.until(lambda: pictures()[-1]["snapshot"]["types"], 30, "the pool's devices")
    assert [found["type"] for found in pictures()[-1]["snapshot"]["types"]] == ["h100", "a10", "cpu"]
    assert reported(view, "runs")[0]["whole"]
    assert panel_threads(kernel)
    kernel.check("%%distributed -n 1 --type cpu --name seen --ui none\npass")
    cell.until(lambda: [1 for sent in reported(view, "runs") for run in sent["changed"] if run["name"] == "seen"], 30)
    order(kernel, view, kind="start-pool", pool="nowhere")
    cell.until(lambda: reported(view, "command-result"), 30, "what became of it")
    assert reported(view, "command-result")[0]["ok"] is False
    order(kernel, view, kind="rest")
    eventually(lambda: panel_threads(kernel) in ([], ["sgpu-panel-patience"]), 10, lambda: str(panel_threads(kernel)))
    order(kernel, view, kind="watch", pool="")
    cell.until(lambda: len(reported(view, "pools")) == 2, 30, "the second watch")
    kernel.check("%unload_ext sgpu_magic")
    assert panel_threads(kernel) == []
    cell.until(lambda: view.closed_at is not None, 10, "the widget's end")


def test_the_panel_below_a_cell_asks_its_kernel_while_a_cell_blocks_it(
    home: Home, widget: tuple[Kernel, Cell, LiveView]
):
    kernel, _, view = widget
    chosen = Panel(kernel).apply(choice(gpus=1, type="cpu"))["kept"]
    Panel(kernel).state(chosen)
    cell = kernel.start(BLOCKED.replace("'go'", "'go-on'"))
    cell.until_shown("up")
    for over in ("control", "subshell"):
        number = kernel.front_end.ask(view, {"kind": "kernel"}, over)
        cell.until(lambda number=number: number in view.answers, 10, f"the answer over {over}")
        # it does not know the notebook's metadata, and leaves the choice as it is
        assert view.answers[number]["snapshot"]["choice_words"] == "1 on CPU, local, this notebook's packages"
        assert view.answers[number]["kept"] is None
    assert not cell.idle
    (home.work / "go-on").touch()
    assert cell.wait().text.split() == ["up", "over"]


def test_nothing_is_left_when_the_extension_is_unloaded(home: Home, new_kernel: Callable[..., Kernel]):
    kernel = new_kernel()
    panel = Panel(kernel)
    panel.apply(choice(gpus=1, type="cpu"), connect=True)
    kernel.check("%unload_ext sgpu_magic")
    assert panel_threads(kernel) == []
    content = {"model_id": "panel", "question": {"kind": "kernel", "n": 1}}
    message = kernel.client.session.msg("sgpu_request", content)
    kernel.client.control_channel.send(message)
    # there is no reply, and the channel still works
    assert kernel.front_end.control("kernel_info_request", {})["status"] == "ok"
    kernel.check("%load_ext sgpu_magic")
    assert panel.state()["snapshot"]["choice"] is None
