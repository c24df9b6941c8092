"""`python -m sgpu_magic.tracking.sync`: send what is unsent of some runs to one store, with this process's variables.

Standard input has one encoded `Unsent`; each run gives one line on standard output, an encoded `Sent`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec

from sgpu_magic.config import Settings
from sgpu_magic.tracking import store
from sgpu_magic.wire.tracking import Tracking, is_store_variable

_BUSY_S = 10.0
_LOOK_S = 0.2


class Unsent(msgspec.Struct, frozen=True):
    """What is to be sent.

    Args:
        settings: The pool's.
        uri: The store's, with user name and password where the shell has it so; "" is the default store.
        directories: The runs'.
    """

    settings: Settings
    uri: str
    directories: tuple[str, ...]


class Sent(msgspec.Struct, frozen=True):
    """What became of a run; `problem` says why it is not there, "" when it is."""

    run_id: str
    problem: str = ""


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Unsent)
    variables = {name: value for name, value in os.environ.items() if is_store_variable(name)}
    store.stand_in(variables)
    from sgpu_magic.tracking.client import Store, StoreTroubled
    from sgpu_magic.tracking.writer import Busy, RunWriter

    tracking = Tracking(uri=order.uri, variables=variables)
    target = Store(order.settings, tracking)
    down = ""
    for directory in order.directories:
        writer = RunWriter(order.settings, target, Path(directory), tracking)
        # it is over: nobody writes its events any more
        writer.over = True
        problem = down
        until = time.monotonic() + _BUSY_S
        while not problem and not writer.progress.complete:
            try:
                writer.step()
            except Busy:
                if time.monotonic() > until:
                    problem = "the pool is writing it"
                time.sleep(_LOOK_S)
            except StoreTroubled as trouble:
                problem = str(trouble)
                down = problem if trouble.unreachable else ""
                writer.trouble(problem)
            except OSError as error:
                problem = f"{error.strerror or error}"
        problem = problem or writer.progress.problem
        sys.stdout.write(msgspec.json.encode(Sent(run_id=Path(directory).name, problem=problem)).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
