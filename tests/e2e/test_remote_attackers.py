"""A client without a listed key gets nothing from a served pool, and one with a key gets no other user's data."""

from __future__ import annotations

import os
import pickle
import pwd
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from odd_messages import hostile_msgpack, odd_messages
from process_table import descriptors, level
from served_pools import RemoteUser, ServedPool
from strangers import Bomb, Stranger, junk, say_raw, zmtp_greeting
from tcp_proxy import Proxy
from waiting import eventually

from sgpu_magic.errors import KeyRefused, PoolError, UsageError
from sgpu_magic.pool.remote_clients import MOST_UNKNOWN
from sgpu_magic.system.secure_sockets import MAX_FRAME_BYTES, new_key_pair
from sgpu_magic.wire import codec
from sgpu_magic.wire.attachments import FilePayload, InlinePayload, PackedLayout, Payload, PayloadSource, SharedPayload
from sgpu_magic.wire.base import RunState, new_id
from sgpu_magic.wire.client import Attach, Cancel, ClientMessage, Goodbye, Refused, StopPool, Submit
from sgpu_magic.wire.devices import Placement
from sgpu_magic.wire.events import Event, RunEnded
from sgpu_magic.wire.pool_status import AskStatus, Hello, PoolStatus
from sgpu_magic.wire.rank_events import OutputWritten
from sgpu_magic.wire.run import CellSource, Interpreter, Owner, RankContext, RunSpec

needs_root = pytest.mark.needs_root
as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root to be another user")
WAIT = "import time\nprint('begun', flush=True)\nwhile True: time.sleep(0.01)"
NOTHING_PACKED = PackedLayout(pickle_size=0, buffers=(), mac=b"")


@pytest.fixture(scope="module")
def eve(served: ServedPool) -> RemoteUser:
    """Her key is listed; she is no friend of Ann's."""
    return served.user("eve")


@pytest.fixture
def stranger() -> Iterator[Callable[..., Stranger]]:
    made: list[Stranger] = []

    def make(*arguments: object) -> Stranger:
        made.append(Stranger(*arguments))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def mark(served: ServedPool, ann: RemoteUser, tmp_path: Path) -> Iterator[Path]:
    """What a bomb makes; whatever was tried, there is none, the pool is the same, and does what it is for."""
    pid, agents = served.pid, served.home.agent_pids()
    path = tmp_path / "exploded"
    yield path
    works(ann)
    assert not path.exists()
    assert (served.pid, served.home.agent_pids()) == (pid, agents)


def works(user: RemoteUser) -> None:
    run = user.client.begin("rank + 1", ranks=2)
    assert run.ended().state is RunState.SUCCEEDED
    assert run.values == [1, 2]


def submission(run_id: str, source: PayloadSource, layout: PackedLayout = NOTHING_PACKED, **context: object) -> Submit:
    """A run that a client of its own making asks for."""
    return Submit(
        request=7,
        spec=RunSpec(
            run_id=run_id, name="attack", cell=CellSource(body="print('ran')"), placement=Placement(ranks=1),
            outputs=(), owner=Owner(pid=os.getpid(), host="here", user="ann"), timeout_s=60.0,
        ),
        interpreter=Interpreter(executable=sys.executable, key="test" * 8, variables={"PATH": "/usr/bin:/bin"}),
        context=RankContext(cwd="/", sys_path=tuple(sys.path), umask=0o022, environ={}, key=b"k" * 32),
        payload=Payload(source=source, layout=layout),
    )  # fmt: skip


# ---------------------------------------------------------------- without a listed key


def test_no_key_gets_nothing(served: ServedPool, mark: Path, stranger: Callable[..., Stranger]):
    made = stranger(served.entry.address)
    made.say(AskStatus(request=1))
    for parts in junk(pickle.dumps(Bomb(mark))):
        made.send(*parts)
    assert made.answer(500) is None


def test_a_key_that_is_not_listed_gets_nothing(served: ServedPool, mark: Path, stranger: Callable[..., Stranger]):
    made = stranger(served.entry.address, served.entry.key, new_key_pair())
    made.say(AskStatus(request=1))
    for parts in junk(pickle.dumps(Bomb(mark))):
        made.send(*parts)
    assert made.answer(500) is None


