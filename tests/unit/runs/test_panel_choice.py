"""A notebook's choice: read from any metadata, kept, and merged into options."""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgpu_magic.config import Settings
from sgpu_magic.errors import EnvironmentFailed, UsageError
from sgpu_magic.options import notebook_job
from sgpu_magic.options.notebook_job import JobDefaults
from sgpu_magic.options.option_records import Devices, EnvironmentOptions
from sgpu_magic.options.table import as_argument
from sgpu_magic.packages.requirement_files import read_file
from sgpu_magic.runs.choice.keeper import MAX_FILE_BYTES, ChoiceKeeper, keeper_of
from sgpu_magic.runs.choice.known_notebooks import NOTEBOOKS_FILE
from sgpu_magic.runs.choice.packages import env_version_of, missing, problem_of_requirement
from sgpu_magic.runs.choice.schema import Choice, KeptChoice, describe_choice, normal, problem_of, read_kept
from sgpu_magic.runs.submit.target import describe_held, with_choice

GB = 10**9


class Asked(msgspec.Struct, frozen=True):
    """Options of a cell."""

    devices: Devices
    environment: EnvironmentOptions
    pool: str = ""


NOTHING_ASKED = Asked(Devices(), EnvironmentOptions())


def nowhere() -> str:
    return ""


