"""Texts that name options, which each interface spells in its own way: `--gpus 4`, `gpus=4`, `gpus: 4`.

The code that makes such a text does not know which interface will show it. The text therefore keeps its options as
data, and the interface spells them (`options.table.options_spelled`).
"""

from __future__ import annotations

from collections.abc import Callable

from sgpu_magic.wire.base import Record


class OptionName(Record, frozen=True):
    """An option in a text.

    Args:
        name: Its name in the table of options, such as `min-memory`.
        value: The value that the text gives it; None if the text names the option alone.
    """

    name: str
    value: str | int | float | None = None


class TextWithOptions(Record, frozen=True):
    """A text that names options. `str` returns it as a command line spells them.

    Args:
        parts: Its pieces, in order.
    """

    parts: tuple[str | OptionName, ...]

    def __str__(self) -> str:
        return self.spelled(on_command_line)

    def spelled(self, spell: Callable[[OptionName], str]) -> str:
        """Return the text, with each option as `spell` returns it."""
        return "".join(part if isinstance(part, str) else spell(part) for part in self.parts)


Text = str | TextWithOptions
"""A text for users. In a plain `str`, no option is spelled in one interface's way."""


def text_of(*parts: Text | OptionName) -> TextWithOptions:
    """Join pieces to one text."""
    joined: list[str | OptionName] = []
    for part in parts:
        joined += part.parts if isinstance(part, TextWithOptions) else [part]
    return TextWithOptions(tuple(joined))


def on_command_line(named: OptionName) -> str:
    """Return an option as the magics and the `sgpu` command spell it: `--gpus`, `--gpus 4`."""
    return f"--{named.name}" if named.value is None else f"--{named.name} {named.value}"
