"""`python -m sgpu_magic.agent <fd> [<lifeline>]`, the settings as JSON on its standard input: started by the engines."""

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

    settings = service.decode_settings(sys.stdin.buffer.read())
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    lifeline = int(sys.argv[2]) if len(sys.argv) > 2 else -1
    service.run(socket.socket(fileno=int(sys.argv[1])), settings, lifeline)
    kill_descendants()
    os._exit(0)


if __name__ == "__main__":
    main()
