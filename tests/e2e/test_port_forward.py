"""`sgpu port-forward`: servers in ranks, reached from this machine over the pool's links."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kernels import Cell, Home, Kernel, eventually
from many_agents import ManyAgents
from pool_client import FollowedRun, PoolClient
from served_pools import served_pool
from tcp_proxy import Proxy

from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.rank_events import OutputWritten

COMMAND = [sys.executable, "-m", "sgpu_magic.cli"]
BIG = 20_000_000

# a file server, and an echo server that replies when the other side has shut down
SERVERS = f"""
import hashlib, http.server, os, pathlib, socketserver, threading
os.makedirs('served', exist_ok=True)
if rank == 0:
    data = os.urandom({BIG})
    pathlib.Path('served/big').write_bytes(data)
    pathlib.Path('served/small').write_text('hello from the rank')

    class Files(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *a): super().__init__(*a, directory='served')
        def log_message(self, *a): pass

    class Echo(socketserver.BaseRequestHandler):
        def handle(self):
            while part := self.request.recv(65536):
                self.request.sendall(part.upper())
            self.request.sendall(b'the end')

    class Echoes(socketserver.ThreadingTCPServer):
        # the rank waits for other threads before it ends
        daemon_threads = True

    web = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Files)
    echo = Echoes(('0.0.0.0', 0), Echo)
    for server in (web, echo):
        threading.Thread(target=server.serve_forever, daemon=True).start()
    print('web', web.server_address[1], 'echo', echo.server_address[1], 'digest', hashlib.sha256(data).hexdigest())
while not os.path.exists('stop'):
    __import__('time').sleep(0.02)
"""


class Served:
    """A run with the two servers in it."""

    def __init__(self, kernel: Kernel, cell: Cell, run_id: str) -> None:
        self.kernel = kernel
        self.cell = cell
        self.run_id = run_id
        found = re.search(r"web (\d+) echo (\d+) digest (\w+)", kernel.home.log(run_id, 0))
        assert found is not None
        self.web, self.echo, self.digest = int(found[1]), int(found[2]), found[3]

    def end(self) -> None:
        (self.kernel.home.work / "stop").touch()
        assert self.cell.wait(20).status == "ok"


@pytest.fixture
def served(kernel: Kernel, home: Home) -> Iterator[Served]:
    (home.work / "stop").unlink(missing_ok=True)
    before = set(home.runs)
    cell = kernel.start(f"%%distributed -n 2 --ui none\n{SERVERS}")
    (run_id,) = eventually(lambda: set(home.runs) - before)
    eventually(lambda: "digest" in home.log(run_id, 0), 20)
    made = Served(kernel, cell, run_id)
    yield made
    if not cell.idle:
        made.end()
    home.check_leaks()


@pytest.fixture
def forwarded(home: Home) -> Iterator[Callable[..., tuple[subprocess.Popen[str], int]]]:
    """Starts the command and returns it and the port here, once it listens."""
    made: list[subprocess.Popen[str]] = []

    def start(run: str, port: int, *more: str, home: Home = home) -> tuple[subprocess.Popen[str], int]:
        process = subprocess.Popen(
            [*COMMAND, "port-forward", run[:6], f"0:{port}", *more],
            env=home.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        made.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"http://127\.0\.0\.1:(\d+) leads to port \d+ of rank \d of run [0-9a-f]{4}$", line)
        assert found is not None, line + process.communicate(timeout=20)[1]
        return process, int(found[1])

    yield start
    for process in made:
        process.kill()
        process.communicate()


def get(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().read()


def refused(home: Home, *arguments: str) -> str:
    done = subprocess.run([*COMMAND, "port-forward", *arguments], env=home.environ, capture_output=True, timeout=30)
    assert done.returncode == 2, done
    return done.stderr.decode()


def test_three_downloads_at_once_and_a_large_one(served: Served, forwarded: Callable[..., tuple]):
    process, port = forwarded(served.run_id, served.web)
    with ThreadPoolExecutor(4) as pool:
        big = pool.submit(get, port, "/big")
        small = [pool.submit(get, port, "/small") for _ in range(3)]
        assert [answer.result(30) for answer in small] == [b"hello from the rank"] * 3
        assert hashlib.sha256(big.result(30)).hexdigest() == served.digest
    # listens on loopback only
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    here = [address for _, address, _, state, *_ in sockets if state == "0A" and address.endswith(f":{port:04X}")]
    assert here == [f"0100007F:{port:04X}"]
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0


def test_both_directions_and_half_closed(served: Served, forwarded: Callable[..., tuple]):
    _, port = forwarded(served.run_id, served.echo)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        for number in range(50):
            connection.sendall(b"word %d" % number)
            answer = b""
            while len(answer) < len(b"word %d" % number):
                answer += connection.recv(4096)
            assert answer == b"WORD %d" % number
        sent = os.urandom(3_000_000).translate(None, bytes(range(97, 123)))

        def send() -> None:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=send)
        thread.start()
        back = b""
        while part := connection.recv(65536):
            back += part
        thread.join(10)
    assert back == sent + b"the end"


@pytest.mark.slow
def test_a_slow_reader_slows_its_writer(served: Served, forwarded: Callable[..., tuple], home: Home):
    """Unread data causes backpressure: no more than the windows and sockets hold is in flight."""
    process, port = forwarded(served.run_id, served.web)
    pool = home.pool_pid()

    def resident(pid: int) -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096

    before = resident(pool) + resident(process.pid)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.sendall(b"GET /big HTTP/1.0\r\n\r\n")
        assert connection.recv(1000)
        # others are served meanwhile
        assert get(port, "/small") == b"hello from the rank"
        assert resident(pool) + resident(process.pid) - before < BIG // 2


def test_it_ends_with_the_run_and_says_so(served: Served, forwarded: Callable[..., tuple]):
    process, port = forwarded(served.run_id, served.echo)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"one")
        assert connection.recv(10) == b"ONE"
        served.end()
        _, err = process.communicate(timeout=20)
        with contextlib.suppress(ConnectionError):
            assert connection.recv(10) in (b"", b"the end")
    assert process.returncode == 0
    assert f"run {served.run_id[:4]} has ended" in err


def test_ports_of_others_are_not_reached(served: Served, forwarded: Callable[..., tuple], home: Home):
    """A server of the same user that is no process of the run is none of its ports."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0.2)
        process, port = forwarded(served.run_id, other.getsockname()[1])
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection, contextlib.suppress(OSError):
            assert connection.recv(10) == b""
        with pytest.raises(TimeoutError):
            other.accept()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=10)
    assert "no process of the run listens on port" in err
    assert "a connection was refused" in err