def test_who_is_not_listed_is_told_what_to_do(served: ServedPool):
    mallory = served.user("mallory", listed=False)
    with pytest.raises(KeyRefused) as error:
        mallory.client.pool.status()
    assert mallory.keys.public in error.value.message
    assert "sgpu pool authorize" in error.value.message
    assert mallory.keys.secret not in error.value.message


def test_without_a_key_of_ones_own_one_is_told_to_make_one(served: ServedPool):
    nobody = served.user("nobody", listed=False)
    (nobody.home.path / "client.key").unlink()
    with pytest.raises(PoolError, match="sgpu pool keygen"):
        nobody.client.pool.status()


def test_a_key_that_others_can_read_is_not_used(served: ServedPool):
    careless = served.user("careless", listed=False)
    (careless.home.path / "client.key").chmod(0o644)
    with pytest.raises(UsageError, match="can be read or written by other users"):
        careless.client.pool.status()


def test_who_is_not_the_pool_is_not_spoken_to(served: ServedPool):
    """A different key from the configured one: a man in the middle, or another machine at its address."""
    false = served.user("fooled", listed=False, key=new_key_pair().public)
    with pytest.raises(KeyRefused, match="could not prove that it is the pool team whose key you have"):
        false.client.pool.status()


@pytest.mark.slow
def test_what_listens_there_and_is_no_pool_is_told(served: ServedPool):
    with socket.create_server(("127.0.0.1", 0)) as other:
        lost = served.user("lost", listed=False, address=f"tcp://127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(PoolError, match=r"can't be reached|does not answer"):
            lost.client.pool.status()
    gone = served.user("gone", listed=False, address=lost.entry.address)
    with pytest.raises(PoolError, match="nothing answers at"):
        gone.client.pool.status()


# ---------------------------------------------------------------- bytes


def sockets_of(pool: ServedPool) -> dict[str, Callable[[], socket.socket]]:
    def local(name: str) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        made.connect(str(pool.home.runtime / name))
        return made

    return {
        "tcp": lambda: socket.create_connection(("127.0.0.1", pool.port)),
        "pool.sock": lambda: local("pool.sock"),
        "node.sock": lambda: local("node.sock"),
        "line.sock": lambda: local("line.sock"),
    }


@pytest.mark.parametrize("where", ["tcp", "pool.sock", "node.sock", "line.sock"])
def test_raw_bytes_at_every_socket_do_nothing(served: ServedPool, ann: RemoteUser, mark: Path, where: str):
    works(ann)
    bomb = pickle.dumps(Bomb(mark))
    output = [
        bomb,
        struct.pack(">I", len(bomb)) + bomb,
        struct.pack("<Q", len(bomb)) + bomb,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01" + os.urandom(500),
        os.urandom(10_000),
        b"\xff" * 64,
        zmtp_greeting() + bomb,
        zmtp_greeting(b"NULL") + b"\x04\x19\x05READY" + bomb,
        zmtp_greeting() + b"\x04\xc8\x05HELLO" + os.urandom(194),
    ]
    connect = sockets_of(served)[where]
    for data in output:
        with connect() as raw:
            raw.settimeout(0.1)
            try:
                raw.sendall(data)
                raw.recv(4096)
            except (BrokenPipeError, ConnectionResetError, TimeoutError):
                continue


@pytest.mark.slow
def test_a_pickle_from_a_listed_user_does_nothing(
    served: ServedPool, eve: RemoteUser, mark: Path, stranger: Callable[..., Stranger]
):
    made = stranger(served.entry.address, served.entry.key, eve.keys)
    bomb = pickle.dumps(Bomb(mark))
    for parts in junk(bomb):
        made.send(*parts)
    welcome = made.hello()
    assert (welcome.user, welcome.same_host, welcome.sees_client) == ("eve", False, False)
    for parts in junk(bomb):
        made.send(*parts)
    made.say(AskStatus(request=3), bomb)
    assert isinstance(made.answer(), PoolStatus)


def test_a_payload_without_the_runs_signature_is_not_unpickled(
    served: ServedPool, eve: RemoteUser, mark: Path, stranger: Callable[..., Stranger]
):
    made = stranger(served.entry.address, served.entry.key, eve.keys)
    made.hello()
    bomb = pickle.dumps(Bomb(mark))
    layout = PackedLayout(pickle_size=len(bomb), buffers=(), mac=b"\0" * 32)
    run_id = new_id()
    made.say(submission(run_id, InlinePayload(), layout), bomb)
    reported = b""
    while b"signature" not in reported:
        answer = made.answer(20_000)
        assert answer is not None, reported
        reported += msgspec.json.encode(answer)


def test_odd_messages_of_a_listed_user_harm_nobody(
    served: ServedPool, ann: RemoteUser, eve: RemoteUser, mark: Path, stranger: Callable[..., Stranger]
):
    """Well formed, with absurd contents; the other user's run continues throughout."""
    run = ann.client.begin(WAIT, ranks=1)
    run.wait_for(OutputWritten)
    made = stranger(served.entry.address, served.entry.key, eve.keys)
    made.hello()
    pid = served.pid
    for data in hostile_msgpack():
        made.send(data, b"frame")
    for data in odd_messages(ClientMessage, 800, seed=2):
        if not isinstance(codec.client_messages.decode(data), Hello | Goodbye):
            made.send(data, b"frame")
    submit = submission(new_id(), InlinePayload())
    for number, variables in enumerate(({"A": "\0"}, {"A\0": ""}, {"": "x"}, {"A=B": "x"}), 1000):
        interpreter = msgspec.structs.replace(submit.interpreter, variables=variables)
        made.say(msgspec.structs.replace(submit, request=number, interpreter=interpreter), b"")
        while getattr(answer := made.answer(), "request", None) != number:
            assert answer is not None, "no answer"
        assert isinstance(answer, Refused)
        assert "no process can be started" in answer.message
    assert served.pid == pid
    assert "Traceback" not in (served.home.path / "served.log").read_text()
    assert served.home.ledger()[run.run_id].state == "running"
    run.run.cancel("enough")
    assert run.ended().reason == "enough"


@pytest.mark.parametrize("begun", [b"\x02", b"\x03", b"\x06"], ids=["frame", "more", "command"])
def test_a_frame_that_says_it_is_huge_ends_its_connection(served: ServedPool, mark: Path, begun: bytes):
    before = level(served.pid)
    with socket.create_connection(("127.0.0.1", served.port)) as raw:
        # the connection ends; otherwise the timeout would raise
        say_raw(raw, zmtp_greeting() + begun + struct.pack(">Q", 1 << 60) + b"x" * 1000)
    assert resident_mb(served.pid) < 500, before


@pytest.mark.slow
def test_a_frame_larger_than_allowed_ends_its_connection(
    served: ServedPool, ann: RemoteUser, eve: RemoteUser, mark: Path, stranger: Callable[..., Stranger]
):
    made = stranger(served.entry.address, served.entry.key, eve.keys)
    made.hello()
    before = resident_mb(served.pid)
    made.say(AskStatus(request=1), bytes(MAX_FRAME_BYTES + 1))
    made.say(AskStatus(request=2))
    # the socket reconnects, and has not sent a hello
    assert made.answer(1000) is None
    assert resident_mb(served.pid) < before + 100
    with pytest.raises(UsageError, match="MB are possible"):
        ann.client.pool.link().send(AskStatus(request=9), [bytes(MAX_FRAME_BYTES + 1)])


def test_what_was_recorded_can_not_be_played_again(served: ServedPool, ann: RemoteUser, mark: Path):
    line = Proxy(served.port)
    client = ann.new_client(line.address)
    run = client.begin("print('once')", ranks=1)
    assert run.ended().state is RunState.SUCCEEDED
    victim = client.begin(WAIT, ranks=1)
    victim.wait_for(OutputWritten)
    victim.run.cancel("it was asked once")
    assert victim.ended().state is RunState.CANCELLED
    eventually(lambda: served.home.ledger()[victim.run_id].state == "cancelled", 10, "the ledger does not say so")
    client.close()
    line.close()
    recorded = b"".join(line.sent[0])
    assert len(recorded) > 2000
    # the recording contains no readable data of a run
    assert b"once" not in recorded
    assert run.run_id.encode() not in recorded
    rows = served.home.ledger()
    clients = ann.client.pool.status()
    pieces = [recorded, *(b"".join(line.sent[0][start:]) for start in (1, 2, 3)), zmtp_greeting() + recorded[64:]]
    for data in pieces:
        with socket.create_connection(("127.0.0.1", served.port)) as raw:
            raw.settimeout(0.3)
            try:
                raw.sendall(data)
                while raw.recv(65536):
                    pass
            except (BrokenPipeError, ConnectionResetError, TimeoutError):
                continue
    assert served.home.ledger() == rows
    now = ann.client.pool.status()
    assert clients is not None
    assert now is not None
    assert now.clients == clients.clients


# ---------------------------------------------------------------- too many, too much


@pytest.mark.slow
def test_strangers_who_only_stand_there_keep_nobody_out(served: ServedPool, ann: RemoteUser, mark: Path):
    works(ann)
    before = len(descriptors(served.pid))
    crowd = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(2 * MOST_UNKNOWN)]
    try:
        ben = served.user("ben")
        works(ben)
        # they are closed after ZeroMQ's handshake timeout
        eventually(
            lambda: len(descriptors(served.pid)) < before + 20, 20, lambda: f"{len(descriptors(served.pid))} left"
        )
        ben.leave()
    finally:
        for each in crowd:
            each.close()


