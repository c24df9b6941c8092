"""The notebook's results on a rank: `_`, `Out` and the like, which come with a cell that reads them."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
from collections.abc import Generator

from sgpu_magic.worker.cell.shell import RankShell, hook_of

_LAST = ("_", "__", "___")
_ALL = ("_oh", "Out")


@contextlib.contextmanager
def received(shell: RankShell) -> Generator[None]:
    """Take over results of the notebook that are set in the namespace meanwhile, beside the rank's own results."""
    namespace = shell.user_ns
    own = namespace["_oh"]
    before = {name: namespace.get(name) for name in _LAST}
    yield
    for name in _ALL:
        if namespace.get(name) is not own:
            own.update(namespace[name])
            namespace[name] = own
    for name, value in before.items():
        if namespace.get(name) is not value:
            # else the hook takes it for a variable of the user's, and sets it no more
            setattr(hook_of(shell), name, namespace[name])
