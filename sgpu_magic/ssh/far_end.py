"""The lines that a program at the far end of a login writes for this side: each begins with the login's mark."""

from __future__ import annotations

import os

from sgpu_magic.errors import SgpuError


class FarEnd:
    """Writes lines to what was standard output; nothing else in this process can write there any more.

    Args:
        mark: The login's mark.

    Attributes:
        writing: The descriptor.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self.writing = os.dup(1)
        os.dup2(2, 1)

    def say(self, word: str, text: str = "") -> None:
        """Write a line.

        Args:
            word: What it is, as `login` knows it.
            text: The rest of the line; line ends become spaces.
        """
        line = " ".join(f"{self._mark} {word} {text}".split())
        os.write(self.writing, f"\n{line}\n".encode("utf-8", "replace"))

    def failed(self, error: SgpuError) -> None:
        """Say why this machine's pool can't be used."""
        self.say("failed", f"pool {error.message}")
