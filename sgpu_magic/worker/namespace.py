"""The names of a rank: those that it had when it was new, and those that cells have set since."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import re

from sgpu_magic.worker.shell import RankShell

GIVEN = ("rank", "local_rank", "world_size", "device")
"""Set on every rank before its first cell."""

# what IPython keeps of outputs, and what a run of this package sets for itself
_INTERNAL = re.compile(r"_+\d*|_i\d*|_ii|_iii|_oh|_ih|_dh|__.*__|__sgpu_.*")


def names_set(shell: RankShell) -> list[str]:
    """Names that cells have set or that came along with them, in the order in which they came."""
    hidden: dict[str, object] = shell.user_ns_hidden
    return [
        name
        for name, value in shell.user_ns.items()
        if name not in GIVEN and not _INTERNAL.fullmatch(name) and not (name in hidden and hidden[name] is value)
    ]
