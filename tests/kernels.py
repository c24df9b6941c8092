"""Real kernels in a home of their own, for the end-to-end tests.

Home      a pool's directories in a short temporary place, and every process that belongs to it
Kernel    one ipykernel in a home, driven as a front end does
Reply     what a cell's execution sent back
eventually   wait for a condition with a deadline
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_POLL_S = 0.02
# fds that a rank costs the agent: two pipes, a socket, a pidfd
_AGENT_FDS_PER_RANK = 4
_NOT_INHERITED = (
    "SGPU_",
    "JPY_",
    "JUPYTER_",
    "IPYTHON",
    "PYTEST_",
    "MPLBACKEND",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
)


def eventually(condition: Callable[[], Any], deadline_s: float = 10.0, what: str = "") -> Any:
    """Return the condition's value once it is true.

    Args:
        condition: Asked again and again.
        deadline_s: Seconds after which the test fails.
        what: What is waited for; a callable is asked for the text at the end.
    """
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s:g} s: {what() if callable(what) else what}")
        time.sleep(_POLL_S)


def plain(text: str) -> str:
    """The text without colours."""
    return _ANSI.sub("", text)


@dataclass
class Output:
    """One output below a cell, in its last form: `stream`, `display` or `result`."""

    kind: str
    data: dict[str, Any]
    display_id: str = ""
    stream: str = ""

    @property
    def text(self) -> str:
        return plain(str(self.data.get("text/plain", "")))

    @property
    def html(self) -> str:
        return str(self.data.get("text/html", ""))


@dataclass
class Reply:
    """What a cell's execution sent back.

    Args:
        status: `ok`, `error` or `aborted`; "" while it runs.
        ename, evalue, traceback: The error, the traceback without colours as one text.
        outputs: In the order in which they stand below the cell, each in its last form.
        seconds: From sending the request to the end.
        completed: Other messages of interest, by their type.
    """

    status: str = ""
    ename: str = ""
    evalue: str = ""
    traceback: str = ""
    outputs: list[Output] = field(default_factory=list)
    seconds: float = 0.0
    execution_count: int = 0
    messages: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Everything that a reader sees below the cell as text, except the error."""
        return "\n".join(output.text.rstrip("\n") for output in self.outputs if output.text)

    @property
    def streams(self) -> str:
        """What was printed by the kernel itself."""
        return "".join(output.text for output in self.outputs if output.kind == "stream")

    @property
    def displays(self) -> list[dict[str, Any]]:
        """Data of every display, in order."""
        return [output.data for output in self.outputs if output.kind == "display"]

    @property
    def html(self) -> str:
        return "\n".join(output.html for output in self.outputs if output.html)

    @property
    def result(self) -> str:
        """The `Out[]` text, "" without one."""
        return next((output.text for output in self.outputs if output.kind == "result"), "")

    def lines(self, rank: int) -> list[str]:
        """The lines that are shown with this rank's prefix."""
        mark = f"[{rank}] "
        return [line[len(mark) :] for line in self.text.splitlines() if line.startswith(mark)]

    @property
    def story(self) -> str:
        """All that can help to understand a failed check."""
        return f"{self.status} after {self.seconds:.2f} s\n{self.text}\n{self.traceback or self.evalue}"


