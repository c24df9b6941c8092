"""`sgpu cp`: files of runs, from this machine and from others."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from homes import Home
from kernels import Kernel, eventually
from many_agents import ManyAgents
from pool_client import PoolClient
from served_pools import RemoteUser, ServedPool

from sgpu_magic.client.run import Attachments
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.rank_events import OutputWritten

COMMAND = [sys.executable, "-m", "sgpu_magic.cli", "cp"]
BIG = 60_000_000


def cp(home: Home, *arguments: str, cwd: Path, code: int = 0) -> tuple[bytes, str]:
    """Run `sgpu cp ...`; its standard output and standard error."""
    done = subprocess.run([*COMMAND, *arguments], env=home.environ, cwd=cwd, capture_output=True, timeout=60)
    assert done.returncode == code, done
    return done.stdout, done.stderr.decode()


# ------------------------------------------------------------ on this machine


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> Iterator[tuple[Home, str]]:
    """A run that has left checkpoints."""
    home = Home({"SGPU_SIMULATE": "a10:2"})
    kernel = Kernel(home)
    kernel.check(
        "%%distributed -n 2 --ui none\nfrom sgpu_magic import runtime\nimport os\n"
        "d = runtime.checkpoint_dir() / 'deep'\nd.mkdir(exist_ok=True)\n"
        "(d / f'{rank}.txt').write_text(f'state of {rank}')\n"
        "if rank == 0: (d / 'out').symlink_to('/etc/passwd'); (d / 'folder').symlink_to('/etc')"
    )
    yield home, home.runs[-1]
    kernel.close()
    home.close()


@pytest.mark.slow
def test_folders_files_and_streams(trained: tuple[Home, str], tmp_path: Path):
    home, run = trained
    out, _ = cp(home, f"{run[:6]}:checkpoints", cwd=tmp_path)
    assert [line.split()[-1] for line in out.decode().splitlines()] == [
        "checkpoints/deep/0.txt",
        "checkpoints/deep/1.txt",
    ]
    assert not list(tmp_path.iterdir())
    out, _ = cp(home, f"{run[:6]}:checkpoints", ".", cwd=tmp_path)
    assert "2 files, 20 B copied" in out.decode()
    assert (tmp_path / "checkpoints/deep/1.txt").read_text() == "state of 1"
    assert "2 files, 0 B copied" in cp(home, f"{run[:6]}:checkpoints", ".", cwd=tmp_path)[0].decode()
    cp(home, f"{run[:6]}:checkpoints/deep/0.txt", "here.txt", cwd=tmp_path)
    assert (tmp_path / "here.txt").read_text() == "state of 0"
    # as with `cp -r`, a folder that does not exist gets the contents
    cp(home, f"{run[:6]}:checkpoints/deep/", "new", cwd=tmp_path)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["0.txt", "1.txt"]
    assert cp(home, f"{run[:6]}:checkpoints/deep/1.txt", "-", cwd=tmp_path)[0] == b"state of 1"
    assert "standard output takes a single file" in cp(home, f"{run[:6]}:checkpoints", "-", cwd=tmp_path, code=2)[1]
    assert not list(tmp_path.rglob(".*part"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        "checkpoints/../../x",
        "checkpoints/deep/out",
        *(
            pytest.param(path, marks=pytest.mark.slow)
            for path in ("../x", "/etc/passwd", "checkpoints/deep/folder/passwd")
        ),
    ],
)
def test_no_path_leaves_the_run(trained: tuple[Home, str], tmp_path: Path, path: str):
    home, run = trained
    _, err = cp(home, f"{run[:6]}:{path}", "-", cwd=tmp_path, code=2)
    assert "is outside the run's directories" in err or "has no" in err
    assert b"root" not in cp(home, f"{run[:6]}:{path}", "x", cwd=tmp_path, code=2)[0]
    assert not list(tmp_path.iterdir())


def test_what_can_not_be_meant(trained: tuple[Home, str], tmp_path: Path):
    home, run = trained
    assert "write RUN:PATH" in cp(home, "checkpoints", ".", cwd=tmp_path, code=2)[1]
    assert "has no rank 7" in cp(home, f"{run[:6]}/7:checkpoints", ".", cwd=tmp_path, code=2)[1]
    assert (
        f"working directory was {home.work} on this machine"
        in cp(home, f"{run[:6]}:model.pt", ".", cwd=tmp_path, code=2)[1]
    )
    # nothing is written through a link
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints").symlink_to("elsewhere")
    assert "can't be written" in cp(home, f"{run[:6]}:checkpoints", ".", cwd=tmp_path, code=2)[1]
    assert not list((tmp_path / "elsewhere").iterdir())


# ------------------------------------------------------------ on other machines


WORKS = f"""
import hashlib, os, time
os.makedirs("out/deep")
data = os.urandom({BIG})
open("out/model.bin", "wb").write(data)
open("out/deep/run.sh", "w").write("#!/bin/sh")
os.chmod("out/deep/run.sh", 0o755)
print("digest", hashlib.sha256(data).hexdigest(), flush=True)
while not os.path.exists(stop): time.sleep(0.02)
"""


@pytest.mark.slow
def test_while_it_runs_and_where_it_stopped(served: ServedPool, ann: RemoteUser, tmp_path: Path):
    names = {"stop": str(tmp_path / "stop")}
    target = tmp_path / "target"
    target.mkdir()
    run = ann.client.begin(WORKS, ranks=1, names=names, along=Attachments(is_remote=True))
    run.wait_for(OutputWritten)
    digest = run.printed[0].split()[1]
    # the working directory takes precedence over the run's own
    command = subprocess.Popen([*COMMAND, f"{run.run_id[:8]}:out/model.bin", "."], env=ann.home.environ, cwd=target)
    eventually(lambda: [p for p in target.glob(".model.bin.*.part") if p.stat().st_size > 1_000_000], 30)
    command.kill()
    command.wait()
    begun = sum(path.stat().st_size for path in target.iterdir())
    assert not (target / "model.bin").exists()
    cp(ann.home, f"{run.run_id[:8]}:out", ".", cwd=target)
    assert (target / "out/deep/run.sh").stat().st_mode & 0o100
    out, err = cp(ann.home, f"{run.run_id[:8]}:out/model.bin", ".", cwd=target)
    copied = re.search(r"1 file, ([\d.]+) (MB|B|kB) copied", out.decode())
    assert copied is not None
    assert begun < BIG
    assert float(copied[1]) * {"MB": 1e6, "kB": 1e3, "B": 1}[copied[2]] <= BIG - begun + 1e5
    for path in (target / "model.bin", target / "out/model.bin"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    assert "has not ended" in err
    (tmp_path / "stop").touch()
    assert run.ended().state is RunState.SUCCEEDED
    # and afterwards
    assert cp(ann.home, f"{run.run_id[:8]}:out/deep/run.sh", "-", cwd=target)[0] == b"#!/bin/sh"
    bob = served.user("bob")
    assert "no run" in cp(bob.home, f"{run.run_id[:8]}:out/deep/run.sh", "-", cwd=target, code=2)[1].lower()


@pytest.mark.slow
def test_the_nodes_of_ranks(tmp_path: Path):
    """Each far node's ranks have a working directory of their own, and it comes to the pool with their end."""
    home = Home({"SGPU_SIMULATE": "a10:2"})
    nodes = ManyAgents(home, 2, far=True)
    client = PoolClient(home)
    try:
        body = "from pathlib import Path\nPath('out.txt').write_text(f'of {rank}')\nPath(f'o{rank}').write_text('own')"
        run = client.begin(body, ranks=2, nodes=2, along=Attachments(is_remote=True))
        assert run.ended().state is RunState.SUCCEEDED
        eventually(lambda: (home.run_dir(run.run_id) / "node-1/work/out.txt").exists(), 20)
        prefix = run.run_id[:8]
        for rank, address in ((0, prefix), (0, f"{prefix}/0"), (1, f"{prefix}/1")):
            assert cp(home, f"{address}:out.txt", "-", cwd=tmp_path)[0] == b"of %d" % rank
        assert "has no o1" in cp(home, f"{prefix}:o1", "-", cwd=tmp_path, code=2)[1]
        assert cp(home, f"{prefix}/1:o1", "-", cwd=tmp_path)[0] == b"own"
        cp(home, f"{prefix}/1:", ".", cwd=tmp_path)
        assert sorted(os.listdir(tmp_path / "work")) == ["o1", "out.txt"]
    finally:
        client.close()
        nodes.close()
        home.close()
