"""What `sgpu run` and its notebook's kernel exchange: parameters for widgets, and the value that ends the notebook."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from sgpu_magic.errors import UsageError

VARIABLE = "SGPU_JOB_PARAMETERS"
"""Environment variable with the job's parameters as JSON, each value as text. Only `sgpu run` sets it."""


def parameters_of_process() -> dict[str, str]:
    """Return the parameters of the job as text; empty outside of `sgpu run`.

    Raises:
        UsageError: The variable can't be read.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        return msgspec.json.decode(text, type=dict[str, str]) if text else {}
    except msgspec.DecodeError as error:
        raise UsageError(
            f"the variable {VARIABLE} can't be read: {error}. `sgpu run` sets it for its notebook; unset it elsewhere."
        ) from None


def as_variable(parameters: Mapping[str, object]) -> str:
    """Return the value of the variable. Lists and mappings are written as JSON, other values as Python writes them."""
    texts = {
        name: msgspec.json.encode(value).decode() if isinstance(value, list | dict) else str(value)
        for name, value in parameters.items()
    }
    return msgspec.json.encode(texts).decode()


class NotebookExit(BaseException):
    """Ends the notebook with a value: the cells that follow do not run.

    Not an `Exception`, so that a handler of the notebook's own code does not stop it. A front end shows one line;
    for `sgpu run` it is a success.

    Args:
        value: The value as text.
    """

    def __init__(self, value: str) -> None:
        super().__init__(value)
        self.value = value

    def _render_traceback_(self) -> list[str]:
        return [f"Notebook exited: {' '.join(self.value.split())}".rstrip(": ")]
