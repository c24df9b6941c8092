"""Other users have no access, and only data with the run's key is unpickled."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import pwd
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from kernels import Home, Kernel, descriptors, eventually

from sgpu_magic.wire import codec
from sgpu_magic.wire.attachments import FilePayload, InlinePayload, PackedLayout, Payload, PayloadSource
from sgpu_magic.wire.base import Record, new_id
from sgpu_magic.wire.client import Refused, Submit
from sgpu_magic.wire.devices import Placement
from sgpu_magic.wire.pool_status import AskStatus, Hello, PoolStatus, Welcome
from sgpu_magic.wire.run import CellSource, Interpreter, Owner, RankContext, RunSpec

# the tests inspect everything that a pool admits and keeps
OWN_HOME = True

needs_root = pytest.mark.needs_root
KEY = b"k" * 32


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class Dealer:
    """A client that says what it likes."""

    def __init__(self, home: Home) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(f"ipc://{home.runtime / 'pool.sock'}")

    def send(self, *parts: bytes) -> None:
        self._socket.send_multipart(list(parts))

    def say(self, message: Record, *frames: bytes) -> None:
        self.send(codec.encode(message), *frames)

    def hello(self) -> Welcome:
        self.say(Hello(protocol_version=1, package_version="test", pid=os.getpid()))
        answer = self.answer()
        assert isinstance(answer, Welcome)
        return answer

    def answer(self, timeout_ms: int = 5000) -> object:
        """The next message, None when none came."""
        if not self._socket.poll(timeout_ms):
            return None
        return codec.pool_messages.decode(self._socket.recv_multipart()[0])

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@pytest.fixture
def dealer(kernel: Kernel, home: Home) -> Iterator[Dealer]:
    made = Dealer(home)
    yield made
    made.close()


def works(kernel: Kernel) -> None:
    kernel.check("%%distributed -n 2 --out fine --ui none\nfine = world_size")
    assert kernel.value("fine") == 2


# ---------------------------------------------------------------- files


def test_everything_is_private(kernel: Kernel, home: Home):
    kernel.check("import torch; big = torch.ones(100_000)")
    kernel.check("%%distributed -n 2 --out big:all --ui none\nbig += rank\nprint('secret')")
    eventually(lambda: not home.rank_pids(), 5, "ranks stay")
    for root in (home.state, home.runtime):
        for path in [root, *root.rglob("*")]:
            if path.is_symlink():
                continue
            # files of an ended run are written under a temporary name first
            with contextlib.suppress(FileNotFoundError):
                assert not mode(path) & 0o077, f"{path} has mode {mode(path):o}"
    assert stat.S_ISSOCK((home.runtime / "pool.sock").stat().st_mode)


def test_no_port_is_open_to_the_network(kernel: Kernel, home: Home):
    cell = kernel.start(
        "%%distributed -n 2\nimport pathlib, time\nprint('begun', flush=True)\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.01)"
    )
    cell.until_shown("[1] begun")
    inodes = {
        link[8:-1]
        for pid in set(home.processes()) - home.kernel_pids
        for link in descriptors(pid).values()
        if link.startswith("socket:[")
    }
    listening = [
        fields[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for fields in (line.split() for line in Path(table).read_text().splitlines()[1:])
        if fields[3] == "0A" and fields[9] in inodes
    ]
    (home.work / "go").touch()
    assert cell.wait().status == "ok"
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    assert listening, "the ranks listen somewhere"
    assert {address.split(":")[0] for address in listening} <= loopback


def test_a_runtime_directory_of_somebody_else_is_not_used(home: Home, tmp_path: Path):
    trap = tmp_path / "trap"
    (tmp_path / "real").mkdir()
    trap.symlink_to(tmp_path / "real")
    done = subprocess.run(
        [sys.executable, "-c", "from sgpu_magic.client.pool import Pool; from sgpu_magic.config import load_settings; "
         "Pool(load_settings()).status()"],
        env=home.environ | {"SGPU_RUNTIME_DIR": str(trap), "SGPU_STATE_DIR": str(tmp_path / "state")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert f"{trap} is not a directory that you own" in done.stderr
    assert list((tmp_path / "real").iterdir()) == []


@needs_root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root to be another user")
def test_another_user_gets_nothing(kernel: Kernel, home: Home):
    attempts = [
        "socket.socket(socket.AF_UNIX).connect('{run}/pool.sock')",
        "open('{state}/pool.json').read()",
        "os.listdir('{state}/runs')",
        "open('{state}/ledger.sqlite3', 'rb').read()",
        "os.open('/proc/{kernel}/fd/0', os.O_RDONLY)",
        "os.kill({pool}, 15)",
    ]
    nobody = pwd.getpwnam("nobody")
    home.path.chmod(0o755)  # as if the state directory itself were all that protects
    places = {"run": home.runtime, "state": home.state, "pool": home.pool_pid(), "kernel": kernel.pid}
    become = f"import os, socket; os.setgroups([]); os.setgid({nobody.pw_gid}); os.setuid({nobody.pw_uid})"
    code = f"{become}\nfor attempt in {[attempt.format(**places) for attempt in attempts]!r}:\n"
    code += "    try:\n        exec(attempt)\n    except PermissionError:\n        print('refused')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=False)
    home.path.chmod(0o700)
    assert (done.stdout.split(), done.stderr) == (["refused"] * len(attempts), "")
    works(kernel)


# ---------------------------------------------------------------- the pool's socket


class Bomb:
    """Unpickling it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.mkdir, (str(self.mark),))


