"""Completion on a magic's line before anything is listed, and a rank's matches merged with the kernel's."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.completer import CompletionContext
from IPython.core.interactiveshell import InteractiveShell

from sgpu_magic.client.pools_file import PoolEntry, add_pool
from sgpu_magic.magics import completion
from sgpu_magic.magics.auto_mode import AutoMode
from sgpu_magic.magics.completion import RankQuestions
from sgpu_magic.views import help as help_pages
from sgpu_magic.wire.run import Match, RankAnswer


@pytest.fixture(scope="module")
def module_shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InteractiveShell]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        shell = InteractiveShell.instance()
        yield shell
        InteractiveShell.clear_instance()
        shell.history_manager.end_session()


@pytest.fixture
def shell(
    module_shell: InteractiveShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[InteractiveShell]:
    """A shell with the matcher; its working directory and the settings' directories are new."""
    for name, value in {"STATE_DIR": "state", "RUNTIME_DIR": "run", "CONFIG": "own/config.toml"}.items():
        monkeypatch.setenv(f"SGPU_{name}", str(tmp_path / value))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    completion.install(module_shell)
    yield module_shell
    completion.remove(module_shell)


def offered(shell: InteractiveShell, line: str) -> list[str]:
    """The matches that our matcher offers at the end of a single-line cell; no other matcher adds to them."""
    (match,) = shell.Completer.custom_matchers
    found = match(CompletionContext(token="", full_text=line, cursor_position=len(line), cursor_line=0, limit=None))
    assert found["suppress"]
    return [each.text for each in found["completions"]]


def test_pages_of_help_are_offered(shell: InteractiveShell):
    assert offered(shell, "%sgpu_help ") == help_pages.topics()
    some = offered(shell, "sgpu_help po")
    assert some
    assert all(page.startswith("po") for page in some)


def test_runs_are_those_that_have_a_directory(shell: InteractiveShell, tmp_path: Path):
    assert offered(shell, "%sgpu_attach ") == []
    runs = tmp_path / "state" / "runs"
    for age, name in enumerate(("7f3a0001", "81000000", "notes")):
        (runs / name).mkdir(parents=True)
        os.utime(runs / name, (1e9 - age, 1e9 - age))
    assert offered(shell, "%sgpu_attach ") == ["7f3a", "8100"]
    assert offered(shell, "sgpu_stacks 81") == ["8100"]


def test_pools_and_environments_are_those_of_the_lists(shell: InteractiveShell, tmp_path: Path):
    assert offered(shell, "%%distributed --pool ") == ["local"]
    add_pool(PoolEntry("team", "tcp://head:8700", "k" * 40, reserved=True))
    assert offered(shell, "%%distributed --pool ") == ["local", "team", "reserved"]
    assert "none" in offered(shell, "%%distributed --env-version ")
    assert "none" not in offered(shell, "%sgpu_env --diff ")
    # an unreadable list is reported when it is used, not while the user types
    (tmp_path / "own" / "pools.toml").write_text("[team\n")
    assert offered(shell, "%%distributed --pool ") == ["local"]
    (tmp_path / "own" / "config.toml").write_text("pool =\n")
    assert "ai-4" in offered(shell, "%%distributed --env-version ")
    assert offered(shell, "%sgpu_attach ") == []


def test_paths_are_completed_folder_by_folder(shell: InteractiveShell):
    Path("data/deep").mkdir(parents=True)
    Path("data/.git").mkdir()
    Path("data/a.csv").touch()
    assert offered(shell, "%%distributed --upload d") == ["data/"]
    assert offered(shell, "%%distributed --upload data/") == ["data/a.csv", "data/deep/"]
    assert offered(shell, "%%distributed --upload data/.") == ["data/.git/"]
    assert offered(shell, "%%distributed --upload missing/") == []


def test_without_the_extension_nothing_is_offered(shell: InteractiveShell):
    completion.remove(shell)
    assert shell.Completer.custom_matchers == []
    # removing it twice is harmless
    completion.remove(shell)


# ---------------------------------------------------------------- a rank's matches

KERNEL_TYPES = [{"text": ".train", "type": "function", "signature": "(x)"}, {"text": ".top", "type": "<unknown>"}]


def reply(matches: list[str], start: int, end: int, **metadata: object) -> dict[str, Any]:
    return {"matches": matches, "cursor_start": start, "cursor_end": end, "metadata": metadata, "status": "ok"}


def test_a_ranks_matches_come_first_and_each_name_once():
    code = "%%distributed\nmodel.t"
    answer = RankAnswer(matches=(Match("t_rank", "instance"), Match("train", "function")), start=6, end=7)
    # the rank replaces `t`, the kernel `.t`
    found = completion._merged(reply([".train", ".top"], 19, 21), answer, 14, code)
    assert found["matches"] == [".t_rank", ".train", ".top"]
    assert (found["cursor_start"], found["cursor_end"]) == (19, 21)
    entries = found["metadata"]["_jupyter_types_experimental"]
    assert [(entry["text"], entry["type"]) for entry in entries] == [
        (".t_rank", "instance"), (".train", "function"), (".top", "<unknown>"),
    ]  # fmt: skip
    assert {(entry["start"], entry["end"]) for entry in entries} == {(19, 21)}
    # the kernel's own types are kept
    typed = completion._merged(
        reply([".train", ".top"], 19, 21, _jupyter_types_experimental=KERNEL_TYPES),
        RankAnswer(matches=(Match("t_rank"),), start=6, end=7), 14, code,
    )  # fmt: skip
    assert [(entry["text"], entry["type"]) for entry in typed["metadata"]["_jupyter_types_experimental"]] == [
        (".t_rank", "<unknown>"), (".train", "function"), (".top", "<unknown>"),
    ]  # fmt: skip


def test_matches_for_another_place_are_not_mixed():
    answer = RankAnswer(matches=(Match("train"),), start=0, end=2)
    assert completion._merged(reply(["rest"], 0, 9), answer, 0, "tr + rest")["matches"] == ["train"]
    own = reply(["a"], 0, 1)
    assert completion._merged(own, RankAnswer(), 0, "a") is own


def test_the_kernels_methods_are_restored_unless_somebody_wrapped_them(shell: InteractiveShell):
    def do_complete(code: str, cursor_pos: int) -> dict[str, Any]:
        return reply(["kernel"], 0, cursor_pos)

    class Kernel:
        def __init__(self) -> None:
            # an earlier extension has replaced the method on the object
            self.do_complete = do_complete
            self.shell = shell

        async def do_inspect(self, *_: object) -> dict[str, Any]:
            return {"status": "ok", "found": False}

    kernel = Kernel()
    auto = AutoMode(SimpleNamespace(input_transformers_cleanup=[]))
    try:
        questions = RankQuestions(kernel, auto)
        # without a session, both methods only delegate
        assert kernel.do_complete("ab", 2)["matches"] == ["kernel"]
        assert asyncio.run(kernel.do_inspect("ab", 2)) == {"status": "ok", "found": False}
        questions.remove()
        assert kernel.do_complete is do_complete
        assert "do_inspect" not in vars(kernel)
        again = RankQuestions(kernel, auto)
        ours = kernel.do_complete
        wrapped = lambda code, cursor_pos: ours(code, cursor_pos)  # noqa: E731
        kernel.do_complete = wrapped
        again.remove()
        assert kernel.do_complete is wrapped
        assert kernel.do_complete("ab", 2)["matches"] == ["kernel"]
    finally:
        auto.remove()
    assert inspect.iscoroutinefunction(kernel.do_inspect)