@pytest.mark.slow
def test_a_flood_of_one_user_does_not_stop_the_others(
    served: ServedPool, ann: RemoteUser, eve: RemoteUser, mark: Path, stranger: Callable[..., Stranger]
):
    made = stranger(served.entry.address, served.entry.key, eve.keys)
    made.hello()
    over = threading.Event()
    sent = [0]

    def flood() -> None:
        while not over.is_set():
            made.say(Attach(request=1, run="none"), b"x" * 1000)
            made.say(AskStatus(request=2))
            sent[0] += 2

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        eventually(lambda: sent[0] > 5000, 20)
        begun = sent[0]
        works(ann)
        assert ann.client.pool.status() is not None
        # the sender made progress throughout: what the pool does not read yet waits at the sender
        eventually(lambda: sent[0] > begun, 20)
        assert resident_mb(served.pid) < 500
    finally:
        over.set()
        thread.join()


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"no process {pid}")


# ---------------------------------------------------------------- with a listed key, after another's


def test_a_name_is_the_keys_not_the_clients(
    served: ServedPool, ann: RemoteUser, eve: RemoteUser, stranger: Callable[..., Stranger]
):
    made = stranger(served.entry.address, served.entry.key, eve.keys)
    made.hello()
    run_id = new_id()
    made.say(submission(run_id, InlinePayload()), b"")
    ended = None
    while ended is None:
        answer = made.answer(20_000)
        assert answer is not None
        ended = answer.body if isinstance(answer, Event) and isinstance(answer.body, RunEnded) else None
    status = ann.client.pool.status()
    assert status is not None
    row = next(row for row in status.runs if row.run_id == run_id)
    assert (row.user, row.name) == ("eve", "")


