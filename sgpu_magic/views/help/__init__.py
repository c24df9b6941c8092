"""The help pages that errors name: Markdown files in this folder, available as Markdown or as plain text."""

from __future__ import annotations

import re
from importlib import resources

from sgpu_magic import errors
from sgpu_magic.errors import UsageError
from sgpu_magic.views.units import aligned

_ENDING = ".md"
_STRONG = re.compile(r"\*\*(.+?)\*\*", re.DOTALL)
_TITLE = re.compile(r"^#+ (.+)$", re.MULTILINE)
_TABLE = re.compile(r"(?:^\|.*\|\n)+", re.MULTILINE)
_RULE = re.compile(r"[|\-: ]+")


def topics() -> list[str]:
    """Return the names of all pages."""
    names = (each.name for each in resources.files(__name__).iterdir())
    return sorted(name.removesuffix(_ENDING) for name in names if name.endswith(_ENDING))


def page(topic: str) -> str:
    """Return a page as Markdown.

    Args:
        topic: The page's name, or an error's, such as `WorkerDied`; "" for the list of all pages.

    Raises:
        UsageError: There is no such page.
    """
    known = topics()
    if not topic:
        rows = "".join(f"| `{each}` | {_read(each).partition(chr(10))[0].removeprefix('# ')} |\n" for each in known)
        return f"# What went wrong\n\n| page | about |\n|---|---|\n{rows}"
    error: object = getattr(errors, topic, None)
    if isinstance(error, type) and issubclass(error, errors.SgpuError):
        topic = error.topic
    if topic not in known:
        message = f"there is no help page `{topic}`."
        raise UsageError.of_unknown_name(message, topic, known, otherwise=f"The pages are: {', '.join(known)}.")
    return _read(topic)


def plain(markdown: str) -> str:
    """Return a page as text for a terminal."""
    text = _STRONG.sub(r"\1", markdown.rstrip("\n") + "\n")
    text = _TITLE.sub(lambda found: f"{found[1]}\n{'=' * len(found[1])}", text)
    return _TABLE.sub(lambda found: _aligned(found[0]), text).rstrip("\n")


def _read(topic: str) -> str:
    return (resources.files(__name__) / f"{topic}{_ENDING}").read_text(encoding="utf-8")


def _aligned(table: str) -> str:
    rows = [line for line in table.splitlines() if _RULE.fullmatch(line) is None]
    return "".join(f"{line}\n" for line in aligned([tuple(map(str.strip, row.split("|")[1:-1])) for row in rows]))
