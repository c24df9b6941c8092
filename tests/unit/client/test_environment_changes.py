"""What differs between the environments of two recorded runs, and which run a notebook's last one is compared with."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from launches import placed_launch
from msgspec.structs import replace

from sgpu_magic.client.run_environment import Change, Circumstances, changes_between, read_circumstances
from sgpu_magic.payload.pack import pack_namespace
from sgpu_magic.pool.run_log import RunLog
from sgpu_magic.wire import events as ev
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.files import REQUIREMENTS
from sgpu_magic.wire.run import RUN_RECORD, RunRecord

BEFORE = Circumstances(
    host="node1",
    python="3.11.7",
    version="0.1.0",
    digest="aa",
    packages={"numpy": "2.1.0", "pandas": "2.2.0", "torch": "2.7.1"},
    commit="1234567890abcdef",
    dirty=False,
    cwd="/work",
)
PINS = "# Python 3.11.7 on Linux, digest abc1\nnumpy==2.1.0\nTorch==2.7.1\n"


def test_equal_environments_have_no_changes():
    assert changes_between(BEFORE, BEFORE) == []


def test_each_change_has_both_values_and_packages_come_last():
    packages = {"numpy": "2.2.0", "peft": "0.17", "torch": "2.7.1"}
    after = replace(BEFORE, host="node2", python="3.12.1", digest="bb", packages=packages, dirty=True)
    assert changes_between(BEFORE, after) == [
        Change("machine", "node1", "node2"),
        Change("Python", "3.11.7", "3.12.1"),
        Change("git commit", "1234567890", "1234567890 with uncommitted changes"),
        Change("numpy", "2.1.0", "2.2.0"),
        Change("pandas", "2.2.0", ""),
        Change("peft", "", "0.17"),
    ]


def test_what_is_unknown_of_either_run_is_no_change():
    unknown = Circumstances(host="node1")
    assert changes_between(BEFORE, unknown) == []
    assert changes_between(unknown, BEFORE) == []


def test_the_records_of_a_run_give_its_circumstances_and_those_of_its_session_the_packages(tmp_path: Path):
    session, cell = tmp_path / "session1", tmp_path / "r1"
    for folder in (session, cell):
        folder.mkdir()
    (session / REQUIREMENTS).write_text(PINS)
    launch = placed_launch(tmp_path, is_remote=False)
    spec = replace(launch.spec, session="session1", environment="")
    log = RunLog(cell, spec.run_id)
    for body in (ev.Submitted(spec=spec), ev.Described(tags=(("mlflow.source.git.commit", "c" * 40),))):
        log.append(body, time.time())
    log.close()
    assert read_circumstances(cell) is None
    packed = pack_namespace({}, {}, b"k" * 32)
    record = RunRecord(
        spec=spec,
        executable="python",
        cwd="/nb",
        lease=launch.lease,
        payload_layout=packed.layout,
        payload_kept=False,
        payload_note="",
        state=RunState.SUCCEEDED,
        host="node1",
        version="0.1.0",
    )
    (cell / RUN_RECORD).write_bytes(msgspec.json.encode(record))
    found = read_circumstances(cell)
    assert found is not None
    assert (found.host, found.python, found.digest, found.commit) == ("node1", "3.11.7", "abc1", "c" * 40)
    assert found.packages == {"numpy": "2.1.0", "torch": "2.7.1"}
