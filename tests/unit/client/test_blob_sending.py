"""Packed variables cut into regions: unchanged data keeps its digests, and the regions join to the original."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from lazy_modules import torch

from sgpu_magic.agent.runs import run_memory
from sgpu_magic.agent.runs.run_memory import close_payload, lay_out
from sgpu_magic.client.blob_sender import pieces_of
from sgpu_magic.files.content_store import blob_digest, join_parts
from sgpu_magic.payload import buffers
from sgpu_magic.payload.buffers import LARGE_BYTES, regions_of
from sgpu_magic.payload.pack import Packed, pack_namespace
from sgpu_magic.payload.unpack import map_kept, map_over, map_private, unpack, unpack_namespace
from sgpu_magic.wire.attachments import StoredPart, StoredPayload

KEY = b"k" * 32


def packed(names: Mapping[str, object]) -> Packed:
    return pack_namespace(dict(names), {}, KEY)


def digests(names: Mapping[str, object]) -> list[str]:
    return [blob_digest(region.load()) for region in regions_of(packed(names))]


def names_of(small: int = 1) -> dict[str, object]:
    return {
        "large": np.arange(300_000.0),
        "tensor": torch.arange(400_000, dtype=torch.float32),
        "several": [np.full(1000, number + small) for number in range(20)],
        "empty": np.zeros(0),
        "word": "word",
    }


@pytest.mark.parametrize("piece_bytes", [buffers.PIECE_BYTES, 1_000_000])
def test_regions_make_the_whole_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int):
    monkeypatch.setattr(buffers, "PIECE_BYTES", piece_bytes)
    whole = packed(names_of())
    parts: list[tuple[StoredPart, Path]] = []
    for number, region in enumerate(regions_of(whole)):
        blob = tmp_path / str(number)
        blob.write_bytes(region.load())
        assert blob.stat().st_size == region.size <= max(piece_bytes, LARGE_BYTES)
        parts.append((StoredPart(digest="", offset=region.offset, size=region.size), blob))
    target = tmp_path / "whole"
    with open(target, "wb+") as file:
        join_parts(file.fileno(), whole.total_bytes, parts)
    assert target.read_bytes() == whole.to_bytes()
    # the signature is valid for the received data
    unpack(memoryview(bytearray(target.read_bytes())), whole.layout, KEY, {})


# pieces that begin within a page are copied, as are pieces that end within one where the next piece begins
@pytest.mark.parametrize(
    ("piece_bytes", "mapped_bytes"), [(buffers.PIECE_BYTES, 6_400_008), (1 << 20, 5 << 20), (1_100_000, 0)]
)
def test_ranks_and_replays_map_the_large_parts_from_the_blobs_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int, mapped_bytes: int
):
    monkeypatch.setattr(buffers, "PIECE_BYTES", piece_bytes)
    whole = packed({**names_of(), "large and small": np.arange(300_001.0), "odd": b"x" * 5001})
    folder = tmp_path / "payload"
    folder.mkdir()
    parts: list[StoredPart] = []
    paths: list[Path] = []
    for region in regions_of(whole):
        parts.append(StoredPart(digest="", offset=region.offset, size=region.size))
        paths.append(folder / str(region.offset))
        paths[-1].write_bytes(region.load())
    source = StoredPayload(parts=tuple(parts), size=whole.total_bytes)
    descriptor, mapped = lay_out(str(tmp_path), source, paths)
    try:
        assert sum(part.size for part in mapped) == mapped_bytes
        mapping = map_private(descriptor, os.fstat(descriptor).st_size)
        for part in mapped:
            map_over(mapping, part.offset, part.descriptor, part.size)
        # local writes change neither the blobs nor other mappings of them
        kept = map_kept(tmp_path, whole.layout)
        for each in (mapping, kept):
            assert each[: whole.total_bytes] == whole.to_bytes()
            each[: whole.total_bytes] = bytes(whole.total_bytes)
        assert map_kept(tmp_path, whole.layout)[: whole.total_bytes] == whole.to_bytes()
    finally:
        close_payload(descriptor, mapped)
    namespace: dict[str, object] = {}
    unpack_namespace(memoryview(map_kept(tmp_path, whole.layout)), whole.layout, KEY, namespace)
    np.testing.assert_array_equal(namespace["large"], np.arange(300_000.0))  # type: ignore[arg-type]
    assert sorted(os.listdir(tmp_path)) == ["payload"]
    (folder / "notes").write_text("somebody's own")
    assert map_kept(tmp_path, whole.layout)[: whole.total_bytes] == whole.to_bytes()
    os.truncate(paths[-1], 1)
    with pytest.raises(ValueError, match=f"of {whole.total_bytes:,} are there"):
        map_kept(tmp_path, whole.layout)


@pytest.mark.parametrize("fits", [True, False])
def test_a_blob_that_became_shorter_kills_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool):
    monkeypatch.setattr(run_memory, "fits_memory", lambda size: fits)
    blob = tmp_path / "blob"
    blob.write_bytes(bytes((1 << 20) - 1))
    source = StoredPayload(parts=(StoredPart(digest="", offset=0, size=1 << 20),), size=1 << 20)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="shorter"):
        lay_out(str(tmp_path), source, [blob])
    assert set(os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path) == ["blob"]


def test_only_what_has_changed_has_other_digests():
    before, after = digests(names_of(1)), digests(names_of(2))
    # the large ones are unchanged; the blob of the small ones has changed
    assert len(before) == len(after)
    assert sum(one != other for one, other in zip(before, after, strict=True)) == 1
    again = digests(names_of(1) | {"further": "x" * 50})
    assert len(set(before) & set(again)) == len(before) - 1, "another variable changes the pickle's region only"


def test_a_part_that_lies_outside_is_refused(tmp_path: Path):
    blob = tmp_path / "blob"
    blob.write_bytes(b"x" * 10)
    for offset, size in ((95, 10), (-1, 5), (0, 11)):
        with open(tmp_path / "whole", "wb+") as file, pytest.raises(OSError):
            join_parts(file.fileno(), 100, [(StoredPart(digest="", offset=offset, size=size), blob)])


def test_a_file_that_became_shorter_is_not_sent(tmp_path: Path):
    file = tmp_path / "file"
    file.write_bytes(b"x" * 100)
    (piece,) = pieces_of(file, 100)
    assert bytes(piece.load()) == b"x" * 100
    file.write_bytes(b"x" * 50)
    with pytest.raises(OSError, match="shorter"):
        piece.load()