def notebook(path: Path, metadata: dict[str, Any]) -> None:
    """Write a notebook with a different mtime than the last one."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(json.dumps({"cells": [], "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}))
    if path.stat().st_mtime_ns == before:
        os.utime(path, ns=(before + 1, before + 1))


# ---------------------------------------------------------------- reading metadata


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (None, None),
        ({"choice": {}}, Choice()),
        ({"choice": {"gpus": 2, "type": "a10"}, "version": 1}, Choice(gpus=2, type="a10")),
        ({"choice": {"gpus": 2, "colour": "red"}, "more": [1]}, Choice(gpus=2)),
        ({"choice": {"dependencies": ["peft"], "removed": ["six"]}}, Choice(dependencies=("peft",), removed=("six",))),
    ],
)  # fmt: skip
def test_a_choice_is_read(found: object, expected: Choice | None):
    read = read_kept(found)
    assert read.problem == ""
    assert (read.kept.choice if read.kept else None) == expected


@pytest.mark.parametrize(
    "found",
    [
        3, "a10", [], {}, {"choice": None}, {"choice": []}, {"choice": {"gpus": "2"}}, {"choice": {"gpus": 2.5}},
        {"choice": {"gpus": True}}, {"choice": {"gpus": -1}}, {"choice": {"gpus": 10**30}}, {"choice": {"type": 4}},
        {"choice": {"type": "toaster"}}, {"choice": {"dependencies": "peft"}}, {"choice": {"dependencies": [1]}},
        {"choice": {"dependencies": ["-r /etc/passwd"]}}, {"choice": {"dependencies": ["x"] * 501}},
        {"choice": {"dependencies": ["peft", "PEFT>1"]}}, {"choice": {"removed": ["--all"]}},
        {"choice": {"env_version": "x" * 1001}}, {"choice": {"pool": "\x1b[31m"}}, {"choice": {}, "version": "1"},
        {"choice": {}, "version": "new"},
    ],
)  # fmt: skip
def test_what_can_not_be_read_is_a_sentence(found: object):
    read = read_kept(found)
    assert read.kept is None
    assert read.problem.startswith("This notebook's choice, in its metadata under `sgpu`, can't be read")
    assert read.problem.endswith("Choose again in the panel.")


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.sampled_from(
        ["choice", "version", "gpus", "type", "pool", "env_version", "dependencies", "removed"]
    ), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(anything)
def test_nothing_in_the_metadata_raises(found: object):
    read = read_kept(found)
    assert read.kept is None or problem_of(normal(read.kept.choice)) == ""


def test_a_newer_versions_choice_is_read_as_far_as_it_is_known():
    read = read_kept({"choice": {"gpus": 2, "nodes": 4}, "version": 7})
    assert read.kept is not None
    assert read.kept.choice == Choice(gpus=2)
    assert "newer sgpu-magic" in read.problem


def test_types_have_one_spelling():
    assert normal(Choice(type="A10G")).type == "a10"
    assert normal(Choice(type="any")).type == ""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("peft==0.17.1", ""), ("peft", ""), ("peft[all]>=0.1,<2 ; python_version > '3.8'", ""),
        ("p @ https://example.org/p-1-py3-none-any.whl", ""),
        ("p @ file:///home/me/p.whl", ""), ("p @ https://me:pw@example.org/p.whl", "password"),
        ("p @ https://${TOKEN}@example.org/p.whl", "password"), ("peft 0.17", "not a requirement"),
        ("", "not a requirement"), ("--pre", "not a requirement"),
    ],
)  # fmt: skip
def test_requirements_that_a_notebook_may_carry(line: str, words: str):
    problem = problem_of_requirement(line)
    assert words in problem if words else problem == ""


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (Choice(), "the pool's devices, local, this notebook's packages"),
        (Choice(gpus=2, type="a10"), "2 on A10, local, this notebook's packages"),
        (Choice(gpus=1), "1 rank, local, this notebook's packages"),
        (Choice(type="h100", pool="team", env_version="4"), "H100, team, the packages of 4"),
        (
            Choice(gpus=8, env_version="ai-4", dependencies=("peft", "trl==1"), removed=("a", "b", "c", "d")),
            "8 ranks, local, the packages of ai-4, peft, trl==1 added, a, b, c and 1 more removed",
        ),
    ],
)
def test_a_choice_in_words(choice: Choice, words: str):
    assert describe_choice(choice, "local") == words


# ---------------------------------------------------------------- keeping


def test_nothing_is_chosen_where_nothing_is_told(tmp_path: Path):
    keeper = ChoiceKeeper(tmp_path, nowhere)
    assert keeper.now().choice is None
    assert ChoiceKeeper(tmp_path, lambda: str(tmp_path / "gone.ipynb")).now().choice is None
    assert not (tmp_path / NOTEBOOKS_FILE).exists()


def test_the_notebooks_file_is_read_again_when_it_changes(tmp_path: Path):
    file = tmp_path / "a.ipynb"
    keeper = ChoiceKeeper(tmp_path, lambda: str(file))
    ChoiceKeeper(tmp_path, lambda: str(file)).confirm(Choice(gpus=2))
    notebook(file, {"sgpu": {"choice": {"gpus": 2}}})
    assert (keeper.now().choice, keeper.now().confirmed) == (Choice(gpus=2), True)
    notebook(file, {"sgpu": {"choice": {"gpus": 8}}})
    assert (keeper.now().choice, keeper.now().confirmed) == (Choice(gpus=8), False)
    notebook(file, {"sgpu": {"choice": {"gpus": "x"}}})
    assert keeper.now().choice is None
    assert "can't be read" in keeper.now().problem
    notebook(file, {"kernelspec": {"name": "python3"}})
    assert keeper.now() == ChoiceKeeper(tmp_path, nowhere).now()


@pytest.mark.parametrize(
    "text", ["", "no json", "[]", '{"metadata": 3}', '{"metadata": {"sgpu": ', "\udcff", "[" * 50_000]
)
def test_a_file_that_is_no_notebook_has_no_choice(tmp_path: Path, text: str):
    file = tmp_path / "a.ipynb"
    file.write_text(text, errors="surrogateescape")
    assert ChoiceKeeper(tmp_path, lambda: str(file)).now().choice is None


def test_a_very_large_notebook_is_not_read(tmp_path: Path):
    file = tmp_path / "a.ipynb"
    notebook(file, {"sgpu": {"choice": {"gpus": 2}}})
    with file.open("a") as opened:
        opened.truncate(MAX_FILE_BYTES + 1)
    assert ChoiceKeeper(tmp_path, lambda: str(file)).now().choice is None


def test_what_a_front_end_tells_comes_before_the_file(tmp_path: Path):
    file = tmp_path / "a.ipynb"
    notebook(file, {"sgpu": {"choice": {"gpus": 2}}})
    keeper = ChoiceKeeper(tmp_path, lambda: str(file))
    assert keeper.to_report(KeptChoice(choice=Choice(gpus=4))) is None
    assert keeper.now().choice == Choice(gpus=4)
    keeper.to_report(None)
    assert keeper.now().choice is None


def test_a_choice_made_here_stays_until_the_metadata_have_it(tmp_path: Path):
    keeper = ChoiceKeeper(tmp_path, nowhere)
    old = KeptChoice(choice=Choice(gpus=1))
    keeper.to_report(old)
    assert not keeper.now().confirmed
    kept = keeper.confirm(Choice(gpus=2, type="A10"))
    assert keeper.now().choice == Choice(gpus=2, type="a10")
    assert keeper.now().confirmed
    # asked before the choice was written
    assert keeper.to_report(old) == kept
    assert keeper.now().choice == Choice(gpus=2, type="a10")
    assert keeper.to_report(kept) is None
    # and undone later
    assert keeper.to_report(old) is None
    assert keeper.now().choice == Choice(gpus=1)


def test_another_notebook_of_the_kernel_is_not_told_what_the_first_has_chosen(tmp_path: Path):
    keeper = ChoiceKeeper(tmp_path, nowhere)
    keeper.to_report(KeptChoice(choice=Choice(gpus=1)))
    keeper.confirm(Choice(gpus=2))
    assert keeper.to_report(KeptChoice(choice=Choice(gpus=8))) is None
    assert keeper.now().choice == Choice(gpus=8)


# ---------------------------------------------------------------- the notebook it was made in


def chosen_in(file: Path, state: Path, choice: Choice) -> dict[str, Any]:
    """Choose in a notebook's kernel; return the metadata that the notebook has from now on."""
    notebook(file, {})
    metadata = {"sgpu": msgspec.to_builtins(ChoiceKeeper(state, lambda: str(file)).confirm(choice))}
    notebook(file, metadata)
    return metadata


