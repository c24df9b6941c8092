"""Real builders of environments, ordered as an agent orders them."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from process_table import below, is_alive, process_table
from small_index import SmallIndex
from waiting import eventually

from sgpu_magic.packages.node.base_layer import layer_tag
from sgpu_magic.packages.node.refusals import own_platform, own_python
from sgpu_magic.packages.node.store import (
    BuildMoved,
    BuildOrder,
    BuildReady,
    BuildRefused,
    BuiltEnvironments,
    decode_update,
    encode,
)
from sgpu_magic.system import child_process
from sgpu_magic.wire.attachments import Environment

PATIENCE_S = 60.0


def environment_of(*requirements: str, **fields: Any) -> Environment:
    """Return an environment with these requirement lines, for this Python and platform."""
    fields = {"python": own_python(), "platform": own_platform(), "packages": len(requirements)} | fields
    digest = hashlib.sha256(repr((requirements, sorted(fields.items()))).encode()).hexdigest()[:32]
    return Environment(digest=digest, requirements=requirements, **fields)


class Nodes:
    """A node's environments and uv cache, in a test's folders.

    Args:
        folder: The test's own folder.
        index_url: The package index.
    """

    def __init__(self, folder: Path, index_url: str = "") -> None:
        self.root = folder / "environments"
        self.cache = folder / "uv-cache"
        self.index_url = index_url
        self.store = BuiltEnvironments(self.root)

    def name(self, environment: Environment) -> str:
        return f"{environment.digest}-{layer_tag()}"

    def begin(self, environment: Environment, **options: Any) -> Build:
        """Start a build; the options go into the order."""
        fields: dict[str, Any] = {"limit_bytes": 15_000_000_000, "budget_bytes": 50_000_000_000}
        order = BuildOrder(
            environment=environment,
            root=str(options.pop("root", self.root)),
            name=self.name(environment),
            **(fields | {"index_url": self.index_url} | options),
        )
        return Build(order, {"UV_CACHE_DIR": str(self.cache)})

    def build(self, environment: Environment, **options: Any) -> BuildReady | BuildRefused:
        """Build, and wait for the final message and the end of the process."""
        return self.begin(environment, **options).wait()

    def run(self, environment: Environment, code: str) -> str:
        """Run code with the environment's Python; return what it prints."""
        found = self.store.open(self.name(environment))
        assert found is not None
        built, lock = found
        try:
            done = subprocess.run([built.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60)
        finally:
            lock.close()
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def left(self) -> set[str]:
        """Return what is in the folder besides finished environments and the file of known sizes."""
        if not self.root.exists():
            return set()
        names = set(self.store.names())
        entries = {entry.name for entry in self.root.iterdir()} - names - {"locks", "sizes.json"}
        locks = self.root / "locks"
        return entries | ({f"locks/{entry.name}" for entry in locks.iterdir() if entry.name not in names})


class Build:
    """One builder process."""

    def __init__(self, order: BuildOrder, variables: Mapping[str, str]) -> None:
        self.link, self.process = child_process.start(
            [sys.executable, "-m", "sgpu_magic.packages.node"],
            [str(os.getpid())],
            environ={**os.environ, **variables, "UV_HTTP_RETRIES": "0"},
        )
        self.link.sendall(encode(order))
        self.link.shutdown(socket.SHUT_WR)
        self.news: list[BuildMoved] = []

    def wait(self) -> BuildReady | BuildRefused:
        """Wait for the process to end and return its final message."""
        last: BuildReady | BuildRefused | None = None
        with self.link.makefile("rb") as lines:
            for line in lines:
                sent = decode_update(line)
                if isinstance(sent, BuildMoved):
                    self.news.append(sent)
                else:
                    last = sent
        self.ended()
        assert last is not None, "the builder ended without a word"
        return last

    def ended(self) -> int:
        """Wait for the end of the process and of all that it has started."""
        status = self.process.wait(PATIENCE_S)
        self.link.close()
        return status

    def uv_pid(self, index: SmallIndex) -> int:
        """Return the pid of the installing uv, once it waits for the held `index`; other uv processes run before it."""
        assert index.kept_waiting.wait(20), "nobody asks the index"

        def found() -> int | None:
            table = process_table()
            pids = below({self.process.pid}, table)
            return next((pid for pid in pids if table[pid].command.partition(" ")[0].endswith("/uv")), None)

        return int(eventually(found, 20, "a uv process"))

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Kill only the builder; its children must end by themselves."""
        family = below({self.process.pid}, process_table())
        self.process.send_signal(number)
        self.ended()
        eventually(lambda: not [pid for pid in family if is_alive(pid)], 10, "what it has started goes on")
