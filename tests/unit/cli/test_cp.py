"""`sgpu cp` on run directories: which files are copied, and the message when there are none."""

from __future__ import annotations

import functools
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from kept_runs import KeptRuns

from sgpu_magic.cli import main as cli
from sgpu_magic.cli.copying import Address, read_address
from sgpu_magic.client import run_files
from sgpu_magic.config import load_settings
from sgpu_magic.errors import UsageError
from sgpu_magic.files.run_directory import list_below
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.devices import NodeShare

RUN = "7f3a0001"
NODES = (NodeShare(node="a", host="ml-1", ranks=2), NodeShare(node="b", host="ml-2", ranks=1))


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptRuns]:
    """The runs in the command's state directory; the working directory is empty."""
    for name, value in {"STATE_DIR": "state", "RUNTIME_DIR": "run", "CONFIG": "own/config.toml"}.items():
        monkeypatch.setenv(f"SGPU_{name}", str(tmp_path / value))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    made = KeptRuns(load_settings())
    yield made
    made.close()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("7f3a:", Address("7f3a", "")),
        ("7F3A:.", Address("7F3A", "")),
        ("7f3a:checkpoints/", Address("7f3a", "checkpoints")),
        ("7f3a/12:a/./b//c", Address("7f3a", "a/b/c", 12)),
        ("7f3a:with:colon", Address("7f3a", "with:colon")),
    ],
)
def test_addresses(text: str, address: Address):
    assert read_address(text) == address


@pytest.mark.parametrize("text", ["checkpoints", "7f3a", "7f3a/x:a", "g:a", "7f3a/1234567:a", ":a"])
def test_what_is_no_address_is_told_with_an_example(text: str):
    with pytest.raises(
        UsageError, match=r"is not a path in a run: write RUN:PATH, as in 7f3a:checkpoints, or RUN/RANK"
    ):
        read_address(text)


@pytest.mark.parametrize("path", ["..", "/etc/passwd", "a/../../b", "a\0b", "x" * 5000])
def test_no_path_leaves_the_run(path: str):
    with pytest.raises(UsageError, match="is outside the run's directories"):
        read_address(f"7f3a:{path}")


def test_everything_is_listed_but_the_runs_key(kept: KeptRuns, capsys: pytest.CaptureFixture[str]):
    kept.add(RUN, files={"work/model.pt": bytes(2000), "rank-0.log": b"hello\n", "key": b"secret"})
    assert cli.main(["cp", "7f3a:"]) == 0
    reported = capsys.readouterr()
    assert reported.out.split() == ["6", "B", "rank-0.log", "2.0", "kB", "work/model.pt"]
    assert reported.err == ""
    assert os.listdir(".") == []


def test_ranks_of_other_nodes_have_their_own_folders(kept: KeptRuns, capsys: pytest.CaptureFixture[str]):
    kept.add(RUN, ranks=3, files={"work/a.txt": b"node a", "node-1/work/a.txt": b"node b"})
    kept.write_record(RUN, "/elsewhere", NODES, ranks=3)
    for rank, text in (("", "node a"), ("/0", "node a"), ("/1", "node a"), ("/2", "node b")):
        assert cli.main(["cp", f"7f3a{rank}:a.txt", f"{rank.strip('/') or 'x'}.txt"]) == 0
        assert Path(f"{rank.strip('/') or 'x'}.txt").read_text() == text
    assert cli.main(["cp", "7f3a/3:a.txt"]) == 2
    assert "run 7f3a has no rank 3: it has 3." in capsys.readouterr().err


