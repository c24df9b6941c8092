"""`--upload`: folders of the notebook's machine that ranks find on theirs, sent once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from homes import Home
from kernels import Kernel, eventually
from many_agents import ManyAgents
from pool_client import FollowedRun, PoolClient
from served_pools import RemoteUser, ServedPool

from sgpu_magic.client import blob_sender
from sgpu_magic.client.run import Attachments
from sgpu_magic.client.upload_files import IgnoreRules, KnownDigests, find_files
from sgpu_magic.errors import UsageError
from sgpu_magic.files.locks import take_lock
from sgpu_magic.wire.attachments import Manifest, Upload, UploadedFile, manifest_bytes
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.rank_events import OutputWritten

LISTED = """
import os, pathlib, json
from sgpu_magic import runtime
root = runtime.upload_path("data")
found = {str(p.relative_to(root)): (p.stat().st_size, os.access(p, os.X_OK)) for p in root.rglob("*") if p.is_file()}
print(json.dumps([str(root), sorted(found.items())]))
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of 1.5 MB with something of everything."""
    folder = tmp_path / "data"
    (folder / "train/deep").mkdir(parents=True)
    (folder / "empty").mkdir()
    for number in range(20):
        (folder / f"train/shard-{number:02}.bin").write_bytes(os.urandom(70_000))
    (folder / "train/deep/run.sh").write_text("#!/bin/sh\necho it runs\n")
    (folder / "train/deep/run.sh").chmod(0o755)
    (folder / "again.bin").symlink_to("train/shard-00.bin")
    (folder / "notes.log").write_text("not for them")
    (folder / "cache").mkdir()
    (folder / "cache/x").write_text("nor this")
    (folder / ".sgpuignore").write_text("*.log\n# a comment\n/cache/\n")
    return folder


def upload(folder: Path, name: str = "data") -> Upload:
    return Upload(name=name, path=str(folder), below=name)


def sent_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts what goes over the link from now on."""
    counted = [0]
    plain = blob_sender.PutBlob

    def counting(**fields: object) -> blob_sender.PutBlob:
        counted[0] += min(blob_sender.CHUNK_BYTES, int(str(fields["size"])) - int(str(fields["offset"])))
        return plain(**fields)  # type: ignore[arg-type]

    monkeypatch.setattr(blob_sender, "PutBlob", counting)
    return counted


# ------------------------------------------------------------ what goes along


def test_what_is_excluded():
    rules = IgnoreRules(["*.tmp", "/top", "deep/*.bin", "**/old/**", "logs/", "!keep.tmp", "a[0-9]?", "# no", ""])
    names = ["a.tmp", "x/a.tmp", "top", "x/top", "deep/a.bin", "x/deep/a.bin", "x/old/y/z", "keep.tmp", "a1b", "a1"]
    assert [name for name in names if rules.excludes(name, folder=False)] == [
        "a.tmp", "x/a.tmp", "top", "deep/a.bin", "x/old/y/z", "a1b",
    ]  # fmt: skip
    assert rules.excludes("x/logs", folder=True)
    assert not rules.excludes("x/logs", folder=False)
    assert IgnoreRules().excludes("x/.git", folder=True)
    assert not IgnoreRules(["!.git/"]).excludes(".git", folder=True)


def test_the_files_of_a_folder(data: Path):
    found = find_files(data)
    names = [file.name for file in found.files]
    assert names == sorted(["again.bin", "train/deep/run.sh", *(f"train/shard-{n:02}.bin" for n in range(20))])
    assert found.folders == ("empty",)
    assert find_files(data / "notes.log").single


def test_links_that_lead_out_are_refused(data: Path, tmp_path: Path):
    (tmp_path / "secret").write_text("mine")
    (data / "train/out").symlink_to("../../secret")
    with pytest.raises(UsageError, match=r"train/out points outside it, to .*/secret"):
        find_files(data)
    (data / "train/out").unlink()
    (data / "train/loop").symlink_to("..")
    with pytest.raises(UsageError, match="leads to a folder that contains it"):
        find_files(data)
    (data / ".sgpuignore").write_text("loop\n")
    find_files(data)
    os.mkfifo(data / "pipe")
    with pytest.raises(UsageError, match="is neither a file nor a folder"):
        find_files(data)


def test_what_has_not_changed_is_not_read_again(data: Path, tmp_path: Path):
    path = data / "train/shard-00.bin"
    long_ago = path.stat().st_mtime - 3600
    # a digest is kept only if the file's times are old enough to reveal a change
    before = path.stat()
    known = KnownDigests(tmp_path / "state", data)
    known.keep({str(path): (before, ("a",))})
    assert KnownDigests(tmp_path / "state", data).digests_of(str(path), before) is None
    os.utime(path, (long_ago, long_ago))
    eventually(lambda: _kept(tmp_path / "state", data, path), 20)
    status = path.stat()
    assert KnownDigests(tmp_path / "state", data).digests_of(str(path), status) == ("a",)
    assert KnownDigests(tmp_path / "state", tmp_path).digests_of(str(path), status) is None
    # different content of the same size and mtime: the inode's change time reveals it
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    os.utime(path, (long_ago, long_ago))
    assert KnownDigests(tmp_path / "state", data).digests_of(str(path), path.stat()) is None