@pytest.mark.parametrize(
    "source",
    [FilePayload(path="/etc/passwd", size=1000), SharedPayload(pid=1, fd=0, size=1000)],
    ids=["file", "memory"],
)
def test_files_and_memory_of_the_pools_machine_are_no_payload(
    served: ServedPool, eve: RemoteUser, mark: Path, stranger: Callable[..., Stranger], source: PayloadSource
):
    made = stranger(served.entry.address, served.entry.key, eve.keys)
    made.hello()
    made.say(submission(new_id(), source))
    answer = made.answer()
    assert isinstance(answer, Refused)
    assert "is in files on the notebook's machine" in answer.message


@pytest.mark.parametrize("run_id", ["../../x", "..", "", "/tmp/xxxx", "abcd1234/../x"])
def test_a_run_id_that_is_a_path_is_refused(
    served: ServedPool, eve: RemoteUser, stranger: Callable[..., Stranger], run_id: str
):
    made = stranger(served.entry.address, served.entry.key, eve.keys)
    made.hello()
    runs = set(served.home.runs)
    made.say(submission(run_id, InlinePayload()), b"")
    answer = made.answer()
    assert isinstance(answer, Refused)
    assert "ID is invalid" in answer.message
    assert set(served.home.runs) == runs


def test_another_users_run_is_left_alone(
    served: ServedPool, ann: RemoteUser, eve: RemoteUser, mark: Path, stranger: Callable[..., Stranger]
):
    run = ann.client.begin(WAIT, ranks=1)
    run.wait_for(OutputWritten)
    made = stranger(served.entry.address, served.entry.key, eve.keys)
    made.hello()
    asked = [
        Cancel(request=1, run=run.run_id, reason="not mine", kill=True),
        Attach(request=2, run=run.run_id, owns=True),
        StopPool(request=3, force=True),
        submission(run.run_id, InlinePayload()),
    ]
    for message in asked:
        made.say(message, b"")
        answer = made.answer()
        assert isinstance(answer, Refused), (message, answer)
    assert made.answer(200) is None
    assert served.home.ledger()[run.run_id].state == "running"
    assert isinstance(ann.client.pool.cancel(run.run_id, "enough"), str)
    assert run.ended().reason == "enough"


