"""`sgpu doctor --pool NAME`: each step of the way to a pool on another machine, up to the first that fails."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from urllib.parse import urlsplit

import msgspec

from sgpu_magic.cli.finding import Finding, Level, ok, problem, warning
from sgpu_magic.cli.main import note
from sgpu_magic.client.connector import machine_of
from sgpu_magic.client.pool_choosing import describe_devices
from sgpu_magic.client.pools import Pools
from sgpu_magic.client.pools_file import PoolEntry
from sgpu_magic.client.ssh.transport import program_words
from sgpu_magic.client.this_machine import own_key_path
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError, UsageError
from sgpu_magic.formatting import format_seconds
from sgpu_magic.ssh.address import SshAddress, ssh_settings
from sgpu_magic.ssh.login import FarProgram, Login
from sgpu_magic.ssh.machines import Machine
from sgpu_magic.system.secure_sockets import read_key_pair
from sgpu_magic.wire.decoding import decode_json

_CHECKS = "sgpu_magic.cli.far_checks"
_CONNECT_S = 10.0
_BANNER = b"SSH-"
# a run's events and logs have times of both clocks
_CLOCK_S = 5.0
_NO_SSH = "Install OpenSSH's client, or name yours with the setting ssh_command."


def findings(settings: Settings, entry: PoolEntry) -> Iterator[Finding]:
    """Yield what is found, step by step; the first problem on the way to the pool is the last finding.

    Args:
        settings: The user's settings.
        entry: The pool.
    """
    if entry.ssh is not None:
        yield from _over_ssh(settings, entry, entry.ssh)
    else:
        yield from _served(settings, entry)


# ---------------------------------------------------------------- a machine over ssh


def _over_ssh(settings: Settings, entry: PoolEntry, address: SshAddress) -> Iterator[Finding]:
    try:
        found = ssh_settings(address, settings.ssh_command)
    except OSError as error:
        yield problem("ssh", f"`{settings.ssh_command}` can't be run: {error.strerror}", _NO_SSH)
        return
    except ValueError as error:
        yield problem("ssh", f"`{settings.ssh_command}` fails: {error}", "Fix your ssh configuration.")
        return
    host, port = found.get("hostname", address.host), int(found.get("port", "22"))
    through = next((found[name] for name in ("proxyjump", "proxycommand") if found.get(name, "none") != "none"), "")
    yield ok("ssh", f"{address.host} is {found.get('user', '')}@{host}, port {port}")
    if through:
        yield ok("name", f"it is reached through {through}")
    else:
        for finding in _port(host, port, _BANNER):
            yield finding
            if finding.level is Level.PROBLEM:
                return
    machine = machine_of(settings, entry, address)
    try:
        words = program_words(machine, entry.machines[1:])
    except PoolError as error:
        yield problem("ssh", error.message)
        return
    yield from at_machine(machine, words)


def at_machine(machine: Machine, words: tuple[str, ...] = ()) -> Iterator[Finding]:
    """Log in to a machine, and yield what is found there as it comes.

    Args:
        machine: The machine.
        words: The word for several machines (`ssh.machines.to_word`), of which this is the first, or none.
    """
    lines = queue.SimpleQueue[tuple[str, str, float] | None]()
    is_over = threading.Event()

    def log_in() -> None:
        program = FarProgram(_CHECKS, words)
        Login(machine, program, lambda word, text: lines.put((word, text, time.time())), is_over.is_set).close()

    began = time.time()
    with ThreadPoolExecutor(1) as thread:
        login = thread.submit(log_in)
        login.add_done_callback(lambda _: lines.put(None))
        try:
            while (line := lines.get()) is not None:
                yield from _of_line(*line, began)
        finally:
            is_over.set()
    try:
        login.result()
    except PoolError as error:
        yield problem(error.step or "machine", error.message)


def _of_line(word: str, text: str, at: float, began: float) -> Iterator[Finding]:
    if word == "shell":
        yield ok("login", f"/bin/sh runs on {text} after {format_seconds(at - began)}")
    elif word == "step" and text.startswith("found "):
        yield ok("python", text)
    elif word == "step":
        note(text)
    elif word == "clock":
        yield _clock(float(text), at)
    elif word == "finding":
        yield read_finding(text)


def read_finding(text: str) -> Finding:
    """Return a finding of the other machine."""
    try:
        return decode_json(text, type=Finding)
    except msgspec.DecodeError:
        return warning("machine", "the result of one check can't be read", "Run `sgpu doctor` there.")


def _clock(there: float, here: float) -> Finding:
    apart = there - here
    if abs(apart) <= _CLOCK_S:
        return ok("clock", f"{abs(apart):.1f} s from this machine's at most")
    side = "ahead of" if apart > 0 else "behind"
    text = f"it is {format_seconds(abs(apart))} {side} this machine's, so times of events and logs are wrong"
    return warning("clock", text, "Let both machines synchronize their clocks.")


# ---------------------------------------------------------------- a served pool


def _served(settings: Settings, entry: PoolEntry) -> Iterator[Finding]:
    try:
        read_key_pair(own_key_path())
    except FileNotFoundError:
        remedy = "`sgpu pool keygen` creates one; send its public half to the pool's operator."
        yield problem("key", f"there is none ({own_key_path()})", remedy)
        return
    except UsageError as error:
        yield problem("key", error.message)
        return
    yield ok("key", str(own_key_path()))
    url = urlsplit(entry.address)
    for finding in _port(url.hostname or "", url.port or 0):
        yield finding
        if finding.level is Level.PROBLEM:
            return
    with closing(Pools(settings)) as pools:
        (answer,) = pools.ask_status([entry], local=False, again=True)
    if answer.status is None:
        yield problem("pool", answer.problem)
    else:
        yield ok("pool", f"it has {describe_devices(answer.status)}")


# ---------------------------------------------------------------- both


def _port(host: str, port: int, banner: bytes = b"") -> Iterator[Finding]:
    """Look a name up and connect to a port, which must begin to talk with `banner`."""
    began = time.monotonic()
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        text = f"{host} is unknown here: {getattr(error, 'strerror', '') or error}"
        yield problem("name", text, "Check the name, and whether the network or VPN is up.")
        return
    yield ok("name", f"{host} is {found[0][4][0]}, looked up in {format_seconds(time.monotonic() - began)}")
    began = time.monotonic()
    remedy = "Check that the machine is up, the port, firewalls, and whether the network or VPN reaches it."
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_S) as connection:
            took = format_seconds(time.monotonic() - began)
            begins = connection.recv(64) if banner else b""
    except OSError as error:
        yield problem("port", f"port {port} of {host} can't be reached: {error.strerror or error}", remedy)
        return
    if begins.startswith(banner):
        yield ok("port", f"{port} answers in {took}")
    else:
        yield problem("port", f"what answers at port {port} of {host} is no ssh server: {begins!r}", remedy)
