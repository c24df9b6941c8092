"""`python go_between.py <fd> <lifeline>`: an intermediate process between Ray's worker process and the agent.

A worker that loses its raylet kills its direct children only (`RAY_kill_child_processes_on_worker_exit`). As a
grandchild the agent survives, sees its lifeline close, ends its ranks and removes its files.
This script imports nothing of this package: it runs as long as the agent and should stay small.
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
        # die by the agent's signal, without a core dump, which would be of the wrong process
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            os.kill(os.getpid(), -code)
    os._exit(abs(code))


if __name__ == "__main__":
    main()