def opened(file: Path, state: Path) -> tuple[bool, str]:
    """Whether the choice is in effect in a new kernel of a notebook, and in which other notebook it was made."""
    held = ChoiceKeeper(state, lambda: str(file)).now()
    assert held.choice == Choice(gpus=8, type="h100")
    return held.confirmed, held.other_notebook


def test_metadata_copied_into_another_notebook_are_not_this_users_choice_there(tmp_path: Path):
    mine, theirs = tmp_path / "mine.ipynb", tmp_path / "theirs.ipynb"
    context = Place(tmp_path / "state", theirs)
    metadata = chosen_in(mine, tmp_path / "state", Choice(gpus=8, type="h100"))
    notebook(theirs, metadata)
    for reported in (False, True):
        with pytest.raises(UsageError) as caught:
            asked(context)
        assert caught.value.message.startswith(
            f"this notebook asks for 8 on H100, local, this notebook's packages, and you chose that in {mine}, not here"
        )
        assert "on this machine" not in caught.value.message
        assert "confirm it in the panel or with `%sgpu_env --accept`" in caught.value.message
        assert f"you chose that in {mine}, not here" in describe_held(context.choice.now(), "local")
        if not reported:
            context.choice.to_report(read_kept(metadata["sgpu"]).kept)
    # a single note
    context.choice.confirm(Choice(gpus=8, type="h100"))
    assert asked(context).devices.ranks == 8
    assert opened(theirs, tmp_path / "state") == opened(mine, tmp_path / "state") == (True, "")


def test_a_notebook_that_is_renamed_or_saved_anew_keeps_its_choice(tmp_path: Path):
    first, second, state = tmp_path / "first.ipynb", tmp_path / "second.ipynb", tmp_path / "state"
    metadata = chosen_in(first, state, Choice(gpus=8, type="h100"))
    first.rename(second)
    assert opened(second, state) == (True, "")
    # an editor that replaces the file on each save
    second.unlink()
    first.touch()
    notebook(second, metadata)
    assert opened(second, state) == (True, "")
    (tmp_path / "link.ipynb").symlink_to(second)
    assert opened(tmp_path / "link.ipynb", state) == (True, "")


def test_a_choice_made_where_the_notebook_is_unknown_belongs_to_the_one_that_is_opened_first(tmp_path: Path):
    state, choice = tmp_path / "state", Choice(gpus=8, type="h100")
    kept = ChoiceKeeper(state, nowhere).confirm(choice)
    again = ChoiceKeeper(state, nowhere)
    again.to_report(kept)
    assert again.now().confirmed
    for name in ("old", "copy"):
        notebook(tmp_path / f"{name}.ipynb", {"sgpu": msgspec.to_builtins(kept)})
    assert opened(tmp_path / "old.ipynb", state) == (True, "")
    assert opened(tmp_path / "copy.ipynb", state) == (False, str(tmp_path / "old.ipynb"))


