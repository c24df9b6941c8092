"""What a panel reads from a notebook: its packages against a base, the available bases, and why a request fails."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest
from small_index import SmallIndex
from waiting import eventually

from sgpu_magic.errors import UsageError
from sgpu_magic.packages import named_environments
from sgpu_magic.packages.distributions import Distribution, InstalledPackages, Kind
from sgpu_magic.packages.snapshot import take_snapshot
from sgpu_magic.panel import kernel_actions, kernel_endpoint, kernel_state
from sgpu_magic.panel.kernel_actions import KernelActions, accept_choice
from sgpu_magic.panel.kernel_state import panel_text
from sgpu_magic.panel.poller import Watchers
from sgpu_magic.runs.choice.keeper import ChoiceKeeper
from sgpu_magic.runs.choice.schema import Choice, KeptChoice
from sgpu_magic.runs.kernel_context import KernelContext
from sgpu_magic.wire.attachments import Environment

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
OTHER = "3.8"
BASE = f"# Python {HERE} on any machine, digest 00\n# Complete: all.\nalpha==1.0\nbeta==2.0\ntorch==2.9.0\n"


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a `KernelContext` with these settings, in folders of the test; starts no pool."""
    made: list[KernelContext] = []

    def context(**settings: str) -> KernelContext:
        monkeypatch.setenv("SGPU_STATE_DIR", str(tmp_path / "state"))
        monkeypatch.setenv("SGPU_RUNTIME_DIR", str(tmp_path / "run"))
        monkeypatch.setenv("SGPU_CONFIG", str(tmp_path / "config.toml"))
        for name, value in settings.items():
            monkeypatch.setenv(f"SGPU_{name.upper()}", value)
        made.append(KernelContext())
        return made[-1]

    yield context
    for each in made:
        each.close()


@pytest.fixture
def base(tmp_path: Path) -> str:
    file = tmp_path / "team.txt"
    file.write_text(BASE)
    return str(file)


def snapshot(context: KernelContext, choice: Choice | None = None) -> dict[str, Any]:
    """The notebook's state, as sent to a page that has this choice in the notebook's metadata."""
    kept = {"choice": msgspec.to_builtins(choice)} if choice is not None else None
    return asked(KernelActions(context), kind="kernel", kept=kept)["snapshot"]


def asked(actions: KernelActions, **content: object) -> dict[str, Any]:
    return actions.answered({"n": 7, **content})


def lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [(line["sign"], line["words"]) for line in found["differences"]]


# ---------------------------------------------------------------- a base, and what a choice changes of it


def test_a_base_is_shown_with_the_changes_of_the_choice(make: Any, base: str):
    context = make()
    choice = Choice(
        env_version=base,
        dependencies=("Beta==2.5", "delta==1.0", "epsilon>2", "torch", "zeta"),
        removed=("Alpha", "not-in-it"),
    )
    found = snapshot(context, choice)
    assert lines(found) == [
        ("-", "alpha 1.0"),
        ("~", "beta 2.0 → 2.5"),
        ("+", "delta 1.0"),
        ("+", "epsilon>2"),
        ("~", "torch 2.9.0 → latest"),
        ("+", "zeta"),
    ]
    assert all(line["removable"] for line in found["differences"])
    # alpha is removed, and three packages are added
    assert (found["packages"], found["python"]) == (5, f"Python {HERE}")
    assert (found["notes"], found["more_differences"]) == ((), 0)
    unchanged = snapshot(context, Choice(env_version=base))
    assert (lines(unchanged), unchanged["packages"]) == ([], 3)
    assert unchanged["python"] == f"Python {HERE} · torch 2.9.0"


def test_more_differences_than_a_panel_has_room_for_are_counted(make: Any, base: str):
    many = tuple(f"p{number}" for number in range(100))
    found = snapshot(make(), Choice(env_version=base, dependencies=many))
    assert (len(found["differences"]), found["more_differences"]) == (60, 40)


def test_own_packages_are_shown_with_what_changed_since_the_kernel_began(make: Any, monkeypatch: pytest.MonkeyPatch):
    context, now = make(), take_snapshot()
    before = [found for found in now.distributions if found.key not in ("six", "packaging")]
    first = InstalledPackages(
        (*before, Distribution("gone", "1.0", Kind.REGISTRY), Distribution("six", "0.1", Kind.REGISTRY)),
        python=now.python,
    )
    monkeypatch.setattr(kernel_state.snapshot, "first_snapshot", lambda: first)
    found = snapshot(context)
    assert lines(found) == [
        ("-", "gone 1.0"),
        ("+", f"packaging {metadata.version('packaging')}"),
        ("~", f"six 0.1 → {metadata.version('six')}"),
    ]
    # installed packages can be removed here; changed or removed ones are the user's own changes
    assert [line["removable"] for line in found["differences"]] == [False, True, False]
    assert found["packages"] == len(now.distributions)


