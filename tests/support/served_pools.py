"""Pools served on a TCP port, and clients on other machines.

The pool and each client have their own homes; clients see only the pool's port.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from homes import Home
from msgspec.structs import replace
from pool_client import PoolClient, set_environ
from waiting import eventually

from sgpu_magic.client.pool import Pool
from sgpu_magic.client.pools_file import PoolEntry, add_pool
from sgpu_magic.config import load_settings
from sgpu_magic.system.secure_sockets import KeyPair, new_key_pair, write_key_pair

SGPU = str(Path(sys.executable).with_name("sgpu"))
_START_S = 30
_LAST_WORDS = "all ranks run as"
_END_S = 20


class ServedHome(Home):
    """Directories of a served pool."""

    name = "team"

    @property
    def state(self) -> Path:
        return self.path / "state" / "pools" / self.name

    @property
    def runtime(self) -> Path:
        return self.path / "run" / self.name


class ServedPool:
    """`sgpu pool serve` in the foreground, in its own process group.

    Args:
        variables: Further settings of the pool.
        engine: `local` or `ray`.
        listen: The address to listen on; port `*` is a free one.
        inside: Prefix of the command, such as `ip netns exec NAME`.
        arguments: Further options of `sgpu pool serve`. With `--same-files`, the default, ranks run this Python.

    Attributes:
        home: Its directories and processes.
        entry: Its entry for a client's `pools.toml`.
        words: The text that it printed when it was ready.
    """

    def __init__(
        self,
        variables: Mapping[str, str] | None = None,
        *,
        engine: str = "local",
        listen: str = "tcp://127.0.0.1:*",
        inside: Sequence[str] = (),
        arguments: Sequence[str] = ("--same-files",),
    ) -> None:
        self.home = ServedHome(
            {"SGPU_STATE_DIR": "", "SGPU_RUNTIME_DIR": "", "SGPU_LINK_TIMEOUT_S": "60", **(variables or {})}
        )
        self.home.environ |= {
            "SGPU_STATE_DIR": str(self.home.path / "state"),
            "SGPU_RUNTIME_DIR": str(self.home.path / "run"),
        }
        self.home.pool_listens = True
        self._command = [*inside, SGPU, "pool", "serve", "--engine", engine, *arguments]
        self._clients: list[RemoteUser] = []
        self.listen = listen
        self.words = ""
        self.process: subprocess.Popen[str] | None = None
        self.start()
        found = re.search(r"(tcp://\S+:(\d+)) · .* --key '([^']+)'", self.words)
        assert found is not None, self.words
        self.port = int(found[2])
        self.entry = PoolEntry(self.home.name, found[1], found[3])
        # reused when the pool is restarted
        self.listen = found[1]

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Start the pool, and wait until it listens."""
        log = self.home.path / "served.log"
        with open(log, "a") as stderr:
            self.process = subprocess.Popen(
                [*self._command, "--listen", self.listen, "--name", self.home.name],
                env=self.home.environ,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        stdout = self.process.stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], _START_S)
        self.words = stdout.readline() if ready else ""
        line = self.words
        while line and not line.startswith(_LAST_WORDS):
            # the lines arrive together
            line = stdout.readline()
            self.words += line
        if not self.words:
            self.kill()
            raise AssertionError(f"the pool did not start: {log.read_text()}")

    def kill(self) -> None:
        """Send SIGKILL, as the out-of-memory killer does; the ranks and the agent continue."""
        assert self.process is not None
        self.process.kill()
        self._reap()

    def stop(self) -> int:
        """Stop the pool as systemd does; return its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self._reap()

    def _reap(self) -> int:
        assert self.process is not None
        code = self.process.wait(_END_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def command(self, *arguments: str) -> str:
        """Return what `sgpu pool ACTION ...` prints on the pool's machine."""
        done = subprocess.run(
            [SGPU, "pool", *arguments, "--name", self.home.name],
            env=self.home.environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def user(
        self, name: str, *, admin: bool = False, address: str = "", key: str = "", listed: bool = True
    ) -> RemoteUser:
        """Return a new user on another machine.

        Args:
            name: The user's name.
            admin: The user may end all users' runs.
            address: The pool's address in the user's list; "" for the right one.
            key: The pool's key in the user's list; "" for the right one.
            listed: The pool accepts the user's key.
        """
        made = RemoteUser(name, replace(self.entry, address=address or self.entry.address, key=key or self.entry.key))
        self._clients.append(made)
        if listed:
            self.command("authorize", name, made.keys.public, *(["--admin"] if admin else []))
        return made

    def check_leaks(self) -> None:
        """Check the pool's home by `Home.check_leaks`."""
        self.home.check_leaks()

    def close(self) -> None:
        """Close the clients, then the pool, and check that nothing stays."""
        try:
            for client in self._clients:
                client.leave()
            if self.process is not None and self.process.poll() is None:
                assert self.stop() == 0
                eventually(lambda: not self.home.processes(), _END_S, lambda: f"left: {self.home.processes()}")
                left = {entry.name for entry in self.home.runtime.iterdir()} - {"pool.lock"}
                assert not left, f"left in the runtime directory: {left}"
            faults = (self.home.path / "served.log").read_text(errors="replace")
            assert "Traceback (most recent call last)" not in faults, faults[-4000:]
        finally:
            if self.process is not None and self.process.poll() is None:
                self.process.kill()
                self._reap()
            with contextlib.ExitStack() as homes:
                homes.callback(self.home.close)
                for client in self._clients:
                    # after the pool's end: the processes of a client's runs have its variables
                    homes.callback(client.home.close)


class RemoteUser:
    """A user of a served pool, with a home on another machine.

    Args:
        name: The user's name.
        entry: The pool's entry in the user's `pools.toml`.

    Attributes:
        home: The user's home, whose variables the user's kernels have.
        keys: The user's keys.
        notices: Notices from the pool.
        sendings: Messages about long uploads.
    """

    def __init__(self, name: str, entry: PoolEntry) -> None:
        self.name = name
        self.entry = entry
        self.home = Home()
        self.keys: KeyPair = new_key_pair()
        write_key_pair(self.home.path / "client.key", self.keys)
        add_pool(entry, self.home.path / "pools.toml")
        self.notices: list[str] = []
        self.sendings: list[str] = []
        self._client: PoolClient | None = None

    @property
    def client(self) -> PoolClient:
        """Return this process as a client of this user."""
        if self._client is None:
            self._client = self.new_client()
        return self._client

    def new_client(self, address: str = "") -> PoolClient:
        """Return a further client, connected to `address` if given; the caller closes it.

        This process's environment variables are not changed, since there may be several users.
        """
        before = dict(os.environ)
        try:
            set_environ(self.home.environ)
            entry = replace(self.entry, address=address or self.entry.address)
            pool = Pool(load_settings(self.home.environ), self.notices.append, entry, self.sendings.append)
            set_environ(before)
            return PoolClient(self.home, pool)
        finally:
            set_environ(before)

    def sgpu(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `sgpu ...` as this user."""
        return subprocess.run(
            [SGPU, *arguments],
            env=self.home.environ, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip

    def leave(self) -> None:
        """Close the user's client."""
        if self._client is not None:
            self._client.close()
            self._client = None


@contextlib.contextmanager
def served_pool(variables: Mapping[str, str] | None = None, **options: object) -> Iterator[ServedPool]:
    """Yield a `ServedPool`, and close it at the end."""
    made = ServedPool(variables, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()