# ---------------------------------------------------------------- another OS user of the pool's machine


@needs_root
@as_root
def test_another_os_user_gets_nothing(served: ServedPool, ann: RemoteUser, mark: Path):
    """As if the mode of the directories above were all that protects: they are open here."""
    body = "import os\nbig = bytes(range(256)) * 10_000\nprint(os.getpid(), flush=True)\n" + WAIT
    run = ann.client.begin(body, ranks=1, names={"big": b"x" * 1_000_000})
    rank = int(run.wait_for(OutputWritten).text.split()[0])
    home, pool, agent = served.home, served.pid, served.home.agent_pids()[0]
    attempts = [
        f"socket.socket(socket.AF_UNIX).connect('{home.runtime}/pool.sock')",
        f"socket.socket(socket.AF_UNIX).connect('{home.runtime}/node.sock')",
        f"socket.socket(socket.AF_UNIX).connect('{home.runtime}/line.sock')",
        f"os.listdir('{home.runtime}')",
        f"open('{home.state}/pool.key').read()",
        f"open('{home.state}/clients.toml').read()",
        f"open('{home.state}/clients.toml', 'a').write('x')",
        f"os.listdir('{home.state}/runs')",
        f"open('{home.run_dir(run.run_id)}/key', 'rb').read()",
        f"open('{home.run_dir(run.run_id)}/rank-0.log').read()",
        f"os.listdir('{home.state}/blobs')",
        f"open('{home.state}/ledger.sqlite3', 'rb').read()",
        f"open('{ann.home.path}/client.key').read()",
        f"open('{ann.home.path}/pools.toml').read()",
        *(f"os.listdir('/proc/{pid}/fd')" for pid in (pool, agent, rank)),
        *(f"open('/proc/{pid}/environ', 'rb').read()" for pid in (pool, agent, rank)),
        *(f"open('/proc/{pid}/mem', 'rb').read(1)" for pid in (pool, agent, rank)),
        *(f"os.kill({pid}, 15)" for pid in (pool, agent, rank)),
    ]
    shared = [entry for entry in Path("/dev/shm").iterdir() if "sgpu" in entry.name]
    attempts += [f"open({str(entry)!r}, 'rb').read()" for entry in shared]
    nobody = pwd.getpwnam("nobody")
    opened = [home.path, home.path / "state", home.path / "state" / "pools", home.path / "run", ann.home.path]
    modes = {path: path.stat().st_mode & 0o7777 for path in opened}
    code = "\n".join(
        [
            f"import os, socket; os.setgroups([]); os.setgid({nobody.pw_gid}); os.setuid({nobody.pw_uid})",
            f"for attempt in {attempts!r}:",
            "    try:",
            "        eval(attempt)",
            "    except PermissionError:",
            "        continue",
            "    except OSError as error:",
            "        print(attempt, repr(error))",
            "    else:",
            "        print(attempt, 'WORKED')",
        ]
    )
    try:
        for path in opened:
            path.chmod(0o755)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=True)
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    assert done.stdout == ""
    assert served.home.ledger()[run.run_id].state == "running"
    run.run.cancel("enough")
    run.ended()


def test_everything_of_a_served_pool_is_private(served: ServedPool, ann: RemoteUser):
    works(ann)
    for root in (served.home.state, served.home.runtime, ann.home.path / "client.key", ann.home.path / "pools.toml"):
        for path in [root, *root.rglob("*")]:
            if not path.is_symlink():
                mode = path.stat().st_mode & 0o777
                assert not mode & 0o077, f"{path} has mode {mode:o}"
