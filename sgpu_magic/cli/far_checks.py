"""`python -m sgpu_magic.cli.far_checks MARK`: the checks of `sgpu doctor`, at the far end of a login.

Says the time of the machine's clock, then each finding as JSON. One word more names several machines, of which this is
the first: it then logs in to each other one, and says what is found there.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence

import msgspec

from sgpu_magic.cli import doctor, pool_checks
from sgpu_magic.cli.finding import Finding
from sgpu_magic.config import load_settings
from sgpu_magic.ssh.far_end import FarEnd
from sgpu_magic.ssh.machines import Machine, from_word


def main() -> None:
    """Run as the far end of a login."""
    mark, *words = sys.argv[1:]
    far = FarEnd(mark)
    far.say("clock", repr(time.time()))
    for finding in itertools.chain(doctor.findings(os.environ), _of_others(words)):
        far.say("finding", msgspec.json.encode(finding).decode("utf-8"))
    far.say("done")


def _of_others(words: Sequence[str]) -> Iterator[Finding]:
    for machines in map(from_word, words):
        for address in machines.addresses[1:]:
            ssh, python, prologue = load_settings().ssh_command, machines.python, machines.prologue
            machine = Machine(address.name, address, ssh, python, prologue, is_node=True)
            for finding in pool_checks.at_machine(machine):
                yield msgspec.structs.replace(finding, name=f"{address.name} {finding.name}")


if __name__ == "__main__":
    main()
