"""`python -m sgpu_magic.packages.node <pid of the agent>`: builds one environment for the agent that started it.

Reads a `BuildOrder` as JSON from standard input and writes `BuildNews` as JSON lines to standard output. It dies with
the agent. On SIGTERM it cleans up and exits.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> None:
    from sgpu_magic.system import processes

    processes.die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    from sgpu_magic.packages.node.builder import Builder
    from sgpu_magic.packages.node.refusals import BuildFailed
    from sgpu_magic.packages.node.store import BuildNews, BuildReady, BuildRefused, decode_order, encode

    def tell(news: BuildNews) -> None:
        os.write(1, encode(news) + b"\n")

    order = decode_order(sys.stdin.buffer.read())
    builder = Builder(order, tell)
    try:
        built, lock = builder.build()
    except BuildFailed as failed:
        tell(BuildRefused(message=str(failed)))
        return
    tell(BuildReady(built=built))
    if built:
        builder.settle()
    lock.close()


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
