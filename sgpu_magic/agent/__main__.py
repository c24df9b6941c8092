"""`python -m sgpu_magic.agent <fd> [<lifeline>]`: started by the engines, reads its settings as JSON from stdin."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

from sgpu_magic.wire.decoding import decode_json


def main() -> None:
    from sgpu_magic.system.processes import become_subreaper, end_children

    # Ctrl-C in the pool's terminal must not bypass the stop path, which the service installs
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    become_subreaper()

    from sgpu_magic.agent import service
    from sgpu_magic.config import Settings

    settings = decode_json(sys.stdin.buffer.read(), type=Settings)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    lifeline = int(sys.argv[2]) if len(sys.argv) > 2 else -1
    asyncio.run(service.run(socket.socket(fileno=int(sys.argv[1])), settings, lifeline))
    end_children()
    if lifeline >= 0:
        # the process at the pipe's other end may be dead, so the agent removes its own directories
        for path in (settings.state_path, settings.runtime_path, Path(settings.lock_dir)):
            shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            settings.state_path.parent.rmdir()
    os._exit(0)


if __name__ == "__main__":
    main()
