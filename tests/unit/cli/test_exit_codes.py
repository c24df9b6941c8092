"""How a notebook's failed cell becomes the exit code of `sgpu run`."""

from __future__ import annotations

import json

import pytest

from sgpu_magic import errors
from sgpu_magic.cli.headless.cell_end import CellEnd, ExitCode, end_of, last_end, read_end
from sgpu_magic.client.link import PoolLost
from sgpu_magic.options.notebook_job import NotebookExit


class UsageError(Exception):
    """An error of the same name from another package."""

    topic = "usage"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("no"), ExitCode.USAGE),
        (errors.RunUnknown("no"), ExitCode.USAGE),
        (errors.CellSyntaxError("no"), ExitCode.FAILED),
        (errors.CapacityError("no"), ExitCode.POOL),
        (PoolLost("no"), ExitCode.POOL),
        (errors.KeyRefused("no"), ExitCode.FAILED),
        (errors.NodeLost("no"), ExitCode.POOL),
        (errors.RunTimeout("no"), ExitCode.TIMED_OUT),
        (errors.RunCancelled("no"), ExitCode.FAILED),
        (ZeroDivisionError(), ExitCode.FAILED),
        (UsageError(errors.see("usage")), ExitCode.FAILED),
        (None, ExitCode.FAILED),
    ],
)
def test_an_error_is_a_code(error: BaseException | None, code: ExitCode):
    assert end_of(error) == CellEnd(code)


def test_the_value_of_an_exit_is_kept():
    assert end_of(NotebookExit("it's\ndone")) == CellEnd(ExitCode.OK, exit_value="it's\ndone")


@pytest.mark.parametrize(("status", "is_clean"), [(None, True), (0, True), ("", True), (3, False), ("bad", False)])
def test_a_script_that_exits(status: object, is_clean: bool):
    assert end_of(SystemExit(status)) == CellEnd(is_clean_exit=is_clean)


def test_a_kernels_answer_is_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.last_value", NotebookExit("it's\ndone"), raising=False)
    answer = {"status": "ok", "data": {"text/plain": repr(last_end())}}
    assert read_end(json.loads(json.dumps(answer))) == CellEnd(ExitCode.OK, exit_value="it's\ndone")


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"status": "error", "ename": "ModuleNotFoundError"},
        {"data": {"text/plain": "<odd>"}},
        {"data": {"text/plain": "'{'"}},
    ],
)
def test_a_kernel_that_can_not_say_has_failed(answer: dict[str, object]):
    assert read_end(answer) == CellEnd()