@pytest.mark.parametrize("polite", [False, True], ids=["without hello", "after hello"])
def test_junk_at_the_socket_does_nothing(kernel: Kernel, home: Home, dealer: Dealer, tmp_path: Path, polite: bool):
    pool = home.pool_pid()
    if polite:
        dealer.hello()
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    dealer.send(bomb)
    dealer.send(b"", bomb)
    dealer.send(codec.encode(AskStatus(request=1))[:-1], bomb)
    for size in (0, 1, 10, 1000, 100_000):
        dealer.send(os.urandom(size))
        dealer.send(msgspec.msgpack.encode({"type": "submit", "request": 1}), os.urandom(size))
        dealer.send(msgspec.msgpack.encode([1, 2, 3]))
    dealer.send(msgspec.msgpack.encode({"type": "welcome"}))
    assert dealer.answer(200) is None
    works(kernel)
    assert home.pool_pid() == pool
    assert not (tmp_path / "exploded").exists()


def test_raw_bytes_at_the_socket_do_nothing(kernel: Kernel, home: Home):
    pool = home.pool_pid()
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(10_000), b"\xff" + b"\0" * 8 + b"\x7f"):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(home.runtime / "pool.sock"))
            try:
                raw.sendall(data)
            except (BrokenPipeError, ConnectionResetError):
                continue
    works(kernel)
    assert home.pool_pid() == pool


def test_without_a_hello_there_is_no_answer(dealer: Dealer):
    dealer.say(AskStatus(request=1))
    assert dealer.answer(300) is None
    dealer.hello()
    dealer.say(AskStatus(request=2))
    answer = dealer.answer()
    assert isinstance(answer, PoolStatus)
    assert answer.request == 2


# ---------------------------------------------------------------- runs


def submission(home: Home, run_id: str, source: PayloadSource, layout: PackedLayout, **spec: object) -> Submit:
    """A run that a client of its own making asks for."""
    interpreter = Interpreter(
        executable=sys.executable, key="test" * 8, variables={"PATH": "/usr/bin:/bin", "TMPDIR": str(home.path / "tmp")}
    )
    return Submit(
        request=7,
        spec=RunSpec(
            run_id=run_id,
            name="attack",
            cell=CellSource(body="print('ran')"),
            placement=Placement(ranks=1),
            outputs=(),
            owner=Owner(pid=os.getpid(), host="here", user="me"),
            timeout_s=60.0,
            **spec,  # pyright: ignore[reportArgumentType]
        ),
        interpreter=interpreter,
        context=RankContext(cwd=str(home.work), sys_path=tuple(sys.path), umask=0o022, environ={}, key=KEY),
        payload=Payload(source=source, layout=layout),
    )


@pytest.mark.parametrize("run_id", ["../../x", "..", "", "abcd/123", "/tmp/xxxx", "ABCDEF12", "abcd1234/../x", "a" * 9])
def test_a_run_id_that_is_a_path_is_refused(kernel: Kernel, home: Home, dealer: Dealer, run_id: str):

    def found() -> set[Path]:
        # ignore files of earlier runs, which change independently of the request
        known = {home.run_dir(known) for known in home.runs}
        return {path for path in home.path.rglob("*") if known.isdisjoint(path.parents) and "kernel" not in path.name}

    before = found()
    dealer.hello()
    dealer.say(submission(home, run_id, InlinePayload(), PackedLayout(pickle_size=0, buffers=(), mac=b"")), b"")
    answer = dealer.answer()
    assert isinstance(answer, Refused)
    assert answer.request == 7
    assert "ID is invalid" in answer.message
    assert {path for path in found() - before if "ledger" not in path.name} == set()


