"""Ending all descendants of a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="subreapers")


def run(body: str) -> str:
    code = "import os, signal, subprocess, time\nfrom sgpu_magic.system import processes\n" + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_child_of_another_user_is_given_up_and_returned():
    """As `sudo` does to a user's pool."""
    out = run("""\
        processes.become_subreaper()
        child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        own = subprocess.Popen(["sleep", "60"], user=65534)
        os.setuid(65534)
        begin = time.monotonic()
        left = processes.end_children(timeout_s=20)
        print(child.pid, left == [child.pid], own.poll() is not None, time.monotonic() - begin < 5, flush=True)
        os._exit(0)
    """)
    pid, words = out.split(maxsplit=1)
    os.kill(int(pid), signal.SIGKILL)
    assert words == "True True True"


def test_children_that_stay_keep_what_is_below_them():
    out = run("""\
        processes.become_subreaper()
        stays = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True)
        goes = subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60"])
        while len(processes.descendants(os.getpid())) < 5: time.sleep(0.01)
        left = processes.end_children({stays.pid})
        print(left, stays.poll(), len(processes.descendants(os.getpid())))
        processes.end_children()
        print(processes.descendants(os.getpid()))
    """)
    assert out == "[] None 2\n[]"
