"""`python go_between.py <fd> <lifeline>`: stands between Ray's worker process and the agent, and does nothing else.

A worker that loses its raylet kills its children, and only these (`RAY_kill_child_processes_on_worker_exit`). An agent
that is a grandchild lives on, sees its lifeline end, and ends what it has: nobody else would remove its files.
Imports nothing of ours: it is there as long as the agent, and is to be small.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from typing import NoReturn


def main() -> NoReturn:
    pid = os.fork()
    if pid == 0:
        try:
            os.execv(sys.executable, [sys.executable, "-m", "sgpu_magic.agent", *sys.argv[1:3]])
        finally:
            os._exit(127)
    # the ends of the agent's socket and pipe close with the agent
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        # told on as it was: a core would be of the wrong process
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            os.kill(os.getpid(), -code)
    os._exit(abs(code))


if __name__ == "__main__":
    main()
