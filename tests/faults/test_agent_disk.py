"""A full or read-only disk of a node fails new runs, and none that is running."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_process import AgentProcess

from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.events import Noted, RanksStarted, RunEnded
from sgpu_magic.wire.run import OutputName

CELL = """
import os, time
print('begun', flush=True)
while not os.path.exists(over):
    time.sleep(0.02)
for line in range(200):
    print('x' * 1000)
value = 40 + 2
print('whole')
"""


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"may not mount: {done.stderr.strip()}")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A place whose state directory is a disk of 4 MB with 64 files."""
    if sys.platform != "linux" or shutil.which("mount") is None:
        pytest.skip("needs mount(8)")
    state = tmp_path / "state"
    state.mkdir()
    mount("-t", "tmpfs", "-o", "size=4m,nr_inodes=64,mode=0700", "sgpu-test", str(state))
    yield tmp_path
    subprocess.run(["umount", "-l", str(state)], check=True)


def fill(state: Path) -> None:
    with open(state / "full", "wb", buffering=0) as file, pytest.raises(OSError, match="No space"):  # noqa: PT012  the loop ends so
        while True:
            file.write(bytes(1 << 16))


def use_inodes_up(state: Path) -> None:
    with pytest.raises(OSError, match="No space"):  # noqa: PT012  the loop ends so
        for number in range(100):
            (state / f"full-{number}").touch()


def make_read_only(state: Path) -> None:
    runs = str(state / "runs")
    mount("--bind", runs, runs)
    mount("-o", "remount,ro,bind", runs)


@pytest.mark.parametrize(
    "harm", [fill, *(pytest.param(harm, marks=pytest.mark.slow) for harm in (use_inodes_up, make_read_only))]
)
def test_a_run_that_goes_on_ends_right_and_one_that_comes_is_refused(small: Path, harm: Callable[[Path], None]):
    state, over = small / "state", small / "over"
    agent = AgentProcess(path=small)
    try:
        going_on = agent.launch(CELL, ranks=2, names={"over": str(over)}, outputs=(OutputName(name="value"),))
        agent.wait_for(going_on, RanksStarted)
        harm(state)
        refused = agent.launch("print('never')", ranks=2)
        failure = agent.wait_for(refused, RunEnded).failure
        agent.wait_until_gone(refused)
        if failure is None:
            # a directory takes no space there
            sent = [event.text for event in agent.events[refused] if isinstance(event, Noted)]
        else:
            sent = [failure.message]
            assert "the run can't be recorded on" in sent[0]
            assert f"{state}/runs/{refused}" in sent[0]
        assert len(sent) == 1, sent
        assert "No space left on device" in sent[0] or "Read-only file system" in sent[0]
        over.touch()
        ended = agent.wait_for(going_on, RunEnded)
        agent.wait_until_gone(going_on)
        assert ended.state is RunState.SUCCEEDED, ended
        assert ended.results[0].payload is not None
        assert [text.splitlines()[-1] for text in agent.printed(going_on).values()] == ["whole", "whole"]
        assert len([event for event in agent.events[going_on] if isinstance(event, Noted)]) <= 1
        if harm is make_read_only:
            subprocess.run(["umount", "-l", str(state / "runs")], check=True)
        for file in state.glob("full*"):
            file.unlink()
        following = agent.launch("print('again')", ranks=2)
        assert agent.wait_for(following, RunEnded).state is RunState.SUCCEEDED
        assert agent.printed(following) == {0: "again\n", 1: "again\n"}
    finally:
        agent.close()
