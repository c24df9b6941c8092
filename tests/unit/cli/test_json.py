"""`--json`: the documents' schema, and what each command prints without a pool."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kept_runs import KeptRuns
from status_rows import pool_status, run_summary

from sgpu_magic.cli import main as cli
from sgpu_magic.cli.finding import ok, problem, warning
from sgpu_magic.cli.jobs import JobRecord, write
from sgpu_magic.cli.json_form import run_row, status_document
from sgpu_magic.cli.json_records import DOCUMENTS, Document
from sgpu_magic.client.pools import PoolStatusReply
from sgpu_magic.client.pools_file import PoolEntry, add_pool
from sgpu_magic.config import load_settings
from sgpu_magic.system.secure_sockets import new_key_pair
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.devices import Device, Inventory
from sgpu_magic.wire.pool_status import BudgetState, RunSummary

GOLDEN = Path(__file__).parents[2] / "golden" / "command_documents.json"
RUN = "7f3a0001"
NOW = 1_700_000_000.0


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptRuns]:
    names = {"STATE_DIR": "state", "RUNTIME_DIR": "run", "CONFIG": "own/config.toml", "POOLS_FILE": "pools.toml"}
    for name, value in names.items():
        monkeypatch.setenv(f"SGPU_{name}", str(tmp_path / value))
    made = KeptRuns(load_settings())
    yield made
    made.close()


@pytest.fixture
def document(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a command with `--json` and returns its document, which fits the declared record."""

    def run(*arguments: str, code: int = 0) -> Any:
        assert cli.main([*arguments, "--json"]) == code
        out, err = capsys.readouterr()
        assert err == ""
        assert "\x1b" not in out
        msgspec.json.decode(out, type=DOCUMENTS[" ".join(["sgpu", *arguments[: _words(arguments)]])])
        return json.loads(out)

    return run


def _words(arguments: tuple[str, ...]) -> int:
    return 2 if arguments[0] in ("pool", "env") else 1


def schema() -> str:
    """The JSON Schema of all documents, without descriptions."""

    def bare(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: bare(value) for key, value in part.items() if key != "description"}
        return [bare(value) for value in part] if isinstance(part, list) else part

    types = list(dict.fromkeys(DOCUMENTS.values()))
    _, components = msgspec.json.schema_components(types, ref_template="#/{name}")
    commands = {command: record.__name__ for command, record in DOCUMENTS.items()}
    return json.dumps({"commands": commands, "records": bare(components)}, indent=1) + "\n"


def test_the_documents_have_the_recorded_schema():
    """A field that is removed, renamed or changed needs a new number of the schema."""
    if os.environ.get("SGPU_UPDATE_GOLDEN"):
        GOLDEN.write_text(schema())
    assert schema() == GOLDEN.read_text()


def test_every_document_begins_with_the_number_of_the_schema():
    for record in DOCUMENTS.values():
        assert issubclass(record, Document)
        assert msgspec.structs.fields(record)[0].name == "schema"


# ------------------------------------------------------------ runs, logs, jobs


def test_runs(kept: KeptRuns, document: Callable[..., Any]):
    kept.add(RUN, RunState.FAILED, failure="rank 1: \x1b[31mValueError\x1b[0m: NaN")
    found = document("runs")
    assert found["schema"] == 1
    (run,) = found["runs"]
    assert (run["id"], run["pool"], run["name"], run["state"]) == (RUN, "local", "cell", "failed")
    assert run["failure"] == "rank 1: ValueError: NaN"
    assert (run["submitted_at"], run["ended_at"]) == ("1970-01-01T00:00:01Z", "1970-01-01T00:00:03Z")
    assert (run["duration_s"], run["ranks"], run["gpus"], run["type"]) == (1.0, 2, None, "any")
    assert (run["cost"], run["notebook"], run["queue_position"]) == (None, None, None)


def test_without_runs_the_list_is_empty(kept: KeptRuns, document: Callable[..., Any]):
    assert document("runs") == {"schema": 1, "runs": [], "omitted": []}


def summary(**fields: object) -> RunSummary:
    return run_summary(**{"run_id": RUN, "ranks": 4, "submitted_at": NOW - 100} | fields)


def test_a_run_that_goes_on_lasts_until_now_and_has_a_cost():
    started = summary(started_at=NOW - 60, metered_at=NOW - 60, hourly=36.0, currency="USD", uuids=("a", "b"))
    row = run_row(started, "team", NOW)
    assert (row.duration_s, row.gpus, row.devices, row.pool) == (60.0, 4, ("a", "b"), "team")
    assert row.cost is not None
    assert (row.cost.amount, row.cost.currency) == (pytest.approx(0.6), "USD")
    assert row.submitted_at == datetime.fromtimestamp(NOW - 100, UTC)


@pytest.mark.parametrize(
    "fields",
    [{"state": RunState.QUEUED}, {"state": RunState.FAILED, "started_at": NOW}],
    ids=["not started", "pool died with it"],
)
def test_a_duration_that_is_unknown_is_null(fields: dict[str, object]):
    assert run_row(summary(**fields), "local", NOW).duration_s is None


def test_logs_are_documents_of_one_line(kept: KeptRuns, capsys: pytest.CaptureFixture[str]):
    kept.add(RUN, RunState.FAILED, failure="no", files={"rank-0.log": b'a "\xc3\xa9"\n', "rank-1.log": b"\x1b[31mb"})
    for more in ([], ["--follow"]):
        assert cli.main(["logs", "7f3a", "--json", *more]) == 0
        out, err = capsys.readouterr()
        assert [json.loads(line) for line in out.splitlines()] == [
            {"schema": 1, "run": RUN, "rank": 0, "text": 'a "é"'},
            {"schema": 1, "run": RUN, "rank": 1, "text": "b"},
        ]
        assert err == ("sgpu: run 7f3a failed: no\n" if more else "")


