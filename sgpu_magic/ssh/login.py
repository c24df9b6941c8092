"""Logs in to a machine and prepares it, until a program of this package runs there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import select
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import IO, Literal, NoReturn

import msgspec

from sgpu_magic import __version__
from sgpu_magic.errors import PoolError
from sgpu_magic.formatting import count_of
from sgpu_magic.ssh.address import login_command
from sgpu_magic.ssh.failures import failure_of_machine, failure_of_silence, failure_of_ssh
from sgpu_magic.ssh.machines import Machine
from sgpu_magic.ssh.package import this_package
from sgpu_magic.system.part_stream import PipeStream
from sgpu_magic.system.processes import die_with_parent
from sgpu_magic.system.secure_sockets import MAX_FRAME_BYTES
from sgpu_magic.wire import codec

_CHECK = (
    "import sys\n"
    "if sys.version_info < (3, 11): sys.exit('is Python %d.%d' % sys.version_info[:2])\n"
    "from importlib import metadata\n"
    "try: print('Python %d.%d, torch %s' % (*sys.version_info[:2], metadata.version('torch')))\n"
    "except metadata.PackageNotFoundError: sys.exit('(Python %d.%d) has no torch' % sys.version_info[:2])\n"
)
_FOLDER = ".local/share/sgpu-magic/ssh"
# to the first sign of /bin/sh, and between two steps: an installer may load gigabytes
_SHELL_S, _STEP_S = 60.0, 1800.0
_POLL_S = 0.25
_KEPT_BYTES = 64 << 10
_PART_BYTES = 1 << 20
_END_S = 2.0


class FarProgram(msgspec.Struct, frozen=True):
    """What runs at the far end of a login, in the environment that was made there.

    Args:
        module: A module of this package.
        words: Its arguments after the login's mark, without blanks.
        prepares: When to make the environment if it is not there: `always`, `again` (only if a login has made another
            one before), or `never`. Where it is not made, the login fails with `PoolIdle`.
    """

    module: str
    words: tuple[str, ...] = ()
    prepares: Literal["always", "again", "never"] = "always"


class Login:
    """A login that has got as far as the program at its far end. Used from one thread.

    Args:
        machine: The machine.
        program: What runs at the far end.
        on_line: Called with each line that comes before the program is ready or done: a word, and its text. That of
            `step` is for people, that of `shell` the machine's name for itself.
        is_over: Asked now and then whether the login is no longer wanted.
        command: A command whose standard input and output are those of a POSIX shell on the machine, in place of ssh.

    Attributes:
        host: The name that the machine gives itself.
        stream: The messages, if the program passes messages.
        result: What the program has ended with, if it does not.

    Raises:
        PoolIdle: Nothing runs there, and nothing is to be started.
        PoolError: The machine can't be reached or prepared, or there is no ssh here.
    """

    def __init__(
        self,
        machine: Machine,
        program: FarProgram,
        on_line: Callable[[str, str], None],
        is_over: Callable[[], bool] = lambda: False,
        *,
        command: Sequence[str] | None = None,
    ) -> None:
        self._machine = machine
        self._on_line = on_line
        self._is_over = is_over
        self._mark = f"sgpu-{secrets.token_hex(8)}"
        self.host = self.result = ""
        # what came before the mark's first line, and on standard error
        self._dropped = self._errors = b""
        self._seen: list[str] = []
        self._process = self._start(command)
        try:
            self._write(_script(machine, self._mark, program).encode("utf-8", "surrogateescape"))
            self._follow()
            self.stream = PipeStream(self.reading, self.writing, MAX_FRAME_BYTES, codec.MAX_PARTS)
        except BaseException:
            self.close()
            raise

    @property
    def reading(self) -> int:
        """The descriptor to read."""
        return _pipe(self._process.stdout).fileno()

    @property
    def writing(self) -> int:
        """The descriptor to write."""
        return _pipe(self._process.stdin).fileno()

    def drain_errors(self) -> None:
        """Read what ssh has written to its standard error, so that it never waits for a reader."""
        errors = _pipe(self._process.stderr)
        with contextlib.suppress(OSError):
            while select.select([errors], [], [], 0)[0] and (data := os.read(errors.fileno(), 4096)):
                self._errors = (self._errors + data)[-_KEPT_BYTES:]

    def close(self, patience_s: float = _END_S) -> None:
        """End the login: the program ends with its input, and ssh with it.

        Args:
            patience_s: Seconds after which ssh is killed.
        """
        process, until = self._process, time.monotonic() + patience_s
        with contextlib.suppress(OSError):
            _pipe(process.stdin).close()
        with contextlib.suppress(OSError):
            # a program that can't write its last words would hang, or fail
            while select.select([self.reading], [], [], max(until - time.monotonic(), 0))[0]:
                if not os.read(self.reading, _KEPT_BYTES):
                    break
        try:
            process.wait(max(until - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdout, process.stderr):
            _pipe(pipe).close()

    # ------------------------------------------------------------ internals

    def _start(self, command: Sequence[str] | None) -> subprocess.Popen[bytes]:
        machine, parent = self._machine, os.getpid()
        try:
            command = command or login_command(machine.address, machine.ssh_command)
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                # an interrupt in a terminal is meant for the cell
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent),
            )
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise PoolError(
                f"{machine.title} can't be reached, as `{machine.ssh_command}` can't be run: {why}. Install "
                "OpenSSH's client, or name yours with the setting ssh_command."
            ) from None

    def _write(self, data: bytes) -> None:
        """Write all of `data`: the other side reads it now."""
        view = memoryview(data)
        os.set_blocking(self.writing, False)
        deadline = time.monotonic() + _SHELL_S
        while view:
            if self._is_over():
                raise PoolError(f"the login to {self._machine.name} was given up.")
            if not select.select([], [self.writing], [], _POLL_S)[1]:
                if time.monotonic() > deadline:
                    self._fail_silent()
                continue
            try:
                view = view[os.write(self.writing, view) :]
                deadline = time.monotonic() + _SHELL_S
            except BrokenPipeError:
                self._fail()

    def _follow(self) -> None:
        """Read the other side's lines and answer them until its program is ready or done."""
        buffer = bytearray()
        mark = f"\n{self._mark} ".encode("ascii")
        deadline = time.monotonic() + _SHELL_S
        while True:
            while (at := buffer.find(mark)) >= 0 and (end := buffer.find(b"\n", at + len(mark))) >= 0:
                self._dropped = (self._dropped + buffer[:at])[-_KEPT_BYTES:]
                word, _, text = buffer[at + len(mark) : end].decode(errors="replace").partition(" ")
                del buffer[: end + 1]
                if word in ("ready", "done"):
                    if buffer:
                        raise PoolError(f"the machine of {self._machine.title} sent something unasked.")
                    self.result = text
                    return
                self._handle(word, text)
                deadline = time.monotonic() + _STEP_S
            if len(buffer) > _KEPT_BYTES:
                self._dropped, buffer = bytes(buffer[:_KEPT_BYTES]), buffer[-len(mark) * 8 :]
            if self._is_over():
                raise PoolError(f"the login to {self._machine.name} was given up.")
            self.drain_errors()
            if not select.select([self.reading], [], [], _POLL_S)[0]:
                if time.monotonic() > deadline:
                    self._fail_silent()
                continue
            if not (data := os.read(self.reading, 4096)):
                self._dropped = (self._dropped + buffer)[-_KEPT_BYTES:]
                self._fail()
            buffer += data

    def _handle(self, word: str, text: str) -> None:
        match word:
            case "shell":
                self.host = text
                self._on_line(word, text)
            case "seen":
                self._seen.append(text)
            case "need" if text == "wheels":
                self._send_wheels()
            case "need":
                package = this_package()
                sizes = f"{package.digest} {len(package.data)} {__version__} {int(bool(self._machine.wheels))}"
                head = (sizes, *package.requires, "", "")
                self._on_line("step", f"sending sgpu-magic {__version__}")
                self._write("\n".join(head).encode("utf-8") + package.data)
            case "failed":
                kind, _, details = text.partition(" ")
                raise failure_of_machine(self._machine, kind, details, self._seen)
            case _:
                self._on_line(word, text)

    def _send_wheels(self) -> None:
        """Send the number of wheels, then for each a line with its name and size, and its bytes.

        Raises:
            PoolError: They can't be read.
        """
        folder = Path(self._machine.wheels)
        try:
            wheels = [(path, path.stat().st_size) for path in sorted(folder.glob("*.whl"))]
            self._on_line("step", f"sending {count_of(len(wheels), 'wheel')} from {folder}")
            self._write(f"{len(wheels)}\n".encode("ascii"))
            for path, size in wheels:
                self._write(f"{path.name} {size}\n".encode("utf-8", "surrogateescape"))
                with path.open("rb") as file:
                    while size > 0 and (part := file.read(min(size, _PART_BYTES))):
                        self._write(part)
                        size -= len(part)
                if size:
                    raise PoolError(f"the wheel {path} was shortened while it was sent. Run the cell again.")
        except OSError as error:
            raise PoolError(f"the wheels in {folder} can't be read: {error.strerror}.") from None

    def _fail_silent(self) -> NoReturn:
        """Raise that nothing comes any more."""
        machine = self._machine
        if not self.host:
            raise failure_of_silence(machine, _SHELL_S)
        raise PoolError(f"{machine.title} can't be started on {self.host}: a step there took too long.")

    def _fail(self) -> NoReturn:
        """Raise why the login ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self.drain_errors()
        errors, dropped = self._errors.decode(errors="replace"), self._dropped.decode(errors="replace")
        if not self.host:
            raise failure_of_ssh(self._machine, errors, dropped)
        said = (errors.strip() or dropped.strip() or "nothing").splitlines()[-1]
        raise PoolError(
            f"{self._machine.title} can't be started on {self.host}: a step there ended without a word. The last line "
            f"that it wrote is: {said}"
        )


def _script(machine: Machine, mark: str, program: FarProgram) -> str:
    package = this_package()
    chosen = hashlib.sha256(os.fsencode(f"{machine.python}\0{machine.prologue}\0{machine.wheels}")).hexdigest()[:8]
    values = {
        "mark": mark,
        "ready": f"{_FOLDER}/{package.digest[:16]}-{chosen}.python",
        "wanted": machine.python,
        "prologue": machine.prologue,
        "check": _CHECK,
        "prepare": _text("prepare.py"),
        "module": program.module,
        "order": " ".join(program.words),
        "prepares": program.prepares,
    }
    lines = [f"{name}={shlex.quote(value)}\n" for name, value in values.items()]
    return "".join(lines) + _text("find_python.sh")


def _text(name: str) -> str:
    return resources.files("sgpu_magic.ssh").joinpath(name).read_text()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise ValueError("ssh is started with pipes")
    return pipe
