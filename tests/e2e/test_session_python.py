"""Sessions from a plain Python program, with and without an event loop."""

from __future__ import annotations

import subprocess
import sys

import pytest
from kernels import Home, eventually

HEAD = "import sgpu_magic\n\ndef add(a, rank, world_size):\n    return (a + rank, world_size)\n\n"


def run_script(home: Home, source: str) -> str:
    """Run a program in the home and return what it printed."""
    path = home.work / "program.py"
    path.write_text(HEAD + source)
    done = subprocess.run(
        [sys.executable, str(path)], env=home.environ, cwd=home.work, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_context_manager(home: Home):
    printed = run_script(
        home,
        "with sgpu_magic.connect(2, 'cpu', name='work') as session:\n"
        "    print(session.state, session.ranks, session.device_type)\n"
        "    session.push(lr=0.5)\n"
        "    result = session.run('x = lr * (rank + 1)\\nx', ui='none')\n"
        "    print(result.values, session.pull('x:all'), session.pull('x', ranks=1))\n"
        "    print(session.call(add, 5), session.call(add, 5, ranks=[1]))\n"
        "    print(session.restart(1))\n"
        "print(session)\n",
    )
    lines = [line for line in printed.splitlines() if not line.startswith(("add(", "succeeded"))]
    assert lines[0] == "connected 2 cpu"
    assert lines[1] == "[0.5, 1.0] [0.5, 1.0] 1.0"
    assert lines[2] == "[(5, 2), (6, 2)] [(6, 2)]"
    assert lines[3].startswith("Rank 1 of session work restarted.")
    assert "ended: disconnected" in lines[4]
    eventually(lambda: not home.rank_pids(), 5, "the ranks are gone")


def test_a_closed_session_does_not_count_for_the_next_call(home: Home):
    out = run_script(
        home,
        HEAD + "if __name__ == '__main__':\n"
        "    session = sgpu_magic.connect(2, 'cpu', name='gone', ui='none')\n"
        "    session.wait().close()\n"
        "    print(sgpu_magic.distributed(gpus=2, gpu_type='cpu', ui='none')(add).distributed(1))\n"
        "    from sgpu_magic.runs.sessions import registry\n"
        "    print(registry.current())\n",
    )
    assert out.splitlines() == ["[(1, 2), (2, 2)]", "None"]


def test_an_event_loop_goes_on_while_it_connects(home: Home):
    printed = run_script(
        home,
        "import asyncio, time\n"
        "async def main():\n"
        "    longest, last = 0.0, time.monotonic()\n"
        "    async def tick():\n"
        "        nonlocal longest, last\n"
        "        while True:\n"
        "            now = time.monotonic()\n"
        "            longest, last = max(longest, now - last), now\n"
        "            await asyncio.sleep(0.005)\n"
        "    session = sgpu_magic.connect(2, 'cpu')\n"
        "    last = time.monotonic()\n"
        "    ticking = asyncio.create_task(tick())\n"
        "    print((await session).state)\n"
        "    ticking.cancel()\n"
        "    print(longest < 0.3 or longest)\n"
        "    session.close()\n"
        "    async with sgpu_magic.connect(2, 'cpu') as other:\n"
        "        print(other.call(add, 1))\n"
        "    print(other.state)\n"
        # its ranks take longer to end than the client waits
        "    from sgpu_magic.runs.sessions import session as module\n"
        "    module._CLOSE_PATIENCE_S = 0.0\n"
        "    try:\n"
        "        async with sgpu_magic.connect(2, 'cpu'):\n"
        "            raise KeyError('the body')\n"
        "    except Exception as error:\n"
        "        print(repr(error))\n"
        "asyncio.run(main())\n",
    )
    lines = [line for line in printed.splitlines() if not line.startswith(("add(", "succeeded"))]
    assert lines == ["connected", "True", "[(1, 2), (2, 2)]", "ended: disconnected", "KeyError('the body')"]


def test_errors_come_as_their_own_types(home: Home):
    printed = run_script(
        home,
        "with sgpu_magic.connect(2, 'cpu') as session:\n"
        "    for code in ('raise KeyError(rank)', 'def f(:'):\n"
        "        try:\n"
        "            session.run(code, ui='none')\n"
        "        except Exception as error:\n"
        "            print(type(error).__name__)\n"
        "    try:\n"
        "        sgpu_magic.connect(2)\n"
        "    except sgpu_magic.errors.UsageError as error:\n"
        "        print('already connected' in error.message)\n"
        "    print(session.run('world_size', ui='none').values)\n"
        "try:\n"
        "    session.run('1')\n"
        "except sgpu_magic.errors.SessionError as error:\n"
        "    print('ended' in error.message)\n",
    )
    assert printed.splitlines() == ["KeyError", "CellSyntaxError", "True", "[2, 2]", "True"]


def test_waiting_is_limited(home: Home):
    printed = run_script(
        home,
        "with sgpu_magic.connect(16, 'cpu', name='first') as first:\n"
        "    second = sgpu_magic.connect(16, 'cpu', name='second')\n"
        "    try:\n"
        "        second.wait(0.3)\n"
        "    except TimeoutError as error:\n"
        "        print('waits for devices' in str(error))\n"
        "    second.close()\n"
        "    print(second.state)\n",
    )
    assert printed.splitlines() == ["True", "ended: disconnected"]


def test_a_program_that_ends_takes_its_session_along(home: Home):
    run_script(home, "session = sgpu_magic.connect(2, 'cpu').wait()\n")
    eventually(lambda: not home.rank_pids(), 5, "the ranks are gone")