def test_an_error_is_a_sentence_on_standard_error(kept: KeptRuns, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["logs", "7f3a", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("sgpu: no run on this machine")


def test_jobs(kept: KeptRuns, document: Callable[..., Any]):
    job = JobRecord(job_id=RUN, source="/data/n.ipynb", copy="", started_at=NOW, ended_at=NOW + 5, code=3, cells=2)
    write(load_settings(), job)
    write(load_settings(), JobRecord(job_id="7f3a0002", source="/data/m.ipynb", copy="/data/m.out", started_at=NOW - 1))
    ended, killed = document("jobs")["jobs"]
    assert ended == {
        "id": RUN, "source": "/data/n.ipynb", "copy": None, "state": "pool failed", "exit_code": 3,
        "started_at": "2023-11-14T22:13:20Z", "ended_at": "2023-11-14T22:13:25Z", "duration_s": 5.0,
        "cells_done": 0, "cells": 2, "detached": False,
    }  # fmt: skip
    assert (killed["state"], killed["exit_code"], killed["duration_s"]) == ("killed", None, None)


# ------------------------------------------------------------ pools


def test_pools_that_do_not_answer(kept: KeptRuns, document: Callable[..., Any]):
    key = new_key_pair().public
    add_pool(PoolEntry("team", "tcp://127.0.0.1:1", key, reserved=True))
    local, team = document("pool", "list")["pools"]
    assert local == {
        "name": "local", "kind": "local", "address": None, "state": "not running", "problem": None, "types": [],
    }  # fmt: skip
    assert (team["kind"], team["address"], team["state"]) == ("reserved", "tcp://127.0.0.1:1", "unreachable")
    assert team["problem"]
    assert key not in json.dumps(team)
    # every command that lists rows says which pools are missing
    assert [each["pool"] for each in document("runs")["omitted"]] == ["team"]
    assert [each["pool"] for each in document("usage")["omitted"]] == ["team"]
    assert [each["pool"] for each in document("types")["omitted"]] == ["team"]
    for command in (["status"], ["pool", "status"]):
        local, team = document(*command)["pools"]
        assert (local["state"], local["details"]) == ("not running", None)
        assert (team["state"], team["details"]) == ("unreachable", None)


def test_the_status_of_a_pool():
    devices = (
        Device(uuid="GPU-1", type="a10", memory_bytes=24_000_000_000, used_bytes=1, utilization_pct=50.0),
        Device(uuid="GPU-2", type="a10", index=1, outside_use="python (pid 7)"),
    )
    status = pool_status(
        summary(uuids=("GPU-1",)),
        cpu_slots_free=3,
        inventory=Inventory(host="box", devices=devices, cpu_slots=4, problem="\x1b[1mno driver"),
        budget=BudgetState(limit=50.0, days=30.0, spent=12.4, currency="USD"),
    )
    (pool,) = status_document([PoolStatusReply("local", None, status)], NOW).pools
    details = pool.details
    assert details is not None
    assert (pool.state, details.host, details.cpu_slots, details.cpu_slots_free) == ("up", "box", 4, 3)
    assert details.problems == ("no driver",)
    held, outside = details.devices
    assert (held.free, held.run, held.memory_bytes, held.utilization_pct) == (False, RUN, 24_000_000_000, 50.0)
    assert (outside.free, outside.run, outside.outside_use) == (False, None, "python (pid 7)")
    assert (outside.memory_bytes, outside.used_bytes) == (None, None)
    assert details.budget is not None
    assert (details.budget.limit.amount, details.budget.period_s) == (50.0, 30 * 86400.0)
    assert [run.id for run in details.runs] == [RUN]


# ------------------------------------------------------------ environments, the doctor


def test_environments(kept: KeptRuns, document: Callable[..., Any], tmp_path: Path):
    found = document("env", "list")
    assert {base["name"] for base in found["base"]} >= {"4", "ai-4"}
    assert (found["saved"], found["built"]) == ([], [])
    assert found["directory"] == str(load_settings().environments_path)
    assert found["budget_bytes"] == 50_000_000_000


def test_the_doctor(document: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    found = [ok("python", "3.11"), warning("disk", "little \x1b[1mroom", "Free space."), problem("gpu", "no driver")]
    monkeypatch.setattr("sgpu_magic.cli.doctor.findings", lambda _: iter(found))
    assert document("doctor", code=1) == {
        "schema": 1,
        "findings": [
            {"level": "ok", "name": "python", "text": "3.11", "remedy": None},
            {"level": "warning", "name": "disk", "text": "little room", "remedy": "Free space."},
            {"level": "problem", "name": "gpu", "text": "no driver", "remedy": None},
        ],
        "problems": 1,
        "warnings": 1,
    }
    found.pop()
    assert document("doctor")["problems"] == 0


def test_usage_has_the_period_and_amounts_with_their_currency(kept: KeptRuns, document: Callable[..., Any]):
    found = document("usage", "--since", "1h")
    since, until = (datetime.fromisoformat(found[name]) for name in ("since", "until"))
    assert (until - since).total_seconds() == pytest.approx(3600.0)
    assert abs(until.timestamp() - time.time()) < 60
    assert (found["by"], found["groups"], found["total"]["runs"]) == ("day", [], 0)
