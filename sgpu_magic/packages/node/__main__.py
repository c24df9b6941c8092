"""`python -m sgpu_magic.packages.node <fd> <pid of the agent>`: builds one environment for the agent that started it.

Reads a `BuildOrder` as JSON from a socket until end of file, and writes `BuildNews` as JSON lines to it. It dies with
the agent. On SIGTERM it cleans up and exits.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> None:
    from sgpu_magic.system import processes

    link, agent = map(int, sys.argv[1:])
    processes.die_with_parent(agent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    from sgpu_magic.packages.node.builder import Builder
    from sgpu_magic.packages.node.refusals import BuildFailed
    from sgpu_magic.packages.node.store import BuildNews, BuildReady, BuildRefused, decode_order, encode

    def report(update: BuildNews) -> None:
        os.write(link, encode(update) + b"\n")

    with open(link, "rb", closefd=False) as asked:
        order = decode_order(asked.read())
    builder = Builder(order, report)
    try:
        built, lock = builder.build()
    except BuildFailed as failed:
        report(BuildRefused(message=failed.text))
        return
    report(BuildReady(built=built))
    if built:
        builder.tidy_up()
    lock.close()


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
