"""How a notebook's failed cell becomes the exit code of `sgpu run`."""

from __future__ import annotations

import pytest

from sgpu_magic.cli.headless.outcome import ExitCode, code_of
from sgpu_magic.errors import see

# tracebacks as IPython sends them: our errors end with the pointer to the help page
OURS = ["UsageError: no", f"{see('usage')}\n"]
SOMEBODYS = [see("usage"), "UsageError: no"]


@pytest.mark.parametrize(
    ("name", "traceback", "code"),
    [
        ("UsageError", OURS, ExitCode.USAGE),
        ("RunUnknown", OURS, ExitCode.USAGE),
        ("CapacityError", OURS, ExitCode.POOL),
        ("NodeLost", OURS, ExitCode.POOL),
        ("RunTimeout", OURS, ExitCode.TIMED_OUT),
        ("ZeroDivisionError", OURS, ExitCode.FAILED),
        # an error of the same name from another package
        ("UsageError", SOMEBODYS, ExitCode.FAILED),
        ("PoolError", [], ExitCode.FAILED),
    ],
)
def test_an_error_is_a_code(name: str, traceback: list[str], code: ExitCode) -> None:
    assert code_of(name, traceback) is code
