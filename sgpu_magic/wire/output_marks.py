"""The marks around what Python's stderr writes into the common output pipe of a rank.

An OSC escape sequence that no terminal knows, so that even a mark that slipped through would not be seen.
"""

from __future__ import annotations

STDERR_BEGIN = b"\x1b]sgpu;2\x07"
STDERR_END = b"\x1b]sgpu;1\x07"
