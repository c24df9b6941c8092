"""What a caller sees of an exception: its own line and the ranks' part, not the way through this package."""

from __future__ import annotations

from types import TracebackType


class FramesLeftOut:
    """Around a call into this package: what it raises begins with the caller's frame, however often it is raised."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            error.__traceback__ = None


frames_left_out = FramesLeftOut()
