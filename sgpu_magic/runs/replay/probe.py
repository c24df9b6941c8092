"""`python -m sgpu_magic.runs.replay.probe`: which Python this is, as JSON, for a replay that another one starts."""

from __future__ import annotations

import sys

import msgspec

from sgpu_magic.wire.records import Interpreter


class Found(msgspec.Struct, frozen=True):
    """A Python.

    Args:
        interpreter: As its zygote is started and keyed.
        digest: Of its packages.
    """

    interpreter: Interpreter
    digest: str


def main() -> None:
    from sgpu_magic.client.interpreter import this_interpreter
    from sgpu_magic.packages.snapshot import take_snapshot

    found = Found(this_interpreter(), take_snapshot().digest)
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
