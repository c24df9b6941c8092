"""Checks of the system for `sgpu doctor`: host name, visible devices, memory files, processes, limits, encryption."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import zmq

from sgpu_magic.agent.watch.inventory import assigned_by_batch_system
from sgpu_magic.cli.finding import Finding, ok, problem, warning
from sgpu_magic.formatting import format_bytes, format_seconds
from sgpu_magic.system.processes import IS_LINUX
from sgpu_magic.system.secure_sockets import new_key_pair

_SLOW_LOOKUP_S = 1.0
_LOOKUP_DEADLINE_S = 10.0
_SMALL_SHARED_MEMORY_BYTES = 256 * 10**6
# while the agent starts 64 ranks and their standby group, each rank takes eight descriptors
_FILES_FOR_64 = 1024
_FILES_LEAST = 256
# a rank has about five threads, and each counts as a task
_TASKS_FOR_64 = 512
_TASKS_LEAST = 64
_PR_GET_CHILD_SUBREAPER = 37
# ZeroMQ with an optimized libsodium is several times faster on any recent processor
_SLOW_ENCRYPTION = 150e6
_MEASURED_S = 0.3
_MESSAGE_BYTES = 1 << 18


def hostname(slow_s: float = _SLOW_LOOKUP_S, deadline_s: float = _LOOKUP_DEADLINE_S) -> Iterator[Finding]:
    """Check that this machine's host name resolves quickly: gloo and c10d resolve it too.

    Args:
        slow_s: A look-up that takes longer is slow.
        deadline_s: Time after which the look-up is abandoned.
    """
    name = socket.gethostname()
    problems: list[str] = []
    seconds: list[float] = []

    def resolve() -> None:
        start = time.monotonic()
        try:
            socket.getaddrinfo(name, None)
        except (OSError, UnicodeError) as error:
            # UnicodeError: a part of the name is empty, or has more than 63 characters
            problems.append(getattr(error, "strerror", "") or str(error))
        seconds.append(time.monotonic() - start)

    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(deadline_s)
    remedy = f"Add a line `127.0.1.1 {name}` to /etc/hosts, or fix the name servers in /etc/resolv.conf."
    if not seconds:
        yield warning("hostname", f"{name}: no answer within {deadline_s:.0f} s", remedy)
    elif problems:
        text = f"{name} can't be resolved ({problems[0]}); code that rendezvouses by name fails"
        yield warning("hostname", text, remedy)
    elif seconds[0] > slow_s:
        yield warning("hostname", f"{name}: the look-up took {format_seconds(seconds[0])}", remedy)
    else:
        yield ok("hostname", f"{name}, looked up in {format_seconds(seconds[0])}")


def visible_devices(environ: Mapping[str, str]) -> Iterator[Finding]:
    name = "CUDA_VISIBLE_DEVICES"
    assigned = assigned_by_batch_system(environ)
    if assigned is not None:
        yield ok(name, f"{environ[name]!r}: a pool that is started in this batch job leases these GPUs only")
    elif name in environ:
        text = f"is set to {environ[name]!r}, which the pool ignores: it leases all GPUs that the driver lists"
        yield warning(name, text, "Unset it. A rank sees only the devices of its run, whatever the value.")


def memory_files() -> Iterator[Finding]:
    """Check memfd, which payloads use, and the size of /dev/shm, which user code may need."""
    if not IS_LINUX:
        yield ok("memory files", "this system has none: payloads go through files in the state directory")
        return
    try:
        os.close(os.memfd_create("sgpu-doctor", os.MFD_CLOEXEC))
    except (OSError, AttributeError) as error:
        text = f"memfd_create does not work ({error}): payloads go through files, which is slower"
        yield warning("memory files", text, "Use Linux 3.17 or newer, or allow memfd_create in the sandbox.")
    else:
        yield ok("memory files", "memfd works")
    try:
        total = shutil.disk_usage("/dev/shm").total
        text = format_bytes(total)
    except OSError as error:
        total, text = 0, f"can't be checked: {error.strerror}"
    if total < _SMALL_SHARED_MEMORY_BYTES:
        text += ": DataLoader workers in a cell may die with a bus error (runs themselves do not use it)"
        yield warning("/dev/shm", text, "Start the container with --shm-size=8g or --ipc=host.")
    else:
        yield ok("/dev/shm", text)


def encryption(slow_bytes_per_s: float = _SLOW_ENCRYPTION) -> Iterator[Finding]:
    """Check how fast ZeroMQ encrypts, which limits transfers to pools whose second port is closed. Takes < 1 s.

    Args:
        slow_bytes_per_s: A lower rate is slow.
    """
    name, rate = "encryption", _encrypted_per_s()
    text = f"{format_bytes(int(rate))} a second at most over the link to a pool on another machine"
    if not rate:
        text = "no encrypted message arrived within 5 s"
        yield warning(name, text, "Run it again when the machine is less busy.")
    elif rate >= slow_bytes_per_s:
        yield ok(name, text)
    else:
        yield warning(
            name,
            f"{text}: the machine is busy, or the libsodium in pyzmq's wheel lacks optimizations, as in most releases",
            "If you send large variables, let the firewall pass the pool's second port (its setting bulk_port), or "
            "build pyzmq with the system's ZeroMQ (on Debian and Ubuntu the package libzmq3-dev): pip install "
            "--force-reinstall --no-deps --no-binary pyzmq pyzmq",
        )


def _encrypted_per_s() -> float:
    """Return bytes per second from one encrypted socket to another, 0 if a message took longer than 5 s."""
    keys, own = new_key_pair(), new_key_pair()
    # separate contexts, because each context's thread encrypts or decrypts
    with (
        zmq.Context() as here,
        zmq.Context() as there,
        here.socket(zmq.PAIR) as client,
        there.socket(zmq.PAIR) as server,
    ):
        client.linger = server.linger = 0
        server.curve_server = True
        server.curve_secretkey = keys.secret.encode()
        port = server.bind_to_random_port("tcp://127.0.0.1")
        client.curve_serverkey = keys.public.encode()
        client.curve_publickey, client.curve_secretkey = own.public.encode(), own.secret.encode()
        client.connect(f"tcp://127.0.0.1:{port}")
        message = bytes(_MESSAGE_BYTES)
        received, began = -1, 0.0
        client.send(message)
        while received < 2 or time.monotonic() - began < _MEASURED_S:
            client.send(message)
            if not server.poll(5000):
                return 0.0
            server.recv()
            received += 1
            began = began or time.monotonic()
        return received * _MESSAGE_BYTES / (time.monotonic() - began)


def process_control() -> Iterator[Finding]:
    """Check pidfd, which reports a process's death at once, and subreapers, which keep descendants from escaping."""
    if not IS_LINUX:
        yield ok("process control", "no pidfd and no subreaper here: process deaths are noticed within a second")
        return
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        text = f"pidfd_open does not work ({error}): a dead kernel is noticed late"
        yield warning("pidfd", text, "Use Linux 5.3 or newer, or allow pidfd_open in the sandbox.")
    else:
        yield ok("pidfd", "works")
    if ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(ctypes.c_int()), 0, 0, 0) == 0:
        yield ok("subreaper", "works")
    else:
        text = "prctl(PR_SET_CHILD_SUBREAPER) is not allowed: a rank's own children may outlive it"
        yield warning("subreaper", text, "Allow prctl in the sandbox.")