class Home:
    """Directories of one pool, away from every other, and the processes that belong to it.

    Args:
        variables: Further environment variables of everything in it.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        # short: a socket's path ends at 108 bytes
        self.path = Path(tempfile.mkdtemp(prefix="sgt"))
        for name in ("state", "run", "lock", "work", "tmp", "ipython", "jupyter"):
            (self.path / name).mkdir(mode=0o700)
        environ = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_INHERITED)}
        self.environ = environ | {
            "SGPU_STATE_DIR": str(self.state),
            "SGPU_RUNTIME_DIR": str(self.runtime),
            "SGPU_LOCK_DIR": str(self.path / "lock"),
            "SGPU_CONFIG": str(self.path / "no-config.toml"),
            "TMPDIR": str(self.path / "tmp"),
            "IPYTHONDIR": str(self.path / "ipython"),
            "JUPYTER_CONFIG_DIR": str(self.path / "jupyter"),
            "JUPYTER_DATA_DIR": str(self.path / "jupyter"),
            "JUPYTER_RUNTIME_DIR": str(self.path / "jupyter"),
            **(variables or {}),
        }
        self.kernel_pids: set[int] = set()
        self._levels: dict[int, dict[str, int]] = {}

    @property
    def state(self) -> Path:
        return self.path / "state"

    @property
    def runtime(self) -> Path:
        return self.path / "run"

    @property
    def work(self) -> Path:
        """Working directory of the kernels."""
        return self.path / "work"

    @property
    def runs(self) -> list[str]:
        """Ids of the runs that have a directory, oldest first."""
        folder = self.state / "runs"
        found = list(folder.iterdir()) if folder.is_dir() else []
        return [entry.name for entry in sorted(found, key=lambda entry: entry.stat().st_mtime_ns)]

    def run_dir(self, run_id: str) -> Path:
        return self.state / "runs" / run_id

    # ------------------------------------------------------------ processes

    def pool_pid(self) -> int | None:
        """The living pool's pid."""
        try:
            pid = int(json.loads((self.runtime / "pool.json").read_bytes())["pid"])
        except (OSError, ValueError, KeyError):
            return None
        return pid if is_alive(pid) else None

    def processes(self) -> dict[int, Process]:
        """Every process of this home: those with its paths in their environment, and all below the pool."""
        table = process_table()
        mark = str(self.path).encode()
        found = {pid: process for pid, process in table.items() if mark in process.environ}
        pool = self.pool_pid()
        if pool is not None:
            found.update({pid: table[pid] for pid in [pool, *below(pool, table)] if pid in table})
        return found

    def agent_pids(self) -> list[int]:
        pool = self.pool_pid()
        return [pid for pid, process in self.processes().items() if process.parent == pool]

    def zygote_pids(self) -> list[int]:
        agents = self.agent_pids()
        return [pid for pid, process in self.processes().items() if process.parent in agents]

    def rank_pids(self) -> list[int]:
        """Ranks of runs; those that stand by are not among them (they have no working directory yet)."""
        zygotes = self.zygote_pids()
        return [pid for pid, p in self.processes().items() if p.parent in zygotes and p.cwd != "/"]

    def standby_pids(self) -> list[int]:
        zygotes = self.zygote_pids()
        return [pid for pid, p in self.processes().items() if p.parent in zygotes and p.cwd == "/"]

    def unexpected(self) -> dict[int, str]:
        """Processes that nobody needs while no run goes on: pid and what it is."""
        processes = self.processes()
        pool = self.pool_pid()
        expected = {pid for pid in self.kernel_pids if pid in processes}
        if pool is not None:
            expected.add(pool)
            agents = {pid for pid, p in processes.items() if p.parent == pool}
            zygotes = {pid for pid, p in processes.items() if p.parent in agents and "zygote" in p.command}
            standby = {pid for pid, p in processes.items() if p.parent in zygotes and p.cwd == "/"}
            expected |= agents | zygotes | standby
        return {pid: str(processes[pid]) for pid in processes.keys() - expected}

    # ------------------------------------------------------------ leaks

    def check_leaks(self) -> None:
        """Wait until nothing is left of what ran; fail if something stays."""
        eventually(lambda: not self.unexpected(), 10, lambda: f"processes are left behind: {self.unexpected()}")
        pool = self.pool_pid()
        agents = self.agent_pids()
        watched = [pid for pid in (pool, *agents, *self.kernel_pids) if pid is not None and is_alive(pid)]
        for pid in watched:
            kind = "pool" if pid == pool else "agent" if pid in agents else "kernel"
            if pid not in self._levels:
                eventually(lambda pid=pid: level(pid) == level(pid), 5, f"the {kind} does not settle")
                self._levels[pid] = level(pid)
                continue
            before = self._levels[pid]
            if level(pid)["libraries"] != before["libraries"]:
                # the notebook has imported something that may have threads of its own
                before = self._levels[pid] = level(pid)
            eventually(
                lambda pid=pid, before=before: _no_more(level(pid), before),
                10,
                lambda pid=pid, before=before, kind=kind: (
                    f"the {kind} ({pid}) grew: {before} -> {level(pid)}; {sorted(descriptors(pid).values())}"
                ),
            )
        for pid in agents:
            eventually(
                lambda pid=pid: _memory_files(pid) == 0,
                10,
                lambda pid=pid: f"the agent holds memory files: {descriptors(pid)}",
            )

    def close(self) -> None:
        """Stop the pool and check that everything of this home is gone, then remove its directories."""
        pool = self.pool_pid()
        problem = ""
        try:
            if pool is not None:
                stop_process(pool, signal.SIGTERM, 10)
            eventually(lambda: not self.processes(), 10, lambda: f"left after the pool's end: {self.processes()}")
            left = [entry.name for entry in self.runtime.iterdir() if entry.name != "pool.lock"]
            problem = f"left in the runtime directory: {left}" if left else ""
        finally:
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(self.path, ignore_errors=True)
        assert not problem, problem