def test_a_folder_is_copied_and_then_only_what_changed(kept: KeptRuns, capsys: pytest.CaptureFixture[str]):
    directory = kept.add(RUN, files={"work/out/model.pt": bytes(2000), "work/out/deep/run.sh": b"#!/bin/sh"})
    (directory / "work/out/deep/run.sh").chmod(0o755)
    os.utime(directory / "work/out/model.pt", (1e9, 1e9))
    assert cli.main(["cp", "7f3a:out", "."]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [re.split(r" {2,}", line.strip()) for line in lines] == [
        ["9 B", "out/deep/run.sh"], ["2.0 kB", "out/model.pt"], ["2 files, 2.0 kB copied"],
    ]  # fmt: skip
    assert Path("out/model.pt").stat().st_mtime == 1e9
    assert stat.S_IMODE(Path("out/deep/run.sh").stat().st_mode) & 0o100
    (directory / "work/out/deep/run.sh").write_bytes(b"#!/bin/sh\n")
    assert cli.main(["cp", "7f3a:out", "."]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "     10 B  out/deep/run.sh", "2 files, 10 B copied, 1 unchanged",
    ]  # fmt: skip
    # a missing target becomes the folder itself; a target that ends with a slash is a folder for the file
    assert cli.main(["cp", "7f3a:out", "new"]) == 0
    assert sorted(os.listdir("new")) == ["deep", "model.pt"]
    assert cli.main(["cp", "7f3a:out/model.pt", "into/"]) == 0
    assert os.listdir("into") == ["model.pt"]
    assert not list(Path().rglob(".*part"))


def test_links_are_left_out_with_a_note(kept: KeptRuns, capsys: pytest.CaptureFixture[str]):
    directory = kept.add(RUN, files={"work/out/a": b"a", "work/linked": b"b"})
    (directory / "code").symlink_to("/etc")
    (directory / "work/out/best").symlink_to("a")
    (directory / "work/out/folder").symlink_to("/etc")
    for path, named in (("out", "out/best, out/folder"), ("", "work/out/best, work/out/folder")):
        assert cli.main(["cp", f"7f3a:{path}", "into/"]) == 0
        reported = " ".join(capsys.readouterr().err.split())
        assert "symbolic links are not copied" in reported
        assert f"left out: {named}." in reported
    assert not any(file.is_symlink() for file in Path("into").rglob("*"))
    assert cli.main(["cp", "7f3a:linked", "into/"]) == 0
    assert capsys.readouterr().err == ""


def test_several_folders_of_a_run_keep_their_names(kept: KeptRuns):
    kept.add(RUN, files={"work/a": b"a", "checkpoints/b": b"b"})
    assert cli.main(["cp", "7f3a:", "all"]) == 0
    assert sorted(str(path) for path in Path("all").rglob("*") if path.is_file()) == ["all/checkpoints/b", "all/work/a"]


def test_standard_output_takes_one_file(kept: KeptRuns, capfdbinary: pytest.CaptureFixture[bytes]):
    kept.add(RUN, files={"work/out/a": b"\xff\n", "work/out/b": b"b"})
    assert cli.main(["cp", "7f3a:out/a", "-"]) == 0
    assert capfdbinary.readouterr().out == b"\xff\n"
    assert cli.main(["cp", "7f3a:out", "-"]) == 2
    assert b"7f3a:out is a folder of 2 files, and standard output takes a single file" in capfdbinary.readouterr().err


@pytest.mark.parametrize(("state", "started"), [(RunState.SUCCEEDED, True), (RunState.CANCELLED, False)])
def test_files_that_an_ended_run_does_not_have(
    kept: KeptRuns, capsys: pytest.CaptureFixture[str], state: RunState, started: bool
):
    directory = kept.add(RUN, state, started=started)
    assert cli.main(["cp", "7f3a:model.pt", "."]) == 2
    assert "run 7f3a has no model.pt. `sgpu cp 7f3a:` lists its files." in capsys.readouterr().err
    assert cli.main(["cp", "7f3a/0:", "."]) == 2
    assert "run 7f3a has no files." in capsys.readouterr().err
    # ranks on this machine wrote directly to the notebook's folder
    kept.write_record(RUN, "/data/notebook")
    assert cli.main(["cp", "7f3a:model.pt", "."]) == 2
    assert "Its ranks' working directory was /data/notebook on this machine" in capsys.readouterr().err
    kept.write_record(RUN, str(directory / "work"))
    assert cli.main(["cp", "7f3a:model.pt", "."]) == 2
    assert "`sgpu cp 7f3a:` lists its files." in capsys.readouterr().err


def test_a_run_that_goes_on_may_write_more(kept: KeptRuns, capsys: pytest.CaptureFixture[str]):
    kept.announce()
    kept.add(RUN, RunState.RUNNING, files={"work/a.txt": b"a"})
    assert cli.main(["cp", "7f3a:a.txt", "a.txt"]) == 0
    assert capsys.readouterr().err == (
        "sgpu: run 7f3a has not ended: files that it writes from now on are not included.\n"
    )
    assert cli.main(["cp", "7f3a:b.txt"]) == 2
    assert "has no b.txt. It has not ended: what its ranks write on nodes other than" in capsys.readouterr().err


def test_a_target_that_can_not_be_written(kept: KeptRuns, capsys: pytest.CaptureFixture[str]):
    kept.add(RUN, files={"work/a.txt": b"a"})
    Path("file").touch()
    assert cli.main(["cp", "7f3a:a.txt", "file/"]) == 2
    err = capsys.readouterr().err
    assert "file can't be written: " in err
    assert "run the command again: it continues where it stopped" in err.replace("\n", " ")


def test_a_folder_with_too_many_files_is_refused(
    kept: KeptRuns, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_files, "list_below", functools.partial(list_below, most=3))
    kept.add(RUN, files={f"work/out/{number}": b"" for number in range(4)} | {"work/few/1": b""})
    assert cli.main(["cp", "7f3a:few", "."]) == 0
    assert cli.main(["cp", "7f3a:out", "."]) == 2
    assert "work/out has more than 3 files. Copy its folders one by one" in capsys.readouterr().err
    assert os.listdir(".") == ["few"]