def test_a_job_is_asked_nothing_about_its_users_own_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`sgpu run` names the notebook, wherever it was checked out, and there is no user to ask."""
    metadata = chosen_in(tmp_path / "mine.ipynb", tmp_path / "state", Choice(gpus=8))
    notebook(tmp_path / "checkout.ipynb", metadata)
    monkeypatch.setenv(notebook_job.VARIABLE, notebook_job.as_variable(JobDefaults()))
    assert asked(Place(tmp_path / "state", tmp_path / "checkout.ipynb")).devices.ranks == 8


def test_without_a_readable_list_a_choice_is_confirmed_again(tmp_path: Path):
    state, mine = tmp_path / "state", tmp_path / "mine.ipynb"
    chosen_in(mine, state, Choice(gpus=8, type="h100"))
    (state / NOTEBOOKS_FILE).write_bytes(b"{}\n[1]\n")
    assert opened(mine, state) == (False, "")
    chosen_in(mine, state, Choice(gpus=8, type="h100"))
    assert opened(mine, state) == (True, "")
    (state / NOTEBOOKS_FILE).write_bytes(b"\xff\n")
    assert opened(mine, state) == (False, "")
    (state / NOTEBOOKS_FILE).unlink()
    (state / NOTEBOOKS_FILE).mkdir()
    keeper = ChoiceKeeper(state, lambda: str(mine))
    with pytest.raises(IsADirectoryError):
        keeper.confirm(Choice(gpus=8, type="h100"))
    assert not keeper.now().confirmed


def test_a_list_that_others_can_write_confirms_nothing(tmp_path: Path):
    state, mine = tmp_path / "state", tmp_path / "mine.ipynb"
    chosen_in(mine, state, Choice(gpus=8, type="h100"))
    assert stat.S_IMODE((state / NOTEBOOKS_FILE).stat().st_mode) == 0o600
    (state / NOTEBOOKS_FILE).chmod(0o666)
    assert opened(mine, state) == (False, "")


def test_the_list_of_notebooks_stays_small(tmp_path: Path):
    state = tmp_path / "state"
    for number in range(3000):
        ChoiceKeeper(state, partial(str, tmp_path / f"{number}.ipynb")).confirm(Choice(gpus=1))
    assert (state / NOTEBOOKS_FILE).stat().st_size < 500_000
    notebook(tmp_path / "2999.ipynb", {"sgpu": {"choice": {"gpus": 1}}})
    assert ChoiceKeeper(state, lambda: str(tmp_path / "2999.ipynb")).now().confirmed


# ---------------------------------------------------------------- merging with options


class Place:
    """What `with_choice` needs of a `KernelContext`."""

    def __init__(self, state: Path, notebook: Path | None = None, **settings: Any) -> None:
        self.settings = Settings(state_dir=str(state), **settings)
        self.pool = SimpleNamespace(name="local", settings=self.settings)
        self.pools = SimpleNamespace(
            local=self.pool, entries=lambda: (), names=lambda: ["local"], get=lambda name: self.pool
        )
        shell = SimpleNamespace(user_ns={"__vsc_ipynb_file__": str(notebook)}) if notebook is not None else None
        self.choice = keeper_of(state, shell)

    def current_settings(self) -> Settings:
        return self.settings


def asked(context: Place, options: Asked = NOTHING_ASKED) -> Asked:
    return with_choice(context, options)  # type: ignore[arg-type]


def test_without_a_choice_nothing_is_added(tmp_path: Path):
    options = Asked(Devices(2), EnvironmentOptions(env_version="4"))
    assert asked(Place(tmp_path), options) == options


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (NOTHING_ASKED, (3, "a10", "mine")),
        (Asked(Devices(1), EnvironmentOptions()), (1, "a10", "mine")),
        (Asked(Devices(None, "cpu"), EnvironmentOptions()), (3, "cpu", "mine")),
        (Asked(Devices(None, "any"), EnvironmentOptions()), (3, "any", "mine")),
        (Asked(Devices(), EnvironmentOptions(env_version="none", track=False)), (3, "a10", "none")),
        (Asked(Devices(), EnvironmentOptions(track=False), "local"), (3, "a10", "mine")),
    ],
)
def test_each_option_wins_by_itself(tmp_path: Path, options: Asked, expected: tuple[int, str, str]):
    context = Place(tmp_path)
    context.choice.confirm(Choice(gpus=3, type="a10", pool="local", env_version="mine"))
    found = asked(context, options)
    assert (found.devices.ranks, found.devices.device_type, found.environment.env_version) == expected
    assert found.environment.track == options.environment.track


def test_who_asks_for_memory_leaves_the_type_open(tmp_path: Path):
    context = Place(tmp_path)
    context.choice.confirm(Choice(gpus=3, type="a10"))
    assert asked(context, Asked(Devices(min_memory_bytes=GB), EnvironmentOptions())).devices == Devices(3, None, GB)


@pytest.mark.parametrize(
    ("job", "cell", "expected"),
    [
        (JobDefaults(gpus=4, type="a10", nodes=2, placement="spread"), Devices(), Devices(4, "a10", 0, 2, "spread")),
        (JobDefaults(gpus=4, nodes=2), Devices(1), Devices(1)),
        (JobDefaults(nodes=2), Devices(6), Devices(6, nodes=2)),
        (JobDefaults(min_memory="40GB"), Devices(2), Devices(2, None, 40 * GB)),
        (JobDefaults(min_memory="40GB"), Devices(2, "a10"), Devices(2, "a10")),
        (JobDefaults(type="a10"), Devices(2, min_memory_bytes=GB), Devices(2, None, GB)),
        (JobDefaults(placement="spread"), Devices(2, strategy="pack"), Devices(2, strategy="pack")),
    ],
)
def test_a_jobs_devices_are_for_cells_that_say_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: JobDefaults, cell: Devices, expected: Devices
):
    monkeypatch.setenv(notebook_job.VARIABLE, notebook_job.as_variable(job))
    assert asked(Place(tmp_path), Asked(cell, EnvironmentOptions())).devices == expected


@pytest.mark.parametrize(("setting", "expected"), [("", ""), ("none", ""), ("4", "none")])
def test_the_setting_comes_after_the_choice(tmp_path: Path, setting: str, expected: str):
    context = Place(tmp_path, env_version=setting)
    context.choice.confirm(Choice(gpus=1))
    assert asked(context).environment.env_version == expected


@pytest.mark.parametrize(
    ("choice", "options", "refused"),
    [
        (Choice(gpus=2), NOTHING_ASKED, True),
        (Choice(gpus=2), Asked(Devices(1), EnvironmentOptions()), False),
        (Choice(type="h100"), Asked(Devices(1), EnvironmentOptions()), True),
        (Choice(type="h100"), Asked(Devices(None, "a10"), EnvironmentOptions()), False),
        (Choice(env_version="4"), Asked(Devices(1, "a10"), EnvironmentOptions()), True),
        (Choice(env_version="4"), Asked(Devices(1, "a10"), EnvironmentOptions(env_version="none")), False),
        (Choice(dependencies=("peft",)), Asked(Devices(1, "a10"), EnvironmentOptions()), True),
        (Choice(removed=("six",)), Asked(Devices(1, "a10"), EnvironmentOptions()), True),
        (Choice(pool="team"), Asked(Devices(1, "a10"), EnvironmentOptions()), True),
        (Choice(pool="local"), NOTHING_ASKED, False),
        (Choice(), NOTHING_ASKED, False),
    ],
)
def test_a_strangers_choice_is_refused_where_it_would_matter(
    tmp_path: Path, choice: Choice, options: Asked, refused: bool
):
    context = Place(tmp_path)
    context.choice.to_report(KeptChoice(choice=choice))
    if not refused:
        assert asked(context, options) in (
            options,
            Asked(options.devices, options.environment, "local"),
        )
        return
    with pytest.raises(UsageError) as caught:
        asked(context, options)
    message = caught.value.message
    assert "you have not chosen that on this machine" in message
    assert "`--gpus N`, `--type TYPE`" in message
    caught.value.spell_options(as_argument)
    assert '`gpus=N`, `gpu_type="TYPE"`' in caught.value.message
    assert "%sgpu_env --accept" in message
    assert "\n" not in message


def test_a_pool_that_is_not_there_is_named(tmp_path: Path):
    context = Place(tmp_path)
    context.choice.confirm(Choice(pool="team"))
    with pytest.raises(UsageError, match="names the pool 'team', but you have: local"):
        asked(context)


def test_it_costs_a_submission_next_to_nothing(tmp_path: Path):
    file = tmp_path / "a.ipynb"
    context = Place(tmp_path, file)
    context.choice.confirm(Choice(gpus=2))
    notebook(file, {"sgpu": {"choice": {"gpus": 2}}})
    context = Place(tmp_path, file)
    assert asked(context).devices.ranks == 2
    times: list[float] = []
    for _ in range(200):
        began = time.thread_time()
        asked(context)
        times.append(time.thread_time() - began)
    assert sorted(times)[100] < 0.0001


# ---------------------------------------------------------------- packages


BASE = "# Python {here} on any machine, digest 00\n# Complete: all.\nalpha==1.0\nbeta==2.0\ngamma==3.0\n"
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A requirements file that declares itself complete."""
    file = tmp_path / "team.txt"
    file.write_text(BASE.format(here=HERE))
    return file


