"""Bytes between a notebook, a pool on another machine and its nodes: sent once, whole, and only to whom they belong."""

from __future__ import annotations

import contextlib
import os
import re
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from kernels import Kernel
from lazy_modules import torch
from live_log import lines_of
from pool_client import FollowedRun, PoolClient, set_environ
from served_pools import RemoteUser, ServedPool
from tcp_proxy import Proxy
from waiting import eventually

from sgpu_magic.client import blob_sender, network_transport
from sgpu_magic.client.blob_sender import BlobContent, BlobSender
from sgpu_magic.client.connector import REPLY_TIMEOUT_S
from sgpu_magic.client.link import PoolLink
from sgpu_magic.client.remote_transport import RemoteTransport
from sgpu_magic.client.run_files import recorded_directory
from sgpu_magic.client.send_queue import FilePart, Reply
from sgpu_magic.errors import RunFileUnknown, RunUnknown, UsageError
from sgpu_magic.files.atomic_file import write_whole
from sgpu_magic.files.content_store import blob_digest
from sgpu_magic.runs.replay.recorded import read_recorded
from sgpu_magic.views.live.log_reader import LogReader
from sgpu_magic.wire.attachments import StoredPayload
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.events import RanksStarted
from sgpu_magic.wire.files import BULK_CHUNK_BYTES, AskBlobs, BlobsHeld, ListRunFiles, PutBlob, ReadRunFile, RunFiles
from sgpu_magic.wire.rank_events import OutputWritten
from sgpu_magic.wire.run import RUN_RECORD, UNDER_WAY

MB = 1 << 20
PRINT = "import time, pathlib\nfor n in range(400): print('line', n, 'of rank', rank)"


@pytest.fixture(scope="module")
def served() -> Iterator[ServedPool]:
    made = ServedPool()
    yield made
    made.check_leaks()
    made.close()


@pytest.fixture(scope="module")
def ben(served: ServedPool) -> RemoteUser:
    return served.user("ben")


@pytest.fixture(scope="module")
def lone() -> Iterator[ServedPool]:
    """A pool without a second port: all bytes go over the one that can be counted and cut."""
    made = ServedPool({"SGPU_BULK_PORT": "-1"})
    yield made
    made.check_leaks()
    made.close()


@pytest.fixture
def line(lone: ServedPool) -> Iterator[Proxy]:
    made = Proxy(lone.port, keeps=False)
    yield made
    made.close()


@pytest.fixture
def carl(lone: ServedPool, line: Proxy) -> Iterator[PoolClient]:
    """A user who reaches the pool through the line, and has uploaded nothing before."""
    client = lone.user(f"carl{line.port}", address=line.address).new_client()
    yield client
    client.close()