class Kernel:
    """An ipykernel in a home.

    Args:
        home: Its home.
        load: Run `%load_ext sgpu_magic` first.
        variables: Further environment variables.
    """

    def __init__(self, home: Home, *, load: bool = True, variables: Mapping[str, str] | None = None) -> None:
        self.home = home
        self._manager = KernelManager()
        self._manager._kernel_spec = KernelSpec(
            argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            language="python",
            display_name="test",
        )
        self._manager.connection_file = str(home.path / f"kernel-{os.urandom(4).hex()}.json")
        self._log = open(home.path / "kernel.log", "ab")  # noqa: SIM115  closed with the kernel
        self._manager.start_kernel(
            env=home.environ | dict(variables or {}), cwd=str(home.work), stdout=self._log, stderr=self._log
        )
        self._replies: dict[str, Reply] = {}
        self._connect()
        if load:
            self.check("%load_ext sgpu_magic")

    def _connect(self) -> None:
        self.client = self._manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.home.kernel_pids.add(self.pid)

    @property
    def pid(self) -> int:
        return self._manager.provisioner.pid

    # ------------------------------------------------------------ cells

    def start(self, code: str, *, stop_on_error: bool = True, silent: bool = False) -> Cell:
        """Send a cell without waiting for it."""
        msg_id = self.client.execute(code, stop_on_error=stop_on_error, silent=silent)
        reply = self._replies[msg_id] = Reply()
        return Cell(self, msg_id, reply)

    def run(self, code: str, timeout_s: float = 60.0, *, stop_on_error: bool = False) -> Reply:
        """Run a cell and return all that it sent back."""
        return self.start(code, stop_on_error=stop_on_error).wait(timeout_s)

    def check(self, code: str, timeout_s: float = 60.0) -> Reply:
        """Run a cell that has to succeed."""
        reply = self.run(code, timeout_s)
        assert reply.status == "ok", reply.story
        return reply

    def value(self, expression: str) -> Any:
        """The expression's value in the notebook (what JSON can hold)."""
        wrapped = f"__import__('json').dumps({expression})"
        msg_id = self.client.execute("", silent=True, user_expressions={"value": wrapped})
        while True:
            message = self.client.get_shell_msg(timeout=30)
            if message["parent_header"].get("msg_id") == msg_id:
                found = message["content"]["user_expressions"]["value"]
                assert found["status"] == "ok", f"{expression}: {found['ename']}: {found['evalue']}"
                return json.loads(ast.literal_eval(found["data"]["text/plain"]))

    def complete(self, code: str) -> list[str]:
        """What the completer offers at the end of `code`."""
        return self.client.complete(code, len(code), reply=True, timeout=30)["content"]["matches"]

    # ------------------------------------------------------------ life

    def interrupt(self) -> None:
        """What the stop button does."""
        self._manager.interrupt_kernel()

    def restart(self) -> None:
        """What the restart button does; the extension is not loaded afterwards."""
        self.client.stop_channels()
        self.home.kernel_pids.discard(self.pid)
        self._manager.restart_kernel(now=False)
        self._connect()

    def kill(self) -> None:
        """SIGKILL, as the system does when memory is short."""
        os.kill(self.pid, signal.SIGKILL)
        self._manager.provisioner.process.wait(10)

    def close(self) -> None:
        """Shut the kernel down as a server does."""
        pid = self.pid
        try:
            self.client.stop_channels()
            if pid is not None:
                self._manager.shutdown_kernel(now=not self._manager.is_alive())
        finally:
            self._manager.cleanup_resources()
            self._log.close()
            self.home.kernel_pids.discard(pid)

    # ------------------------------------------------------------ messages

    def _pump(self, timeout_s: float) -> str:
        """Take one message from iopub to its reply; return the request's id when it is done with."""
        try:
            message = self.client.get_iopub_msg(timeout=timeout_s)
        except Empty:
            return ""
        msg_id = message["parent_header"].get("msg_id", "")
        reply = self._replies.get(msg_id)
        if reply is None:
            return ""
        kind, content = message["msg_type"], message["content"]
        reply.messages.append(kind)
        if kind == "status" and content["execution_state"] == "idle":
            return msg_id
        _take(reply, kind, content)
        return ""

    def _finish(self, msg_id: str, reply: Reply) -> None:
        while True:
            message = self.client.get_shell_msg(timeout=30)
            if message["parent_header"].get("msg_id") in self._replies:
                other = self._replies[message["parent_header"]["msg_id"]]
                other.status = message["content"]["status"]
                other.execution_count = message["content"].get("execution_count", 0) or 0
            if reply.status:
                return