def test_the_bases_on_offer_are_published_saved_and_chosen(make: Any, base: str):
    context = make(env_version=base)
    for name, python in (("mine", HERE), ("old", OTHER)):
        kept = Environment(digest="00", python=python, requirements=("alpha==1.0",), packages=1)
        named_environments.save(context.settings, name, kept)
    named_environments.save(context.settings, "torn", Environment(digest="00"))
    (named_environments.saved_path(context.settings) / "torn" / "environment.json").write_text("{")
    found = {one["name"]: (one["label"], one["about"]) for one in snapshot(context)["bases"]}
    assert list(found) == ["", "4", "ai-4", "mine", "old", base]
    assert found[""][0] == f"this notebook's packages, Python {HERE}"
    assert found["4"][0] == "4: Databricks serverless GPU, Python 3.12"
    assert found["mine"] == (f"mine: a saved environment, Python {HERE}", f"Python {HERE} · 1 package")
    assert found["old"][1] == f"Python {OTHER} · 1 package · needs a kernel of Python {OTHER}"
    assert found[base] == ("team.txt: a file", f"the file {base}")
    # naming the damaged environment shows why it is not offered
    torn = snapshot(context, Choice(env_version="torn"))
    assert torn["notes"][0].startswith("The saved environment torn can't be read: ")
    assert torn["notes"][0].endswith("Save it again.")
    gone = snapshot(context, Choice(env_version="gone"))
    assert gone["notes"] == (
        "There is no environment 'gone' here. There are: 4, ai-4, mine, old, torn; "
        "a requirements file's path works too.",
    )
    assert {one["name"]: one["about"] for one in gone["bases"]}["gone"] == "no such environment here"
    wrong = snapshot(context, Choice(env_version="old"))
    assert wrong["notes"][0].startswith(f"The packages of old are for Python {OTHER}, and this notebook runs")


def test_a_choice_made_in_another_notebook_is_named(make: Any, tmp_path: Path):
    mine, theirs = tmp_path / "mine.ipynb", tmp_path / "theirs.ipynb"
    state = tmp_path / "state"
    mine.touch()
    theirs.touch()
    kept = ChoiceKeeper(state, lambda: str(mine)).confirm(Choice(gpus=2))
    context = make()
    context.choice = ChoiceKeeper(context.settings.state_path, lambda: str(theirs))
    found = asked(KernelActions(context), kind="kernel", kept=msgspec.to_builtins(kept))["snapshot"]
    assert not found["confirmed"]
    assert found["notes"][0] == f"You chose this in {mine}. Confirm it here if this notebook is yours as well."


def test_the_text_says_which_pool_can_not_be_asked(make: Any):
    text = panel_text(make(pool="team"))
    pool, choice, packages = text.split("\n\n", 2)
    assert pool == "there is no pool named `team`. You have: local. `sgpu pool add` lists another one."
    assert choice.startswith("this notebook has no choice of its own")
    assert "packages" in packages
    assert panel_text(make(pool="local")).startswith("no pool is running; the first run starts it.\n")


# ---------------------------------------------------------------- requests that fail