@pytest.mark.parametrize(
    ("ports", "word"),
    [
        ("0", "is not a port"),
        ("http", "is not a port"),
        ("1:2:3", "is not a port"),
        ("70000", "is not a port"),
        ("-1", ""),
    ],
)
def test_what_is_no_port(kernel: Kernel, home: Home, ports: str, word: str):
    assert word in refused(home, "7f3a", ports)


def test_what_can_not_be_forwarded(served: Served, home: Home):
    assert "no run of yours" in refused(home, "0000000", "8000")
    assert "has no rank 7" in refused(home, served.run_id, str(served.web), "--rank", "7")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "can't listen on port" in refused(home, served.run_id, f"{port}:{served.web}")


# ------------------------------------------------------------ on other machines


ECHO = """
import os, socketserver, threading
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while part := self.request.recv(65536):
            self.request.sendall(os.environ['RANK'].encode() + part)
server = socketserver.ThreadingTCPServer(('127.0.0.1', 0), Echo)
threading.Thread(target=server.serve_forever, daemon=True).start()
print('echo', server.server_address[1], flush=True)
while not os.path.exists(stop):
    __import__('time').sleep(0.02)
"""


def echo_ports(run: FollowedRun, *ranks: int) -> list[int]:
    """Where the ranks' servers of a run listen."""
    count = 0
    while not all(run.printed.get(rank, "").endswith("\n") for rank in ranks):
        count += 1
        run.wait_for(OutputWritten, count)
    return [int(run.printed[rank].split()[1]) for rank in ranks]


def asked(port: int, text: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(text)
        return connection.recv(100)


@pytest.mark.slow
def test_each_rank_of_far_nodes(forwarded: Callable[..., tuple], tmp_path: Path):
    """A rank's port is that of its node: here the nodes are one machine, and only the rank's process tells."""
    home = Home({"SGPU_SIMULATE": "a10:2"})
    nodes = ManyAgents(home, 2, far=True)
    client = PoolClient(home)
    try:
        run = client.begin(ECHO, ranks=2, nodes=2, names={"stop": str(tmp_path / "stop")})
        ports = echo_ports(run, 0, 1)
        for rank in (0, 1):
            process, port = forwarded(run.run_id, ports[rank], "--rank", str(rank), home=home)
            assert asked(port, b"hello") == b"%dhello" % rank
            # a port of the other node's rank is not reachable through this node
            other, elsewhere = forwarded(run.run_id, ports[1 - rank], "--rank", str(rank), home=home)
            with contextlib.suppress(ConnectionError):
                assert asked(elsewhere, b"hello") == b""
            other.send_signal(signal.SIGINT)
            assert "no process of the run listens" in other.communicate(timeout=20)[1]
        (tmp_path / "stop").touch()
        assert run.ended().state is RunState.SUCCEEDED
        assert "has ended" in process.communicate(timeout=20)[1]
        assert process.returncode == 0
    finally:
        client.close()
        nodes.close()
        home.close()


@pytest.mark.slow
def test_over_a_link_that_breaks(forwarded: Callable[..., tuple], tmp_path: Path):
    """A connection ends with the link: nothing is ever missing in the middle. New ones come with the next link."""
    with served_pool() as served:
        line = Proxy(served.port)
        ann = served.user("ann", address=line.address)
        run = ann.client.begin(ECHO, ranks=1, names={"stop": str(tmp_path / "stop")})
        (there,) = echo_ports(run, 0)
        process, port = forwarded(run.run_id, there, home=ann.home)
        bob = served.user("bob")
        assert "no run of yours" in bob.sgpu("port-forward", run.run_id[:8], f"0:{there}").stderr
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(b"one")
            assert connection.recv(100) == b"0one"
            line.reset()
            with contextlib.suppress(ConnectionError):
                assert connection.recv(100) == b""
        eventually(lambda: _answers(port), 30)
        (tmp_path / "stop").touch()
        assert run.ended().state is RunState.SUCCEEDED
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
        assert "the link to the pool was broken" in err
        assert f"run {run.run_id[:4]} has ended" in err
        line.close()


def _answers(port: int) -> bool:
    try:
        return asked(port, b"two") == b"0two"
    except OSError:
        return False