def _kept(state: Path, root: Path, path: Path) -> bool:
    KnownDigests(state, root).keep({str(path): (path.stat(), ("a",))})
    return KnownDigests(state, root).digests_of(str(path), path.stat()) is not None


# ------------------------------------------------------------ on this machine


def test_here_it_is_the_folder_itself(kernel: Kernel, home: Home):
    folder = home.work / "data"
    folder.mkdir()
    (folder / "x").write_text("as it is")
    body = (
        "from sgpu_magic import runtime\nprint(runtime.upload_path('data'), (runtime.upload_path() / 'x').read_text())"
    )
    reply = kernel.check(f"%%distributed -n 2 --upload data/\n{body}")
    assert reply.lines(1) == [f"{folder} as it is"]
    assert "there is no such folder" in kernel.run(f"%%distributed --upload dato\n{body}").evalue
    assert (
        "matches none of this run's uploads"
        in kernel.run(f"%%distributed -n 1 --upload data\n{body.replace('data', 'dato')}").text
    )
    # in the notebook itself too, and in a session from the cell on that has brought it
    assert kernel.value("str(__import__('sgpu_magic.runtime').runtime.upload_path('data'))") == str(folder)
    kernel.check("%sgpu_connect -n 2 --type cpu --ui none")
    assert "this run has no uploads" in kernel.run(f"%%distributed\n{body}").text
    assert kernel.check(f"%%distributed --upload data\n{body}").lines(1) == [f"{folder} as it is"]
    assert kernel.check(f"%%distributed\n{body}").lines(0) == [f"{folder} as it is"]
    kernel.check("%sgpu_disconnect")
    kernel.check(
        "import sgpu_magic\n@sgpu_magic.distributed(gpus=2, gpu_type='cpu', upload='data')\n"
        "def f():\n    from sgpu_magic import runtime\n    return str(runtime.upload_path('data'))"
    )
    assert kernel.value("f.distributed()") == [str(folder)] * 2
    assert "data/" in kernel.complete("%%distributed --upload da")


# ------------------------------------------------------------ on other machines


def listed(run: FollowedRun, rank: int = 0) -> tuple[Path, dict[str, tuple[int, bool]]]:
    """What a run with `LISTED` has found."""
    import json

    assert run.ended().state is RunState.SUCCEEDED
    root, found = json.loads(run.printed[rank])
    return Path(root), {name: (size, runs) for name, (size, runs) in found}


def test_it_is_sent_once(served: ServedPool, ann: RemoteUser, data: Path, monkeypatch: pytest.MonkeyPatch):
    sent = sent_bytes(monkeypatch)
    run = ann.client.begin(LISTED, along=Attachments(uploads=(upload(data),)))
    root, found = listed(run)
    assert root.is_relative_to(served.home.path)
    assert found == {file.name: (file.status.st_size, file.name.endswith(".sh")) for file in find_files(data).files}
    assert (root / "empty").is_dir()
    assert (root / "again.bin").read_bytes() == (data / "train/shard-00.bin").read_bytes()
    assert run.run.spec.shipped.notes == ("uploaded data: 22 files, 1.5 MB, of which the pool lacked 1.4 MB",)
    assert listed(run, 1)[0] == root
    assert 1_400_000 < sent[0] < 1_410_000
    # unchanged: nothing is sent, and the same copy is used
    sent[0] = 0
    assert listed(ann.client.begin(LISTED, along=Attachments(uploads=(upload(data),))))[0] == root
    assert sent[0] == 0
    # one file has changed: only that file and the manifest are sent
    (data / "train/shard-03.bin").write_bytes(os.urandom(70_000))
    other, _ = listed(ann.client.begin(LISTED, along=Attachments(uploads=(upload(data),))))
    assert other != root
    assert (other / "train/shard-03.bin").read_bytes() == (data / "train/shard-03.bin").read_bytes()
    assert 70_000 < sent[0] < 75_000


def test_it_is_for_reading_and_where_the_notebook_had_it(served: ServedPool, ann: RemoteUser, data: Path):
    body = """
    from sgpu_magic import runtime
    import os, subprocess
    root = runtime.upload_path("data")
    assert os.path.samefile("data", root), os.getcwd()
    print(oct(root.stat().st_mode), oct((root / "again.bin").stat().st_mode))
    print(subprocess.check_output("data/train/deep/run.sh", text=True))
    """
    import textwrap

    run = ann.client.begin(textwrap.dedent(body), ranks=1, along=Attachments(uploads=(upload(data),), is_remote=True))
    assert run.ended().state is RunState.SUCCEEDED, run.printed
    assert run.printed[0].split() == ["0o40500", "0o100400", "it", "runs"]