def test_what_can_not_be_written_is_said(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sent = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", sent)
    context = make()
    (tmp_path / "file").touch()
    context.choice = ChoiceKeeper(tmp_path / "file" / "state", str)
    refused = asked(KernelActions(context), kind="apply", choice={"gpus": 2})
    assert (refused["kind"], refused["n"]) == ("panel-refusal", 7)
    assert refused["text"].startswith("The request failed: NotADirectoryError: ")
    assert "Traceback" in sent.getvalue()
    assert context.choice.now().choice is None


def test_a_request_that_is_none_is_refused(make: Any):
    actions = KernelActions(make())
    assert asked(actions, kind="dance")["text"].startswith("This request is not valid: ")
    assert actions.answered(["kernel"])["n"] == 0
    assert asked(actions, kind="disconnect", name="train")["text"] == "This notebook has no session 'train' to end."
    assert asked(actions, kind="disconnect")["text"] == "This notebook has no session to end."


def test_an_installation_that_takes_long_is_reported_later(make: Any, monkeypatch: pytest.MonkeyPatch):
    """The page gets a reply immediately, a second choice is queued, and a failure is reported once."""
    index = SmallIndex()
    try:
        monkeypatch.setattr(kernel_actions, "ANSWER_S", 0.0)
        context = make(index_url=index.url)
        actions = KernelActions(context)
        index.hold()
        choice = {"dependencies": ["sgpu-no-such-thing"]}
        first = asked(actions, kind="apply", choice=choice)
        assert (first["notice"], first["installing"]) == ("Packages are being installed.", True)
        assert asked(actions, kind="kernel")["installing"]
        second = asked(actions, kind="apply", choice={"gpus": 1})
        assert second["text"] == "Another choice is being applied. Apply this one when that has finished."
        index.open.set()
        failed = eventually(
            lambda: next((sent for sent in [asked(actions, kind="kernel")] if sent["kind"] == "panel-refusal"), None),
            30,
            "the installation fails",
        )
        assert failed["text"].startswith("Sgpu-no-such-thing can't be installed: ")
        after = asked(actions, kind="kernel")
        assert (after["kind"], after["installing"], after["snapshot"]["choice"]) == ("kernel-answer", False, None)
        # a failure within the time limit is the reply
        monkeypatch.setattr(kernel_actions, "ANSWER_S", 30.0)
        assert asked(actions, kind="apply", choice=choice)["text"] == failed["text"]
    finally:
        index.close()


# ---------------------------------------------------------------- %sgpu_env --accept


def test_accepting_a_choice(make: Any, base: str):
    context = make()
    with pytest.raises(UsageError, match="this notebook's metadata asks for nothing, so there is nothing to confirm"):
        accept_choice(context)
    context.choice.to_report(KeptChoice(choice=Choice(env_version="gone")))
    with pytest.raises(UsageError, match="There is no environment 'gone' here"):
        accept_choice(context)
    assert not context.choice.now().confirmed
    six = f"six=={metadata.version('six')}"
    context.choice.to_report(KeptChoice(choice=Choice(gpus=2, dependencies=(six,), removed=("Packaging", "gone"))))
    sent = accept_choice(context)
    assert sent == (
        "confirmed: this notebook asks for 2 ranks, local, this notebook's packages, six=="
        f"{metadata.version('six')} added, Packaging, gone removed, and a bare %%distributed uses that from now on. "
        "Still installed: Packaging. `%pip uninstall Packaging` removes it."
    )
    assert metadata.version("packaging")
    assert accept_choice(context) == (
        "this notebook asks for 2 ranks, local, this notebook's packages; this is already confirmed."
    )


# ---------------------------------------------------------------- a panel below a cell


class Front:
    """A widget and the channels that deliver its messages."""

    def __init__(self) -> None:
        self.comm: object = object()
        self.reported: list[dict[str, Any]] = []
        self.ended: list[str] = []
        self.take: Any = None

    def send(self, content: dict[str, Any]) -> None:
        self.reported.append(content)

    def close(self) -> None:
        self.ended.append("widget")

    def opened_for(self, widget: object, take: Any) -> None:
        self.take = take

    def closed(self, widget: object) -> None:
        self.ended.append("channel")


def test_a_page_that_says_nothing_for_long_is_told_nothing(make: Any):
    endpoint, watchers, front = kernel_endpoint.KernelEndpoint(make()), Watchers(interval_s=0.01), Front()
    view = kernel_endpoint.PanelView(front, front, endpoint, watchers)  # type: ignore[arg-type]
    answers: list[dict[str, Any]] = []
    front.take("no message", answers.append)
    front.take({"kind": "kernel", "n": 3}, answers.append)
    eventually(lambda: answers, what="the page's question is answered")
    assert (answers[0]["kind"], answers[0]["n"]) == ("kernel-answer", 3)
    front.take({"kind": "dance"}, answers.append)
    eventually(lambda: front.reported, what="a wrong command is answered")
    assert front.reported[0]["text"].startswith("This request is not valid: ")
    front.take({"kind": "watch", "pool": ""}, answers.append)
    eventually(lambda: view._page.is_watching, what="it is watched")

    def after(quiet_s: float) -> bool:
        """Whether the pool is still watched when the timer fires, this long after the page's last message."""
        eventually(lambda: view._timer, what="the timer is set").cancel()
        view._received_at -= quiet_s
        view._check()
        return view._page.is_watching

    assert after(kernel_endpoint.PATIENCE_S / 2)
    # an open page sends this regularly
    front.take({"kind": "here"}, answers.append)
    assert after(kernel_endpoint.PATIENCE_S / 2)
    assert not after(kernel_endpoint.PATIENCE_S / 2)
    assert not view.is_closed
    front.take({"kind": "watch", "pool": ""}, answers.append)
    eventually(lambda: view._page.is_watching, what="it is there again")
    view.close()
    assert (view.is_closed, front.ended, view._timer) == (True, ["channel", "widget"], None)
    assert not view._page.is_watching
    reported = len(front.reported)
    front.take({"kind": "dance"}, answers.append)
    endpoint.close()
    watchers.close()
    assert len(front.reported) == reported


# ---------------------------------------------------------------- the threads that answer


def test_an_answer_that_can_not_be_sent_costs_nothing(make: Any, monkeypatch: pytest.MonkeyPatch):
    sent = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", sent)
    endpoint = kernel_endpoint.KernelEndpoint(make())
    answers: list[dict[str, Any]] = []

    def broken(_: dict[str, Any]) -> None:
        raise OSError("the page is gone")

    endpoint.on_request({"kind": "kernel", "n": 1}, broken)
    endpoint.on_request({"kind": "kernel", "n": 2}, answers.append)
    eventually(lambda: answers, what="the second request is answered")
    assert answers[0]["n"] == 2
    assert "OSError: the page is gone" in sent.getvalue()
    assert endpoint.show() is None
    endpoint.close()
    endpoint.on_request({"kind": "kernel", "n": 3}, answers.append)
    assert len(answers) == 1