def test_a_base_with_changes_is_a_file_by_its_content(tmp_path: Path, base: Path):
    settings = Settings(state_dir=str(tmp_path / "state"))
    choice = Choice(env_version=str(base), dependencies=("Beta>=3", "delta"), removed=("alpha",))
    named = env_version_of(settings, choice, write=False)
    assert not Path(named).exists()
    file = Path(env_version_of(settings, choice))
    assert str(file) == named
    assert file.name == "team+beta+delta-alpha.txt"
    assert file.read_text() == "gamma==3.0\nBeta>=3\ndelta\n"
    assert read_file(file).resolve
    assert env_version_of(settings, choice) == str(file)
    base.write_text(base.read_text() + "epsilon==5.0\n")
    other = Path(env_version_of(settings, choice))
    assert other != file
    assert "epsilon==5.0" in other.read_text()
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_base_of_which_only_something_is_left_out_needs_no_resolving(tmp_path: Path, base: Path):
    settings = Settings(state_dir=str(tmp_path / "state"))
    file = Path(env_version_of(settings, Choice(env_version=str(base), removed=("ALPHA",))))
    found = read_file(file)
    assert (found.lines, found.resolve, found.python) == (("beta==2.0", "gamma==3.0"), False, HERE)


def test_a_base_without_changes_is_itself(tmp_path: Path):
    settings = Settings(state_dir=str(tmp_path))
    assert env_version_of(settings, Choice()) == ""
    assert env_version_of(settings, Choice(env_version="4")) == "4"
    assert env_version_of(settings, Choice(dependencies=("peft",))) == ""