# how a run can change its upload: root ignores file modes, and another user can change them
SLOW = pytest.mark.slow
WRITES = {
    "same size and time": "f.write_bytes(bytes(f.stat().st_size)); os.utime(f, ns=(was.st_atime_ns, was.st_mtime_ns))",
    "another file": "(root / 'train/new.bin').write_bytes(b'new')",
    "replaced": "f.unlink(); f.write_bytes(bytes(was.st_size)); os.utime(f, ns=(was.st_atime_ns, was.st_mtime_ns))",
    "removed": "f.unlink()",
}
WRITING = """
import os, pathlib, time
from sgpu_magic import runtime
root = runtime.upload_path("data")
f = root / "train/shard-05.bin"
was = f.stat()
for each in (f, root, f.parent):
    each.chmod(0o700)
{write}
for each in (root, f.parent):
    each.chmod(0o500)
print(root, flush=True)
while {wait} and not pathlib.Path({go!r}).exists():
    time.sleep(0.05)
"""


def is_in_use(copy: Path) -> bool:
    held = take_lock(copy, wait=False)
    if held is not None:
        held.close()
    return held is None


@pytest.mark.parametrize("in_use", [False, pytest.param(True, marks=SLOW)], ids=["ended", "in-use"])
@pytest.mark.parametrize(
    "write", [pytest.param(name, marks=() if name == "same size and time" else SLOW) for name in WRITES]
)
def test_what_a_run_writes_there_is_not_in_later_runs(
    ann: RemoteUser, data: Path, tmp_path: Path, write: str, in_use: bool
):
    along = Attachments(uploads=(upload(data),))
    go = tmp_path / "go"
    writer = ann.client.begin(WRITING.format(write=WRITES[write], wait=in_use, go=str(go)), ranks=1, along=along)
    writer.wait_for(OutputWritten)
    if not in_use:
        assert writer.ended().state is RunState.SUCCEEDED
        copy = Path(writer.printed[0]).parent
        eventually(lambda: not is_in_use(copy), 20, "its copy is in use")
    root, found = listed(ann.client.begin(LISTED, ranks=1, along=along))
    assert found == {file.name: (file.status.st_size, file.name.endswith(".sh")) for file in find_files(data).files}
    assert (root / "train/shard-05.bin").read_bytes() == (data / "train/shard-05.bin").read_bytes()
    # and this copy is kept
    assert listed(ann.client.begin(LISTED, ranks=1, along=along))[0] == root
    go.touch()
    assert writer.ended().state is RunState.SUCCEEDED


def test_one_file(ann: RemoteUser, data: Path):
    body = "from sgpu_magic import runtime\nprint(runtime.upload_path('words.txt').read_text())"
    (data / "words.txt").write_text("a few words")
    run = ann.client.begin(body, along=Attachments(uploads=(upload(data / "words.txt", "words.txt"),)))
    assert run.ended().state is RunState.SUCCEEDED
    assert run.printed == {0: "a few words\n", 1: "a few words\n"}


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", "a/../../escaped", "a//b", "", "."])
def test_no_name_leads_out(served: ServedPool, ann: RemoteUser, name: str):
    """What a client says that it consists of is not believed."""
    link = ann.client.pool.link()
    sender = blob_sender.BlobSender(link)
    text = b"evil"
    (blob,) = sender.send([blob_sender.BlobContent(len(text), lambda: memoryview(text))])
    manifest = manifest_bytes(Manifest(files=(UploadedFile(name, len(text), (blob,)),)))
    (digest,) = sender.send([blob_sender.BlobContent(len(manifest), lambda: memoryview(manifest))])
    made = Upload(name="data", manifest=digest, manifest_size=len(manifest))
    with pytest.MonkeyPatch.context() as patch:
        from sgpu_magic.client import upload_files

        patch.setattr(upload_files, "_send", lambda *_: (made, "uploaded data"))
        run = ann.client.begin("print('ran')", ranks=1, along=Attachments(uploads=(made,)))
        ended = run.ended()
    assert ended.state is RunState.FAILED
    assert ended.failure is not None
    assert "is not the name of a file" in ended.failure.message
    assert not list(served.home.path.rglob("escaped*"))
    assert not Path("/tmp/escaped").exists()


@pytest.mark.slow
def test_far_nodes_get_it_once_each(data: Path):
    home = Home({"SGPU_SIMULATE": "a10:2"})
    nodes = ManyAgents(home, 2, far=True)
    client = PoolClient(home)
    try:
        along = Attachments(uploads=(upload(data),), is_remote=True)
        run = client.begin(LISTED, ranks=4, nodes=2, along=along)
        roots = {listed(run, rank)[0] for rank in range(4)}
        assert len(roots) == 2
        assert {str(root.relative_to(home.state / "nodes")).split("/")[0] for root in roots} == {"node-0", "node-1"}
        assert len(listed(run)[1]) == 22
    finally:
        client.close()
        nodes.close()
        home.close()
