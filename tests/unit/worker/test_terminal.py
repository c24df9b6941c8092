"""A rank's stdout and stderr, in a process of their own."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios

import pytest
from waiting import eventually

from sgpu_magic.wire.codec import STDERR_BEGIN, STDERR_END

PRINTS = """
import os, signal, sys
from sgpu_magic.worker.process import terminal

terminal.install(int(sys.argv[1]), os.dup(int(sys.argv[1])))

def save(*_):
    print("saving", file=sys.{stream}, flush=True)
    sys.exit(7)

signal.signal(signal.SIGTERM, save)
print("x" * {size}, file=sys.{stream}, flush=True)
"""
PIPE_BYTES = 1 << 16


def waiting_bytes(pipe: int) -> int:
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_signal_handler_may_print_while_the_code_that_it_interrupts_does(stream: str):
    reader, writer = os.pipe()
    code = PRINTS.format(stream=stream, size=2 * PIPE_BYTES)
    rank = subprocess.Popen([sys.executable, "-c", code, str(writer)], pass_fds=[writer], stderr=subprocess.PIPE)
    os.close(writer)
    with rank, os.fdopen(reader, "rb") as pipe:
        # the rest is written when somebody reads
        eventually(lambda: waiting_bytes(reader) == PIPE_BYTES, 30, "the pipe is full")
        rank.send_signal(signal.SIGTERM)
        printed = pipe.read().replace(STDERR_BEGIN, b"").replace(STDERR_END, b"")
        assert rank.wait(30) == 7, rank.communicate()
    assert b"saving\n" in printed