def test_what_is_wrong_with_a_base_is_said_of_the_base(tmp_path: Path):
    settings = Settings(state_dir=str(tmp_path / "state"))
    with pytest.raises(UsageError, match="nothing-like-it"):
        env_version_of(settings, Choice(env_version="nothing-like-it", removed=("six",)))
    other = tmp_path / "other.txt"
    other.write_text(BASE.format(here="3.8"))
    with pytest.raises(EnvironmentFailed, match=r"other.txt is for Python 3\.8"):
        env_version_of(settings, Choice(env_version=str(other), removed=("alpha",)))
    assert not (tmp_path / "state").exists()


def test_the_choices_file_is_what_a_run_gets(tmp_path: Path, base: Path):
    context = Place(tmp_path)
    context.choice.confirm(Choice(env_version=str(base), dependencies=("delta",)))
    first = asked(context).environment.env_version
    assert "delta" in Path(first).read_text()
    # the file was deleted
    Path(first).unlink()
    assert asked(context).environment.env_version == first
    assert Path(first).is_file()


def test_what_is_missing():
    there = {"alpha": "1.0", "beta": "2.0"}
    lines = ("alpha", "Beta==2.0", "beta>2", "gamma", "alpha[more]", "alpha @ https://example.org/alpha.whl")
    assert missing(lines, there) == ("beta>2", "gamma", "alpha[more]", "alpha @ https://example.org/alpha.whl")
