"""The effects of applying a choice, shown before it is applied."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from status_rows import pool_status, run_summary

from sgpu_magic.config import Settings
from sgpu_magic.panel.format_plan import panel_plan
from sgpu_magic.panel.plan import Plan, plan
from sgpu_magic.runs.choice import packages as chosen_packages
from sgpu_magic.runs.choice.keeper import CurrentChoice
from sgpu_magic.runs.choice.schema import Choice
from sgpu_magic.wire.devices import Device, Inventory
from sgpu_magic.wire.pool_status import PoolStatus

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
SIX = metadata.version("six")


def status(types: str = "a10:4,h100:8", taken: tuple[str, ...] = (), outside: tuple[str, ...] = ()) -> PoolStatus:
    """A pool with these devices; a run holds `taken`, and `outside` are in use outside the pool."""
    devices: list[Device] = []
    for word in filter(None, types.split(",")):
        name, _, count = word.partition(":")
        for number in range(int(count)):
            uuid = f"{name}-{number}"
            devices.append(Device(uuid=uuid, type=name, outside_use="a process" if uuid in outside else ""))
    run = run_summary(run_id="00000000000000000000000000000001", name="other", ranks=len(taken), uuids=taken)
    return pool_status(
        *((run,) if taken else ()),
        inventory=Inventory(host="here", devices=tuple(devices), cpu_slots=16),
        cpu_slots_free=5,
    )


class Place:
    """The parts of a `KernelContext` that a plan needs: settings, and a pool that reports its status."""

    def __init__(self, state: Path, reported: PoolStatus | None, **settings: Any) -> None:
        self.settings = Settings(state_dir=str(state), **settings)
        self.pool = SimpleNamespace(name="local", settings=self.settings, status=self._status)
        self.pools = SimpleNamespace(
            local=self.pool, entries=lambda: (), names=lambda: ["local"], get=lambda name: self.pool
        )
        self._told = reported

    def current_settings(self) -> Settings:
        return self.settings

    def _status(self, recent: int, *, start: bool) -> PoolStatus | None:
        assert not start, "a plan starts no pool"
        assert recent, "what goes on is told only with some runs"
        return self._told


A10 = "A10: smallest free type (--type to choose)."


def planned(context: Place, choice: Choice, *, connect: bool = False, held: CurrentChoice | None = None) -> Plan:
    return plan(context, held or CurrentChoice(), choice, connect=connect)  # type: ignore[arg-type]


@pytest.fixture
def context(tmp_path: Path) -> Place:
    return Place(tmp_path / "state", status())


# ---------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("choice", "problem"),
    [
        (Choice(gpus=4, type="a10"), ""),
        (Choice(gpus=8), ""),
        (Choice(type="h100"), ""),
        (Choice(gpus=16, type="cpu"), ""),
        (Choice(gpus=5, type="a10"), "The pool has 4 A10, but 5 are requested."),
        (Choice(gpus=9), "The pool has 8 of one type, but 9 are requested."),
        (Choice(gpus=65, type="cpu"), "The pool starts at most 64 ranks of one run on CPU, but 65 are requested."),
        (Choice(gpus=1, type="a100"), "The pool has no A100. It has: 4 A10, 8 H100, and 16 CPU ranks."),
        (Choice(gpus=1, pool="team"), "There is no pool named `team`. You have: local."),
        (Choice(), ""),
        (Choice(gpus=-3), "-3 is not a number of ranks; 1 to 4096 is possible."),
        (Choice(gpus=1, type="cpu", env_version="4x"), "There is no environment '4x' here. There are: 4, ai-4;"),
    ],
)
def test_what_the_pool_can_never_give_is_a_problem(context: Place, choice: Choice, problem: str):
    found = planned(context, choice, connect=True)
    assert panel_plan(found).problem.startswith(problem) if problem else not panel_plan(found).problem
    assert found.connects == (not problem)
    assert not panel_plan(found).loses


def test_an_empty_choice_can_be_kept(context: Place):
    found = panel_plan(planned(context, Choice()))
    assert (found.problem, found.sentences, found.button) == ("", ("Nothing is running.",), "Apply")


def test_types_that_cpu_stands_in_for_are_possible(tmp_path: Path):
    context = Place(tmp_path, status(), stand_in="cpu")
    assert panel_plan(planned(context, Choice(gpus=2, type="b200"), connect=True)).problem == ""


@pytest.mark.parametrize(
    ("choice", "reported", "sentence"),
    [
        (Choice(gpus=2, type="a10"), status(), ""),
        (
            Choice(gpus=3, type="a10"),
            status(taken=("a10-0", "a10-1")),
            "2 of the 3 A10 that this needs are free now: the session waits in the queue.",
        ),
        (
            Choice(gpus=1, type="a10"),
            status("a10:1", outside=("a10-0",)),
            "No A10 is free now: the session waits in the queue.",
        ),
        # without a type, the smallest one that is free
        (Choice(), status(), A10),
        (Choice(gpus=3), status(), A10),
        (Choice(gpus=3), status(taken=("a10-0", "a10-1")), A10.replace("A10:", "H100:")),
        (
            Choice(gpus=4),
            status("a10:4,h100:4", taken=("a10-0", "h100-0", "h100-1")),
            "A10: smallest type (--type to choose). 3 of the 4 A10 that this needs are free "
            "now: the session waits in the queue.",
        ),
        (
            Choice(gpus=6, type="cpu"),
            status(""),
            "5 of the 6 CPU ranks that this needs are free now: the session waits in the queue.",
        ),
        (Choice(), status(""), ""),
        (Choice(gpus=2, type="a10"), None, "The pool is started first."),
    ],
)
def test_waiting_is_told_before(tmp_path: Path, choice: Choice, reported: PoolStatus | None, sentence: str):
    found = panel_plan(planned(Place(tmp_path, reported), choice, connect=True))
    assert " ".join(found.sentences) == sentence
    assert not found.loses


# ---------------------------------------------------------------- the button


@pytest.mark.parametrize(
    ("held", "connect", "button"),
    [
        (CurrentChoice(), False, "Apply"),
        (CurrentChoice(), True, "Apply and connect"),
        (CurrentChoice(Choice(gpus=2, type="a10"), True), True, "Connect"),
        (CurrentChoice(Choice(gpus=2, type="a10"), False), True, "Apply and connect"),
        (CurrentChoice(Choice(gpus=1, type="a10"), True), True, "Apply and connect"),
    ],
)
def test_the_button_says_what_is_done(context: Place, held: CurrentChoice, connect: bool, button: str):
    assert panel_plan(planned(context, Choice(gpus=2, type="A10"), connect=connect, held=held)).button == button


# ---------------------------------------------------------------- packages


def test_what_is_there_is_not_installed_again(context: Place):
    found = planned(context, Choice(dependencies=(f"Six=={SIX}",)))
    assert (found.packages.added, found.packages.removed, panel_plan(found).sentences) == (
        (),
        (),
        ("Nothing is running.",),
    )


def test_a_removal_loses_something(context: Place):
    found = planned(context, Choice(removed=("Six", "there-is-no-such-thing")))
    assert found.packages.removed == ("Six",)
    assert panel_plan(found).loses
    assert panel_plan(found).sentences[0] == "Six will be removed from this notebook's environment."


def test_a_slow_index_does_not_keep_anybody_waiting(context: Place, monkeypatch: pytest.MonkeyPatch):
    def slow(*_: object) -> tuple[str, ...]:
        raise TimeoutError

    monkeypatch.setattr("sgpu_magic.panel.plan.would_install", slow)
    found = planned(context, Choice(dependencies=("there-is-no-such-thing",)))
    assert found.packages.added == ("there-is-no-such-thing",)
    assert (
        panel_plan(found).sentences[0]
        == "1 package and its dependencies will be installed, in this notebook's environment."
    )


def test_an_index_that_does_not_answer_is_given_up(tmp_path: Path):
    # nothing listens there; uv tries several times
    settings = Settings(state_dir=str(tmp_path), index_url="http://127.0.0.1:9/simple")
    with pytest.raises((TimeoutError, chosen_packages.EnvironmentFailed)):
        chosen_packages.would_install(settings, ("there-is-no-such-thing",), 0.5)


def test_packages_of_a_base_come_where_the_ranks_run(context: Place, tmp_path: Path):
    base = tmp_path / "team.txt"
    base.write_text(f"# Python {HERE} on any machine, digest 00\n# Complete: all.\nalpha==1.0\nbeta==2.0\n")
    found = planned(context, Choice(env_version=str(base)))
    assert panel_plan(found).sentences[0] == "2 packages will be installed where the ranks run, when they start."
    changed = planned(context, Choice(env_version=str(base), dependencies=("gamma",), removed=("alpha",)))
    assert panel_plan(changed).sentences[0] == (
        "About 2 packages will be installed where the ranks run, when they start, unless they are there already."
    )
    assert (changed.packages.added, changed.packages.removed) == ((), ())
    wrong = planned(context, Choice(env_version=str(base), removed=("delta",)))
    assert panel_plan(wrong).problem.endswith("team.txt has no delta to leave out.")


def test_a_base_for_another_python_is_a_problem(context: Place, tmp_path: Path):
    base = tmp_path / "old.txt"
    base.write_text("# Python 3.8 on any machine, digest 00\nalpha==1.0\n")
    problem = panel_plan(planned(context, Choice(env_version=str(base)))).problem
    assert "are for Python 3.8" in problem
    assert f"Python {HERE}" in problem


def test_a_setting_that_does_not_count_any_more_is_named(tmp_path: Path):
    context = Place(tmp_path, status(), env_version="4")
    found = panel_plan(planned(context, Choice(gpus=1, type="a10")))
    assert found.sentences[0] == "The setting env_version (4) does not apply to this notebook."