@dataclass
class Cell:
    """A cell that was sent."""

    kernel: Kernel
    msg_id: str
    reply: Reply
    began: float = field(default_factory=time.monotonic)
    idle: bool = False

    def wait(self, timeout_s: float = 60.0) -> Reply:
        """Return its reply when it is over."""
        self._pump_until(lambda: self.idle, timeout_s, "the cell's end")
        if not self.reply.status:
            self.kernel._finish(self.msg_id, self.reply)
        self.reply.seconds = time.monotonic() - self.began
        return self.reply

    def until_shown(self, text: str, timeout_s: float = 30.0) -> None:
        """Wait until `text` is below the cell."""
        self._pump_until(lambda: text in self.reply.text, timeout_s, f"{text!r} below the cell")

    def until(self, condition: Callable[[], Any], timeout_s: float = 30.0, what: str = "") -> None:
        """Wait for a condition while the cell's messages are taken."""
        self._pump_until(condition, timeout_s, what or "the condition")

    def _pump_until(self, condition: Callable[[], Any], timeout_s: float, what: str) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"not within {timeout_s:g} s: {what}\n{self.reply.story}")
            self.idle |= self.kernel._pump(0.05) == self.msg_id


def _take(reply: Reply, kind: str, content: Mapping[str, Any]) -> None:
    match kind:
        case "stream":
            last = reply.outputs[-1] if reply.outputs else None
            if last is not None and last.kind == "stream" and last.stream == content["name"]:
                last.data["text/plain"] += content["text"]
            else:
                reply.outputs.append(Output("stream", {"text/plain": content["text"]}, stream=content["name"]))
        case "display_data":
            display_id = content.get("transient", {}).get("display_id", "")
            reply.outputs.append(Output("display", content["data"], display_id))
        case "update_display_data":
            display_id = content.get("transient", {}).get("display_id", "")
            for output in reply.outputs:
                if output.display_id == display_id:
                    output.data = content["data"]
        case "execute_result":
            reply.outputs.append(Output("result", content["data"]))
        case "clear_output":
            reply.outputs.clear()
        case "error":
            reply.ename, reply.evalue = content["ename"], content["evalue"]
            reply.traceback = plain("\n".join(content["traceback"]))
        case _:
            pass


# ---------------------------------------------------------------- processes


@dataclass(frozen=True)
class Process:
    """One row of the process table."""

    pid: int
    parent: int
    state: str
    command: str
    cwd: str
    environ: bytes

    def __str__(self) -> str:
        return f"{self.pid} (parent {self.parent}, {self.state}) {self.command[:120]}"

    __repr__ = __str__


def process_table() -> dict[int, Process]:
    """All processes of this machine; zombies have neither command nor environment."""
    found: dict[int, Process] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        base = Path("/proc") / entry
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = (base / "stat").read_bytes().rpartition(b")")[2].split()
            command = (base / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            cwd, environ = "", b""
            with contextlib.suppress(OSError):
                cwd, environ = os.readlink(base / "cwd"), (base / "environ").read_bytes()
            found[int(entry)] = Process(int(entry), int(fields[1]), fields[0].decode(), command, cwd, environ)
    return found


def below(root: int, table: Mapping[int, Process]) -> list[int]:
    """Pids below `root`."""
    found: list[int] = []
    current = [root]
    while current:
        current = [pid for pid, process in table.items() if process.parent in current]
        found += current
    return found


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def wait_gone(pid: int, deadline_s: float = 10.0) -> None:
    """Wait until the process has ended."""
    eventually(lambda: not is_alive(pid), deadline_s, f"process {pid} does not end")


def stop_process(pid: int, number: int, deadline_s: float) -> None:
    """Signal a process that is not our child and wait for its end."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(descriptor, number)
        ready, _, _ = select.select([descriptor], [], [], deadline_s)
        assert ready, f"process {pid} did not end within {deadline_s:g} s of signal {number}"
    finally:
        os.close(descriptor)


def descriptors(pid: int) -> dict[int, str]:
    """Open descriptors of a process and what they are."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found[int(entry)] = os.readlink(f"/proc/{pid}/fd/{entry}")
    return found


def thread_count(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def library_count(pid: int) -> int:
    """Shared libraries that the process has loaded."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return 0
    return len({line.split(maxsplit=5)[-1] for line in lines if ".so" in line})


def level(pid: int) -> dict[str, int]:
    """What must not grow: descriptors (less those of ranks and payloads), threads, memory files."""
    links = list(descriptors(pid).values())
    ranks = sum("pidfd" in link for link in links)
    memory = _memory_files(pid)
    return {
        "fds": len(links) - _AGENT_FDS_PER_RANK * ranks - memory,
        "threads": thread_count(pid),
        "libraries": library_count(pid),
        "memory files": memory,
    }


def _memory_files(pid: int) -> int:
    return sum(link.startswith("/memfd:sgpu") for link in descriptors(pid).values())


def _no_more(now: Mapping[str, int], before: Mapping[str, int]) -> bool:
    # a second zygote and a timer's thread come and go; a kernel keeps two memory files for a minute
    return all(now[name] <= before[name] + 2 for name in before)