def test_a_run_id_is_used_once(kernel: Kernel, home: Home, dealer: Dealer):
    works(kernel)
    dealer.hello()
    layout = PackedLayout(pickle_size=0, buffers=(), mac=b"")
    dealer.say(submission(home, home.runs[-1], InlinePayload(), layout), b"")
    answer = dealer.answer()
    assert isinstance(answer, Refused)
    assert "used before" in answer.message


@pytest.mark.parametrize("way", ["inline", "file"])
def test_a_payload_without_the_runs_signature_is_not_unpickled(
    kernel: Kernel, home: Home, dealer: Dealer, tmp_path: Path, way: str
):
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    layout = PackedLayout(pickle_size=len(bomb), buffers=(), mac=b"\0" * 32)
    run_id = new_id()
    source: PayloadSource = InlinePayload()
    if way == "file":
        (tmp_path / "payload").write_bytes(bomb)
        # the file becomes the run's
        (tmp_path / "payload").chmod(0o600)
        source = FilePayload(path=str(tmp_path / "payload"), size=len(bomb))
    dealer.hello()
    dealer.say(submission(home, run_id, source, layout), bomb)
    reported = b""
    while b"signature" not in reported:
        answer = dealer.answer(20_000)
        assert answer is not None, reported
        reported += msgspec.json.encode(answer)
    assert not (tmp_path / "exploded").exists()
    eventually(lambda: not home.rank_pids(), 5, "ranks stay")
    works(kernel)


TAMPER = """
import os, pickle
import sgpu_magic.client.pool as memory
class Bomb:
    def __reduce__(self): return (os.mkdir, ("exploded",))
submitted = memory.PayloadMemory.submitted
def tampered(self, *args, **kwargs):
    bomb = pickle.dumps(Bomb())
    for slot in self._slots:
        os.pwrite(slot.buffer.fd, bomb, 0)
    return submitted(self, *args, **kwargs)
memory.PayloadMemory.submitted = tampered
import torch
big = torch.ones(1_000_000)
"""


@pytest.mark.slow
def test_a_payload_that_was_changed_on_its_way_is_not_unpickled(home: Home, new_kernel):
    kernel = new_kernel()
    kernel.check(TAMPER)
    reply = kernel.run("%%distributed -n 2\nprint(big.sum())")
    assert (reply.status, reply.ename) == ("error", "SerializationError"), reply.story
    assert "signature" in reply.evalue
    assert not (home.work / "exploded").exists()
    kernel.check("memory.PayloadMemory.submitted = submitted")
    works(kernel)


FORGE = """
import os, pickle
import sgpu_magic.client.run as run
class Bomb:
    def __reduce__(self): return (os.mkdir, ("exploded",))
load_results = run.ClientRun.load_results
def forged(self, ended, frames, namespace):
    return load_results(self, ended, [pickle.dumps(Bomb()).ljust(len(frame), b".") for frame in frames], namespace)
run.ClientRun.load_results = forged
"""


def test_a_result_that_was_changed_on_its_way_is_not_unpickled(home: Home, new_kernel):
    kernel = new_kernel()
    kernel.check(FORGE)
    reply = kernel.run("%%distributed -n 2 --out word\nword = 'x' * 1000")
    assert (reply.status, reply.ename) == ("error", "SerializationError"), reply.story
    assert "signature" in reply.evalue
    assert not (home.work / "exploded").exists()
    kernel.check("run.ClientRun.load_results = load_results")
    works(kernel)


def test_the_key_is_a_new_one_each_time(kernel: Kernel, home: Home):
    works(kernel)
    works(kernel)
    keys = {
        (home.run_dir(run_id) / "key").read_bytes() for run_id in home.runs if (home.run_dir(run_id) / "key").exists()
    }
    assert len(keys) >= 2
    assert {len(key) for key in keys} == {32}


# ---------------------------------------------------------------- processes that never unpickle


@pytest.mark.parametrize(
    "module",
    ["sgpu_magic.pool.service", "sgpu_magic.pool.__main__", "sgpu_magic.agent.service", "sgpu_magic.nodes.local"],
)
def test_pool_and_agent_have_nothing_to_unpickle_with(module: str):
    code = f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    for name in ("cloudpickle", "dill", "torch", "IPython", "numpy", "sgpu_magic.payload.unpack", "sgpu_magic.payload"):
        assert name not in loaded, name


def test_the_running_pool_and_agent_have_loaded_none_of_it(kernel: Kernel, home: Home):
    works(kernel)
    for pid in [home.pool_pid(), *home.agent_pids()]:
        maps = Path(f"/proc/{pid}/maps").read_text()
        for library in ("libtorch", "numpy", "_multiarray", "pyarrow"):
            assert library not in maps, f"process {pid} has loaded {library}"