def data(seed: int, megabytes: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.random.default_rng(seed).random(megabytes * MB // 8)


def sent_in_background(
    client: PoolClient, array: np.ndarray[Any, np.dtype[np.float64]]
) -> tuple[threading.Thread, list[FollowedRun]]:
    """Submit a run that sums the array; the list has the run when the thread has ended."""
    runs: list[FollowedRun] = []
    sending = threading.Thread(
        target=lambda: runs.append(client.begin("float(array.sum())", ranks=1, names={"array": array}))
    )
    sending.start()
    return sending, runs


def blobs_of(run: FollowedRun) -> StoredPayload:
    """Where the payload of a run lies, as the client told the pool."""
    submission = run.run.submission
    assert submission is not None
    source = submission[0].payload.source
    assert isinstance(source, StoredPayload)
    return source


def ask(link: PoolLink, message: type[msgspec.Struct], **fields: object) -> Reply:
    request, reply = link.new_request()
    link.send(message(request=request, **fields))  # type: ignore[arg-type]
    return reply.result(REPLY_TIMEOUT_S)


def put(link: PoolLink, digest: str, whole: bytes) -> Reply:
    request, reply = link.new_request()
    link.send(PutBlob(request=request, digest=digest, size=len(whole), offset=0), [whole])
    return reply.result(REPLY_TIMEOUT_S)


# ---------------------------------------------------------------- there and back


def test_large_things_travel_both_ways(ann: RemoteUser):
    names: dict[str, object] = {
        "array": data(1, 9),
        "tensor": torch.arange(2 * MB, dtype=torch.float32),
        "small": [np.arange(100) + number for number in range(50)],
        "text": "words",
    }
    body = "array2, tensor2, small2, text2 = array * 2, tensor + rank, [s.sum() for s in small], text * 2"
    run = ann.client.begin(body, names=names, out=["array2", "tensor2:all", "small2", "text2"])
    assert run.ended().state is RunState.SUCCEEDED, run.ended()
    first, second = run.names()
    np.testing.assert_array_equal(first["array2"], data(1, 9) * 2)
    assert first["small2"] == [4950 + 100 * number for number in range(50)]
    assert first["text2"] == "wordswords"
    for rank, values in enumerate((first, second)):
        assert torch.equal(values["tensor2"], torch.arange(2 * MB, dtype=torch.float32) + rank)  # type: ignore[arg-type]
    first["array2"][0] = 7.0  # type: ignore[index]
    assert first["array2"][0] == 7.0, "what came back may be changed"  # type: ignore[index]


def test_a_large_variable_goes_over_the_second_port(ann: RemoteUser, served: ServedPool):
    line = Proxy(served.port, keeps=False)
    client = ann.new_client(line.address)
    try:
        # opens the second connection, which does not pass through the proxy
        client.begin("1", ranks=1, names={"first": data(11, 2)}).ended()
        wire = client.pool.link().transport
        assert isinstance(wire, RemoteTransport)
        eventually(lambda: wire.chunk_bytes == BULK_CHUNK_BYTES, 20, lambda: wire.slow_why)
        link_bytes, bulk_bytes = line.sent_bytes, wire._bulk.sent_bytes
        array = data(12, 32)
        run = client.begin("array2 = array * 2", ranks=1, names={"array": array}, out=["array2"])
        np.testing.assert_array_equal(run.names()[0]["array2"], array * 2)  # type: ignore[arg-type]
        assert line.sent_bytes - link_bytes < MB
        assert wire._bulk.sent_bytes - bulk_bytes > 32 * MB
        assert wire.slow_why == ""
    finally:
        client.close()
        line.close()


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [64, pytest.param(1024, marks=pytest.mark.slow)])
def test_what_has_not_changed_is_not_sent_again(carl: PoolClient, line: Proxy, megabytes: int):
    array = data(megabytes, megabytes)
    sent: list[int] = []
    for changing in (1, 2):
        before = line.sent_bytes
        names = {"array": array, "other": np.full(MB // 2, changing), "number": changing}
        assert carl.begin("float(array.sum())", ranks=1, names=names).values == [float(array.sum())]
        sent.append(line.sent_bytes - before)
    assert sent[0] > megabytes * MB
    # the other array, which has changed, has 4 MB
    assert sent[1] < 5 * MB
    before = line.sent_bytes
    assert carl.begin("number", ranks=1, names={"array": array, "number": 3}).values == [3]
    assert line.sent_bytes - before < MB // 4


@pytest.mark.slow
def test_an_upload_goes_on_where_the_line_broke(carl: PoolClient, line: Proxy):
    array = data(7, 96)
    # the connection is open, so the bytes from now on are the upload
    assert carl.begin("1", ranks=1).values == [1]
    before = line.sent_bytes
    sending, runs = sent_in_background(carl, array)
    eventually(lambda: line.sent_bytes - before > 40 * MB, 20, "the upload does not get on", poll_s=0.002)
    line.cut()
    at_cut = line.sent_bytes - before
    assert at_cut < 90 * MB, "the upload was over before the line was cut"
    line.mend()
    sending.join(60)
    assert runs[0].values == [float(array.sum())]
    assert line.connections == 2
    # only the bytes in flight when it broke are sent twice
    assert line.sent_bytes - before < 96 * MB + 20 * MB


@pytest.mark.slow
def test_a_long_upload_says_how_far_it_is(lone: ServedPool, line: Proxy):
    kernel = Kernel(lone.user("dora", address=line.address).home)
    try:
        kernel.check("import numpy as np\nx = np.random.default_rng(5).random(4_000_000)")
        kernel.check("%%distributed --gpus 1 --pool team\nprint('known')")
        line.slow(12 * MB)
        cell = kernel.start("%%distributed --gpus 1 --pool team\nprint(len(x))")
        far = re.compile(r"sgpu: sending variables to team: [\d.]+ MB of 32\.0 MB sent$", re.MULTILINE)
        cell.until(lambda: far.search(cell.reply.text), what="how far it is")
        reply = cell.wait()
        assert reply.lines(0) == ["4000000"], reply.story
        assert "sending" not in reply.text
    finally:
        kernel.close()


@pytest.mark.slow
def test_an_upload_says_that_the_line_is_silent(lone: ServedPool, line: Proxy, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blob_sender, "_ANSWER_TIMEOUT_S", 0.3)
    monkeypatch.setattr(network_transport, "_SILENT_S", 0.5)
    user = lone.user("emil", address=line.address)
    client = user.new_client()
    array = data(8, 64)
    assert client.begin("1", ranks=1).values == [1]
    before = line.sent_bytes
    sending, runs = sent_in_background(client, array)
    eventually(lambda: line.sent_bytes - before > 20 * MB, 20, "the upload does not get on", poll_s=0.002)
    line.hold()
    eventually(
        lambda: any("the link has been silent for" in messages for messages in user.sendings), 20, user.sendings.__str__
    )
    line.mend()
    sending.join(60)
    assert runs[0].values == [float(array.sum())]
    assert user.sendings[-1] == ""
    client.close()


def test_a_notebook_on_a_pool_of_another_machine(ann: RemoteUser):
    (ann.home.work / "mine.py").write_text("def double(x):\n    return x * 2\n")
    kernel = Kernel(ann.home)
    try:
        kernel.check("import numpy as np, mine\nx = np.arange(500_000.0)\ndef twice(a): return mine.double(a)")
        shown = kernel.check("%%distributed --gpus 2 --pool team --out y:all\ny = twice(x) + rank\nprint('on', rank)")
        assert sorted(shown.lines(0) + shown.lines(1)) == ["on 0", "on 1"]
        kernel.check("result = _")
        assert kernel.value("[bool((v == x * 2 + rank).all()) for rank, v in enumerate(y)]") == [True, True]
        assert kernel.value("[result.logs(rank).read_text() for rank in range(2)]") == ["on 0\n", "on 1\n"]
        # a file that exists only on the pool's machine is not shown as a local path
        assert "sgpu logs" not in shown.html or "/remote/" not in shown.html
        kernel.check("%sgpu_connect --gpus 2 --pool team")
        kernel.check("%sgpu_push x\n")
        kernel.check("%%distributed\nz = mine.double(x) + 1")
        kernel.check("%sgpu_pull z")
        assert kernel.value("bool((z == x * 2 + 1).all())")
        kernel.check("%sgpu_disconnect")
        kernel.check("%%distributed --gpus 2 --pool team --detach --out w\nw = x * 3\nprint('late')")
        assert "late" in kernel.check("%sgpu_attach").text
        assert kernel.value("bool((w == x * 3).all())")
    finally:
        kernel.close()


# ---------------------------------------------------------------- whose they are


def test_bytes_of_another_digest_are_refused(ann: RemoteUser, served: ServedPool):
    link = ann.client.pool.link()
    messages = blob_digest(memoryview(b"right"))
    with pytest.raises(UsageError, match="does not have the digest that was announced"):
        put(link, messages, b"wrong")
    assert held(ann, ((messages, 5),)) == (0,)
    assert not list((served.home.state / "blobs").rglob(f"*{messages[2:]}"))
    with pytest.raises(UsageError, match="a chunk of an upload has the wrong size"):
        put(link, messages, b"x" * (BULK_CHUNK_BYTES + 1))


def test_nobody_learns_of_anothers_bytes(ann: RemoteUser, ben: RemoteUser):
    whole = os.urandom(1000)
    (digest,) = BlobSender(ann.client.pool.link()).send([BlobContent(len(whole), lambda: memoryview(whole))])
    question = ((digest, len(whole)),)
    assert held(ann, question) == (1000,)
    assert held(ben, question) == (0,)


def test_a_run_gets_no_blob_of_another_user(ann: RemoteUser, ben: RemoteUser):
    array = data(3, 2)
    first = ann.client.begin("float(array.sum())", ranks=1, names={"array": array})
    source = blobs_of(first)
    assert first.values == [float(array.sum())]
    link = ben.client.pool.link()
    again = ben.client.begin("1", ranks=1)
    submission = again.run.submission
    assert submission is not None
    stolen = msgspec.structs.replace(
        submission[0],
        spec=msgspec.structs.replace(submission[0].spec, run_id="0badcafe"),
        payload=msgspec.structs.replace(submission[0].payload, source=source),
    )
    again.ended()
    events = link.follow("0badcafe")
    request, reply = link.new_request()
    link.send(msgspec.structs.replace(stolen, request=request))
    reply.result(REPLY_TIMEOUT_S)
    last = None
    while last is None or not hasattr(last.body, "failure"):
        item = events.get(timeout=20)
        assert item is not None
        last = item[0]
    assert last.body.state is RunState.FAILED
    assert "no longer in the pool's store" in last.body.failure.message


@pytest.mark.slow
def test_only_ones_own_runs_files_are_read(ann: RemoteUser, ben: RemoteUser):
    run = ann.client.begin("print('mine')", ranks=1)
    run.ended()
    link = ben.client.pool.link()
    for run_id in (run.run_id, "0badf00d", "../../etc", ""):
        for message, fields in ((ReadRunFile, {"name": "rank-0.log"}), (ListRunFiles, {})):
            with pytest.raises(RunUnknown, match="has no run"):
                ask(link, message, run=run_id, **fields)
    part = ask(ann.client.pool.link(), ReadRunFile, run=run.run_id, name="rank-0.log")
    assert isinstance(part, FilePart)
    assert part.data == b"mine\n"


def test_what_no_file_has_costs_nobody_the_answers(ann: RemoteUser, served: ServedPool):
    run = ann.client.begin("print('mine')", ranks=1)
    run.ended()
    link = ann.client.pool.link()
    with pytest.raises(UsageError, match="outside the file"):
        ask(link, ReadRunFile, run=run.run_id, name="rank-0.log", offset=1 << 63)
    with open(served.home.state / "runs" / run.run_id / "events.msgpack", "ab") as events:
        events.write(struct.pack("<IQ", 1, 1) + b"\x01")
    with pytest.raises(RunFileUnknown):
        ask(link, ReadRunFile, run=run.run_id, name="result-7.bin")
    part = ask(link, ReadRunFile, run=run.run_id, name="rank-0.log")
    assert isinstance(part, FilePart)
    assert part.data == b"mine\n"


def test_no_name_leads_out_of_a_runs_directory(ann: RemoteUser, served: ServedPool):
    run = ann.client.begin("print(1)", ranks=1)
    run.ended()
    directory = served.home.state / "runs" / run.run_id
    (directory / "link").symlink_to("/etc/passwd")
    (directory / "folder").symlink_to("/etc")
    (directory / "inside").mkdir()
    (directory / "inside" / "file").write_text("fine")
    link = ann.client.pool.link()
    names = ["../../ledger.sqlite3", "/etc/passwd", "link", "folder/passwd", "inside/../key", ".", "", "inside", "a\0b"]
    for name in names:
        with pytest.raises(RunFileUnknown):
            ask(link, ReadRunFile, run=run.run_id, name=name)
    for under in ("..", "/etc", "folder", "inside/.."):
        with pytest.raises(RunFileUnknown):
            ask(link, ListRunFiles, run=run.run_id, under=under)
    listed = ask(link, ListRunFiles, run=run.run_id)
    assert isinstance(listed, RunFiles)
    assert {file.name for file in listed.files} >= {"inside/file", "run.json", "rank-0.log"}
    assert not [file.name for file in listed.files if file.name.startswith(("link", "folder"))]
    part = ask(link, ReadRunFile, run=run.run_id, name="inside/file", offset=2, size=100)
    assert isinstance(part, FilePart)
    assert part.data == b"ne"


@contextlib.contextmanager
def environ_of(user: RemoteUser) -> Iterator[None]:
    """This process has the variables of a kernel of theirs."""
    before = dict(os.environ)
    set_environ(user.home.environ)
    try:
        yield
    finally:
        set_environ(before)


def held(user: RemoteUser, question: Sequence[tuple[str, int]]) -> tuple[int, ...]:
    answer = ask(user.client.pool.link(), AskBlobs, blobs=tuple(question))
    assert isinstance(answer, BlobsHeld)
    return answer.bytes


# ---------------------------------------------------------------- what a run leaves


@pytest.mark.slow
def test_logs_are_read_while_they_grow_and_afterwards(ann: RemoteUser, tmp_path: Path):
    go = tmp_path / "go"
    body = f"{PRINT}\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\nprint('the end')"
    run = ann.client.begin(body)
    mirror = run.run.mirror
    assert mirror is not None
    run.wait_for(OutputWritten)
    reader = LogReader(run.run.directory, mirror.follow)
    eventually(lambda: lines_of(reader, 1, 399, 1) == ["line 399 of rank 1"], 10, "the log does not come")
    eventually(lambda: reader.find(0, "line 39", 1000, 100)[1] == 11, 10, "rank 0's log does not come")
    go.touch()
    run.ended()
    eventually(lambda: lines_of(reader, 0, 400, 10) == ["the end"], 5, "the log's end does not come")
    here, there = ((run.run.directory / "rank-1.log").read_bytes(), (mirror.bring("rank-1.log")).read_bytes())
    assert here.startswith(there[:1000])
    assert there.count(b"\n") == 401
    assert (run.run.directory.stat().st_mode & 0o777, mirror.bring("key").stat().st_mode & 0o777) == (0o700, 0o600)


@pytest.mark.slow
def test_mirrors_do_not_pile_up(ann: RemoteUser):
    run = ann.client.begin("print('hello')", ranks=1)
    run.ended()
    mirror = run.run.mirror
    assert mirror is not None
    for number in range(250):
        old = mirror.directory.parent / f"{number:08x}"
        old.mkdir(parents=True)
        os.utime(old, (1_700_000_000 + number,) * 2)
    assert mirror.bring("rank-0.log").read_text() == "hello\n"
    left = sorted(each.name for each in mirror.directory.parent.iterdir())
    assert len(left) <= 200
    assert run.run_id in left
    assert "00000000" not in left
    for each in mirror.directory.parent.glob("000000*"):
        each.rmdir()


def test_sgpu_logs_of_another_users_run_says_whose_it_is_not(ann: RemoteUser, ben: RemoteUser):
    run = ann.client.begin("print('mine')", ranks=1)
    run.ended()
    for more in ((), ("--follow",)):
        messages = ben.sgpu("logs", run.run_id, *more)
        assert (messages.returncode != 0, messages.stdout) == (True, ""), messages
        assert f"this pool has no run '{run.run_id}' of yours" in messages.stderr


def test_sgpu_logs_shows_a_remote_run(ann: RemoteUser):
    run = ann.client.begin("for n in range(3): print(rank, n)", name="talks")
    followed = ann.sgpu("logs", run.run_id, "--follow")
    assert followed.returncode == 0, followed.stderr
    assert sorted(followed.stdout.splitlines()) == [f"[{rank}] {rank} {n}" for rank in range(2) for n in range(3)]
    assert "succeeded" in followed.stderr
    one = ann.sgpu("logs", run.run_id[:6], "--rank", "1")
    assert one.stdout.splitlines() == ["1 0", "1 1", "1 2"]
    unknown = ann.sgpu("logs", "0badf00d")
    assert unknown.returncode == 2
    assert "no run has an id that begins with '0badf00d' in the pool team" in unknown.stderr


def test_a_detached_runs_results_are_fetched_by_another_program(ann: RemoteUser):
    client = ann.new_client()
    run = client.begin("y = x * 3", names={"x": data(4, 3)}, out=["y:all"], detach=True)
    run.wait_for(RanksStarted)
    client.close()
    found, _ = ann.client.pool.attach(run.run_id)
    again = FollowedRun(ann.client, found)
    for values in again.names():
        np.testing.assert_array_equal(values["y"], data(4, 3) * 3)  # type: ignore[arg-type]


def test_a_remote_run_can_be_replayed_from_here(ann: RemoteUser):
    array = data(5, 3)
    run = ann.client.begin("float(array.sum())", ranks=1, names={"array": array})
    assert run.values == [float(array.sum())]
    with environ_of(ann), recorded_directory(ann.client.pool.settings, run.run_id) as directory:
        assert directory == run.run.directory
        recorded = read_recorded(directory)
    assert recorded.spec.cell.body == "float(array.sum())"
    np.testing.assert_array_equal(np.frombuffer(recorded.packed.buffers[0]), array)


@pytest.mark.slow
def test_a_record_that_is_older_than_its_payload_is_not_taken_for_the_last(served: ServedPool, ann: RemoteUser):
    run = ann.client.begin("1", ranks=1, names={"array": data(6, 3)})
    assert run.values == [1]
    record = served.home.state / "runs" / run.run_id / RUN_RECORD
    with environ_of(ann), recorded_directory(ann.client.pool.settings, run.run_id) as directory:
        last = read_recorded(directory).record
    # the record as it is for a moment after the payload is renamed into place
    before = msgspec.structs.replace(last, payload_kept=False, payload_note=UNDER_WAY)
    write_whole(record, msgspec.json.encode(before))
    later = threading.Timer(0.5, lambda: write_whole(record, msgspec.json.encode(last)))
    later.start()
    with environ_of(ann), recorded_directory(ann.client.pool.settings, run.run_id) as directory:
        assert read_recorded(directory).record == last
    later.join()


def test_a_session_keeps_what_was_sent_to_it(ann: RemoteUser):
    session = ann.client.connect(ranks=2)
    array = data(6, 3)
    session.do("kept = array + rank", names={"array": array})
    for rank, values in enumerate(session.do("back = kept", out=["back:all"]).names()):
        np.testing.assert_array_equal(values["back"], array + rank)  # type: ignore[arg-type]
    assert session.end().state is RunState.CANCELLED
