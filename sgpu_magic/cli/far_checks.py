"""`python -m sgpu_magic.cli.far_checks MARK`: the checks of `sgpu doctor`, at the far end of a login.

Says the time of the machine's clock, then each finding as JSON.
"""

from __future__ import annotations

import os
import sys
import time

import msgspec

from sgpu_magic.cli import doctor
from sgpu_magic.ssh.far_end import FarEnd


def main() -> None:
    """Run as the far end of a login."""
    far = FarEnd(sys.argv[1])
    far.say("clock", repr(time.time()))
    for finding in doctor.findings(os.environ):
        far.say("finding", msgspec.json.encode(finding).decode("utf-8"))
    far.say("done")


if __name__ == "__main__":
    main()