def limits() -> Iterator[Finding]:
    """Check that the limits on open files and tasks allow 64 ranks."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if most == resource.RLIM_INFINITY else min(4096, most)
    remedy = f"Run `ulimit -n {wanted}` before you start Jupyter."
    if files == resource.RLIM_INFINITY or files >= _FILES_FOR_64:
        yield ok("open files", "no limit" if files == resource.RLIM_INFINITY else f"up to {files:,}")
    elif files >= _FILES_LEAST:
        yield warning("open files", f"up to {files:,}: too few for 64 ranks", remedy)
    else:
        yield problem("open files", f"up to {files:,}: too few for a pool", remedy)
    room, text = _task_room()
    if room is None or room >= _TASKS_FOR_64:
        yield ok("processes", text)
    else:
        say = problem if room < _TASKS_LEAST else warning
        yield say("processes", f"{text}: too few for 64 ranks", "Raise `ulimit -u`, or the container's pids limit.")


def _task_room() -> tuple[int | None, str]:
    """Return how many processes and threads can still be started, None without a limit, and a description."""
    room: list[tuple[int, str]] = []
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    # root is exempt
    if most != resource.RLIM_INFINITY and os.getuid() != 0:
        used = _own_tasks()
        room.append((most - used, f"ulimit -u {most:,}, {used:,} in use"))
    for folder in ("/sys/fs/cgroup", "/sys/fs/cgroup/pids"):
        with contextlib.suppress(OSError, ValueError):
            # "max" means no limit, and raises ValueError
            limit = int(Path(folder, "pids.max").read_text())
            used = int(Path(folder, "pids.current").read_text())
            room.append((limit - used, f"the container's limit {limit:,}, {used:,} in use"))
    return min(room) if room else (None, "no limit")


def _own_tasks() -> int:
    """Return the number of threads of this user's processes: each counts against the limit (setrlimit(2))."""
    processes = (process.info for process in psutil.process_iter(["uids", "num_threads"]))
    return sum(each["num_threads"] or 0 for each in processes if each["uids"] and each["uids"].real == os.getuid())
