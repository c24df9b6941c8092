"""What a rank displays: to the notebook, or into the widget whose block is under way."""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from IPython.core.displaypub import DisplayPublisher

from sgpu_magic.wire.rank_messages import Cleared, Displayed
from sgpu_magic.wire.record import Record
from sgpu_magic.worker import output

Report = Callable[[Record], None]


def _discard(message: Record) -> None:
    """Before the fork there is nobody to report to."""


class RankDisplayPublisher(DisplayPublisher):
    """`display()` and `clear_output()` of a rank."""

    report: Report = staticmethod(_discard)
    # blocks under way whose displays go into a widget, the innermost last
    captures: ClassVar[list[Any]] = []

    def publish(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        data: Mapping[str, object],
        metadata: Mapping[str, object] | None = None,
        *,
        transient: Mapping[str, str] | None = None,
        update: bool = False,
        **kwargs: object,
    ) -> None:
        if self.captures:
            self.captures[-1].display(data, metadata or {})
            return
        output.flush()
        display_id = (transient or {}).get("display_id", "")
        self.report(
            Displayed(bundle=_to_json(data), metadata=_to_json(metadata or {}), display_id=display_id, update=update)
        )

    def clear_output(self, wait: bool = False) -> None:
        if self.captures:
            self.captures[-1].clear(wait)
            return
        output.flush()
        self.report(Cleared(wait=wait))


def _to_json(value: Mapping[str, object]) -> bytes:
    # what is no UTF-8 has no place in JSON either
    return json.dumps(value, default=_encode_binary, ensure_ascii=False).encode("utf-8", "replace")


def _encode_binary(value: object) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode("ascii")
    return str(value)
