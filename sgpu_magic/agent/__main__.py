"""`python -m sgpu_magic.agent <fd> <settings as JSON>`: started by the pool service's local engine."""

from __future__ import annotations

import os
import signal
import socket
import sys


def main() -> None:
    from sgpu_magic.processes import become_subreaper, kill_descendants

    # the pool's terminal is not ours: Ctrl-C in it must not reach the ranks past the stop path
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    become_subreaper()
    from sgpu_magic.agent import service

    service.run(socket.socket(fileno=int(sys.argv[1])), service.decode_settings(sys.argv[2]))
    kill_descendants()
    os._exit(0)


if __name__ == "__main__":
    main()
