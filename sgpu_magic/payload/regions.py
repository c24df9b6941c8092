"""Packed bytes cut into regions that are sent and kept by their digests: what has not changed has the same regions.

    [pickle][small buffers ...][a large buffer][small buffers ...]
     region  region             region(s)       region

A large buffer's regions have its bytes alone, so that another variable's change makes none of them new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sgpu_magic.payload.pack import Packed
from sgpu_magic.wire.blobs import PIECE_BYTES

LARGE_BYTES = 1 << 20
"""A buffer of this size has regions of its own."""

_SMALL_TOGETHER_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Region:
    """Some of the packed bytes.

    Args:
        offset: Where they begin.
        size: How many they are.
        load: Returns them; made anew by each call where they are not the notebook's own memory.
    """

    offset: int
    size: int
    load: Callable[[], memoryview]


def regions_of(packed: Packed) -> Iterator[Region]:
    """Yield all regions, in the order of their bytes. What lies between buffers is zero, or in no region."""
    yield from _cut(0, memoryview(packed.pickle))
    small: list[tuple[int, memoryview]] = []
    for (offset, size), view in zip(packed.layout.buffers, packed.buffers, strict=True):
        if size >= LARGE_BYTES or (small and offset + size - small[0][0] > _SMALL_TOGETHER_BYTES):
            yield from _joined(small)
            small = []
        if size >= LARGE_BYTES:
            yield from _cut(offset, view)
        elif size:
            small.append((offset, view))
    yield from _joined(small)


def _cut(offset: int, view: memoryview) -> Iterator[Region]:
    for begin in range(0, view.nbytes, PIECE_BYTES):
        part = view[begin : begin + PIECE_BYTES]
        yield Region(offset + begin, part.nbytes, lambda part=part: part)


def _joined(small: Sequence[tuple[int, memoryview]]) -> Iterator[Region]:
    if not small:
        return
    first = small[0][0]
    size = small[-1][0] + small[-1][1].nbytes - first

    def load() -> memoryview:
        joined = bytearray(size)
        for offset, view in small:
            joined[offset - first : offset - first + view.nbytes] = view
        return memoryview(joined)

    yield Region(first, size, load)
