"""Which of several pools has a run, and whether its files are complete."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from status_rows import pool_status, run_summary

from sgpu_magic.client import find_run, run_files
from sgpu_magic.client.find_run import pool_of, pool_with
from sgpu_magic.client.pools import PoolStatusReply
from sgpu_magic.client.pools_file import PoolEntry
from sgpu_magic.client.run_files import LocalRunFiles, RemoteRunFiles, files_of
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError, RunUnknown, UsageError
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.pool_status import PoolStatus, RunSummary

TEAM, CLOUD = (PoolEntry(name, "tcp://h:1", "k" * 40) for name in ("team", "cloud"))


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("SGPU_POOLS_FILE", str(tmp_path / "pools.toml"))
    return Settings(state_dir=str(tmp_path / "state"), runtime_dir=str(tmp_path / "run"))


def row(run_id: str, state: RunState = RunState.RUNNING, at: float = 1.0) -> RunSummary:
    return run_summary(run_id=run_id, state=state, submitted_at=at)


class Pool:
    """A pool that may have runs too old for its list."""

    entry = TEAM

    def __init__(self, name: str = "team", *old: str) -> None:
        self.name = name
        self.old = old
        self.link = lambda: None
        self.connected: object = object()
        self.answers: list[PoolStatus | PoolError] = []
        self.attached: list[str] = []
        self.closed: list[str] = []

    def attach(self, run: str) -> tuple[Any, RunState]:
        self.attached.append(run)
        found = next((run_id for run_id in self.old if run_id.startswith(run)), "")
        if not found:
            raise RunUnknown(f"there is no run {run}.")
        return SimpleNamespace(run_id=found, close=lambda: self.closed.append(found)), RunState.SUCCEEDED

    def status(self, recent: int, *, start: bool) -> PoolStatus:
        assert not start
        answer = self.answers.pop(0)
        if isinstance(answer, PoolError):
            raise answer
        return answer


def pools_of(*answers: PoolStatusReply, pools: dict[str, Pool] | None = None) -> Any:
    """Pools with these answers; each is its name, unless it is given."""
    local = SimpleNamespace(connected=None, name="local")
    return SimpleNamespace(
        entries=lambda: (TEAM, CLOUD),
        used_pools=lambda: [local],
        local=local,
        used_pool=lambda name: (pools or {}).get(name, name),
        ask_status=lambda entries, *, local, recent: list(answers),
    )


def asked(name: str, *rows: RunSummary) -> PoolStatusReply:
    return PoolStatusReply(name, TEAM, pool_status(*rows))


def test_a_run_is_found_by_its_first_digits(settings: Settings):
    pools = pools_of(
        asked("team", row("aa000001"), row("ab000001", RunState.SUCCEEDED, 9.0)),
        asked("cloud", row("ab000002", at=5.0)),
        # the same pool under another name
        asked("again", row("ab000002", at=5.0)),
    )
    assert pool_with(pools, settings, "aa") == "team"
    assert pool_with(pools, settings, "ab000002") == "cloud"
    assert pool_with(pools, settings, "ab", only_active=True) == "cloud"
    # the newest active one
    assert pool_with(pools, settings, "") == "cloud"
    with pytest.raises(RunUnknown) as raised:
        pool_with(pools, settings, "a")
    assert raised.value.message == (
        "'a' matches 4 runs: aa00 (team), ab00 (team), ab00 (cloud), ab00 (again). Give more digits."
    )
    assert pool_with(pools_of(asked("team")), settings, "").name == "local"


def test_a_run_that_is_nowhere_says_who_was_not_asked(settings: Settings):
    pools = pools_of(
        asked("team"), asked("cloud"), PoolStatusReply("far", CLOUD, problem="the pool far did not answer.")
    )
    with pytest.raises(RunUnknown) as raised:
        pool_with(pools, settings, "ab", only_active=True)
    assert raised.value.message == (
        "no active run has an id that begins with 'ab' in the pools team, cloud. Not asked, because it can't be "
        "reached: far. %sgpu_status and `sgpu runs` list the runs."
    )


def test_pools_with_long_lists_are_asked_for_older_runs(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(find_run, "NEWEST_RUNS", 1)
    team, cloud = Pool("team"), Pool("cloud", "ab000001")
    far = PoolStatusReply("far", TEAM, problem="the pool far did not answer.")
    pools = pools_of(
        far,
        asked("short"),
        asked("team", row("cc000001")),
        asked("cloud", row("cc000002")),
        pools={"team": team, "cloud": cloud},
    )
    assert pool_with(pools, settings, "ab") is cloud
    assert (team.attached, cloud.attached, cloud.closed) == (["ab"], ["ab"], ["ab000001"])
    with pytest.raises(RunUnknown):
        pool_with(pools, settings, "ab", only_active=True)


def test_without_any_pool_it_is_said_at_once(settings: Settings):
    with pytest.raises(PoolError) as raised, pool_of(settings, "ab", "to stop"):
        pass
    assert raised.value.message == "no local pool is running, so there is no run to stop."
    with pytest.raises(UsageError, match="'x' is not a run's id"), pool_of(settings, "x", "to stop"):
        pass


# ---------------------------------------------------------------- files


def test_files_here_are_complete_once_nobody_can_write_them(settings: Settings):
    files = LocalRunFiles(settings, "ab000001")
    # the directory was removed
    assert files.has_ended(None)
    files.directory.mkdir(parents=True)
    # no pool is running
    assert files.has_ended(None)
    assert not files.has_ended(row("ab000001"))
    assert files.has_ended(row("ab000001", RunState.FAILED))


def test_files_of_a_run_that_a_pool_is_about_to_list_are_not(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_files, "find_pool", lambda _: object())
    files = LocalRunFiles(settings, "ab000001")
    files.directory.mkdir(parents=True)
    assert not files.has_ended(None)
    os.utime(files.directory, (time.time() - 60,) * 2)
    assert files.has_ended(None)


def test_files_here_are_copied_from_where_the_copy_ends(settings: Settings, tmp_path: Path):
    files = LocalRunFiles(settings, "ab000001")
    files.directory.mkdir(parents=True)
    (files.directory / "rank-0.log").write_bytes(b"0123456789")
    assert [file.name for file in files.list().files] == ["rank-0.log"]
    (tmp_path / "copy").write_bytes(b"01234")
    target = os.open(tmp_path / "copy", os.O_RDWR)
    try:
        files.copy_into("rank-0.log", target, 5)
    finally:
        os.close(target)
    assert (tmp_path / "copy").read_bytes() == files.bring("rank-0.log").read_bytes()
    with pytest.raises(OSError, match="not the name of a file below"):
        files.copy_into("../other", 0, 0)


def test_a_run_elsewhere_is_named_by_its_pool(settings: Settings):
    pool = Pool("team", "ab000001")
    pool.answers = [pool_status(row("cc000001")), pool_status(row("ab000001"))]
    # too old for the list
    files = RemoteRunFiles(settings, pool, "ab")  # type: ignore[arg-type]
    assert (files.run_id, pool.closed) == ("ab000001", ["ab000001"])
    assert files.row() is None
    assert files.has_ended(files.row())
    found = files.row(max_age_s=0.0)
    assert found is not None
    assert not files.has_ended(found)
    # an interrupted link keeps the known row, a lost one does not
    pool.answers = [PoolError("it did not answer."), PoolError("it did not answer.")]
    assert files.row(max_age_s=0.0) is found
    pool.connected = None
    with pytest.raises(PoolError):
        files.row(max_age_s=0.0)
    pool.answers = [pool_status(msgspec.structs.replace(found, state=RunState.SUCCEEDED))]
    assert files.has_ended(files.row(max_age_s=0.0))


def test_a_local_run_without_a_directory_is_explained(settings: Settings):
    with pytest.raises(UsageError) as raised, suppress(RunUnknown), files_of(settings, "ab"):
        pass
    assert raised.value.message == (
        "no run on this machine has an id that begins with 'ab'. `sgpu runs --all` lists them; their directories "
        f"are in {settings.runs_path}."
    )
    for run_id in ("ab000001", "ab000002", "notes"):
        (settings.runs_path / run_id).mkdir(parents=True)
    with pytest.raises(UsageError, match=r"'ab' matches 2 runs: ab000001, ab000002\. Give more digits"):
        find_run.find_directory(settings, "AB")
    with files_of(settings, "ab000002") as files:
        assert files.run_id == "ab000002"
