"""Blobs on a pool's disk: never partial, named by digest, separate for each user, least recently used removed first."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from small_disks import small_disk

from sgpu_magic.files.content_store import BlobRefused, BlobStore, blob_digest, blob_path, store_name
from sgpu_magic.files.run_directory import BadName, list_below, open_below, parts_of
from sgpu_magic.system.serial_threads import FileThread

CHUNK = 1000


def digest_of(data: bytes) -> str:
    return blob_digest(memoryview(data))


def blob(number: int, size: int = 3500) -> bytes:
    return number.to_bytes(4, "big") * (size // 4)


def put(store: BlobStore, user: str, data: bytes, begin: int = 0, end: int | None = None) -> int:
    """Send a blob's bytes from `begin` to `end` in chunks, as a client does; return how far the store has got."""
    at = begin
    for offset in range(begin, len(data) if end is None else end, CHUNK):
        at = store.put(user, digest_of(data), len(data), offset, data[offset : offset + CHUNK])
    return at


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs", 10_000)


def files(tmp_path: Path) -> list[str]:
    return sorted(
        str(path.relative_to(tmp_path / "blobs")) for path in (tmp_path / "blobs").rglob("*") if path.is_file()
    )


def test_a_blob_appears_when_its_digest_is_right(store: BlobStore, tmp_path: Path):
    data = blob(1)
    digest = digest_of(data)
    assert store.stored_bytes("ann", digest, len(data)) == 0
    assert put(store, "ann", data, end=3000) == 3000
    assert files(tmp_path) == [f"ann/parts/{digest}"], "it is not there before it is whole"
    assert put(store, "ann", data, begin=3000) == len(data)
    path = tmp_path / "blobs" / "ann" / digest[:2] / digest[2:]
    assert path.read_bytes() == data
    assert path.stat().st_mode & 0o777 == 0o600
    assert {each.stat().st_mode & 0o777 for each in (tmp_path / "blobs").rglob("*") if each.is_dir()} == {0o700}
    assert store.stored_bytes("ann", digest, len(data)) == len(data)


def test_bytes_that_have_another_digest_are_refused(store: BlobStore, tmp_path: Path):
    data = blob(1)
    digest = digest_of(data)
    put(store, "ann", data, end=3000)
    with pytest.raises(BlobRefused, match="does not have the digest"):
        store.put("ann", digest, len(data), 3000, b"x" * 500)
    assert files(tmp_path) == []
    assert store.stored_bytes("ann", digest, len(data)) == 0
    assert put(store, "ann", data) == len(data), "the right ones are taken afterwards"


def test_more_bytes_than_were_said_are_refused(store: BlobStore, tmp_path: Path):
    data = blob(1)
    put(store, "ann", data, end=3000)
    with pytest.raises(BlobRefused, match="does not have the size that was announced"):
        store.put("ann", digest_of(data), len(data), 3000, b"x" * 501)
    assert files(tmp_path) == []


def test_an_upload_goes_on_in_the_next_service_where_it_stopped(store: BlobStore, tmp_path: Path):
    data = blob(1)
    put(store, "ann", data, end=2000)
    store.close()
    later = BlobStore(tmp_path / "blobs", 10_000)
    assert later.stored_bytes("ann", digest_of(data), len(data)) == 2000
    assert put(later, "ann", data, begin=2000) == len(data)
    assert later.stored_bytes("ann", digest_of(data), len(data)) == len(data)


def test_an_upload_that_was_damaged_between_two_services_is_refused(store: BlobStore, tmp_path: Path):
    data = blob(1)
    put(store, "ann", data, end=2000)
    store.close()
    part = tmp_path / "blobs" / "ann" / "parts" / digest_of(data)
    part.write_bytes(b"?" * 2000)
    later = BlobStore(tmp_path / "blobs", 10_000)
    with pytest.raises(BlobRefused, match="does not have the digest"):
        put(later, "ann", data, begin=2000)
    assert files(tmp_path) == []


def test_bytes_that_begin_elsewhere_are_not_taken(store: BlobStore):
    data = blob(1)
    digest = digest_of(data)
    put(store, "ann", data, end=2000)
    assert store.put("ann", digest, len(data), 0, data[:1000]) == 2000, "sent twice over a broken link"
    assert store.put("ann", digest, len(data), 3000, data[3000:]) == 2000, "something before it was lost"
    assert put(store, "ann", data, begin=2000) == len(data)
    assert store.put("ann", digest, len(data), 0, data[:1000]) == len(data), "and once more when it is whole"


def test_users_have_stores_of_their_own(store: BlobStore):
    data = blob(1)
    put(store, "ann", data)
    assert store.stored_bytes("ben", digest_of(data), len(data)) == 0
    assert put(store, "ben", data, end=1000) == 1000, "what another user has spares nobody the sending"


def test_a_blob_that_lost_its_bytes_is_sent_again(store: BlobStore, tmp_path: Path):
    data = blob(1)
    put(store, "ann", data)
    os.truncate(blob_path(tmp_path / "blobs", "ann", digest_of(data)), 100)
    assert store.stored_bytes("ann", digest_of(data), len(data)) == 0
    assert put(store, "ann", data) == len(data)


@pytest.mark.parametrize("name", ["..", ".", "a/b", "", "../ann", "x" * 200])
def test_no_store_leads_out(store: BlobStore, name: str):
    with pytest.raises(BlobRefused):
        store.stored_bytes(name, digest_of(b""), 0)


@pytest.mark.parametrize("digest", ["../../etc/passwd", "a" * 63, "A" * 64, "", "a" * 63 + "/"])
def test_no_digest_leads_out(store: BlobStore, digest: str):
    with pytest.raises(BlobRefused):
        store.put("ann", digest, 10, 0, b"x" * 10)


def test_any_user_has_a_store(tmp_path: Path):
    names = ["ann", "ann@example.org", "../root", "a b", "", "_x", "parts", "é"]
    assert store_name("ann") == "ann"
    assert len({store_name(name) for name in names}) == len(names)
    for name in names:
        blob_path(tmp_path, store_name(name), "a" * 64)


# ---------------------------------------------------------------- room


def aged(store: BlobStore, tmp_path: Path, *datas: bytes) -> None:
    """Store blobs with ages such that the first one is the oldest."""
    for age, data in enumerate(datas):
        put(store, "ann", data)
        at = 1_700_000_000 + age
        os.utime(blob_path(tmp_path / "blobs", "ann", digest_of(data)), (at, at))


def has(tmp_path: Path, data: bytes) -> bool:
    return blob_path(tmp_path / "blobs", "ann", digest_of(data)).exists()


def test_the_longest_unused_goes_first(store: BlobStore, tmp_path: Path):
    one, two, three = blob(1), blob(2), blob(3)
    aged(store, tmp_path, one, two)
    put(store, "ann", three)
    assert (has(tmp_path, one), has(tmp_path, two), has(tmp_path, three)) == (False, True, True)


def test_what_was_asked_for_is_not_the_longest_unused(store: BlobStore, tmp_path: Path):
    one, two, three = blob(1), blob(2), blob(3)
    aged(store, tmp_path, one, two)
    assert store.stored_bytes("ann", digest_of(one), len(one)) == len(one)
    put(store, "ann", three)
    assert (has(tmp_path, one), has(tmp_path, two)) == (True, False)


def test_what_a_run_needs_never_goes(store: BlobStore, tmp_path: Path):
    one, two, three = blob(1), blob(2), blob(3)
    store.hold("0a1b2c3d", "ann", [digest_of(one), digest_of(two)])
    aged(store, tmp_path, one, two)
    with pytest.raises(BlobRefused, match="the active runs need"):
        put(store, "ann", three)
    assert has(tmp_path, one)
    assert has(tmp_path, two)
    store.release("0a1b2c3d")
    put(store, "ann", three)
    assert (has(tmp_path, one), has(tmp_path, two), has(tmp_path, three)) == (False, True, True)


def test_more_than_a_user_may_have_is_refused_at_once(store: BlobStore, tmp_path: Path):
    with pytest.raises(BlobRefused, match="blobs_bytes"):
        store.put("ann", digest_of(b"x"), 10_001, 0, b"x" * 1000)
    assert not (tmp_path / "blobs" / "ann").exists()


def test_a_users_blobs_never_push_out_anothers(store: BlobStore, tmp_path: Path):
    one = blob(1)
    aged(store, tmp_path, one)
    for number in range(2, 8):
        put(store, "ben", blob(number))
    assert has(tmp_path, one)


# ---------------------------------------------------------------- names below a folder


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/etc/passwd", "a/../b", "a//b", "a/", "../x", "a\0b", "x" * 5000, "./a", "a/."]
)
def test_no_name_leads_out_of_a_folder(tmp_path: Path, name: str):
    with pytest.raises(BadName):
        parts_of(name)
    with pytest.raises(BadName):
        open_below(tmp_path, name)


def test_no_link_and_nothing_but_plain_files_is_opened(tmp_path: Path):
    root, outside = tmp_path / "run", tmp_path / "secret"
    (root / "work").mkdir(parents=True)
    outside.mkdir()
    (outside / "key").write_text("secret")
    (root / "link").symlink_to(outside / "key")
    (root / "folder").symlink_to(outside)
    os.mkfifo(root / "pipe")
    (root / "work" / "a.txt").write_text("mine")
    for name in ("link", "folder/key", "work", "pipe", "folder"):
        with pytest.raises(OSError):
            os.close(open_below(root, name))
    descriptor = open_below(root, "work/a.txt")
    assert os.read(descriptor, 100) == b"mine"
    os.close(descriptor)
    assert [file.name for file in list_below(root)[0]] == ["work/a.txt"]
    with pytest.raises(OSError):
        list_below(root, "folder")


def test_writing_follows_no_link_either(tmp_path: Path):
    root, outside = tmp_path / "run", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "work").symlink_to(outside)
    (root / "result-0.bin").symlink_to(outside / "taken")
    for name in ("work/x", "result-0.bin"):
        with pytest.raises(OSError):
            os.close(open_below(root, name, os.O_WRONLY | os.O_CREAT, make=True))
    assert list(outside.iterdir()) == []


@pytest.mark.needs_root
def test_an_upload_goes_on_once_the_disk_has_room(tmp_path: Path):
    (tmp_path / "blobs").mkdir()
    with small_disk(tmp_path / "blobs", "tmpfs", megabytes=1) as disk:
        # a negative reserve: the check before the upload passes although the disk is too small
        store = BlobStore(disk.path, 10_000_000, reserve_bytes=-100_000_000)
        data = os.urandom(2_000_000)
        digest = digest_of(data)
        at = 999_999
        for begin in range(0, at, 333_333):
            store.put("ann", digest, len(data), begin, data[begin : begin + 333_333])
        with pytest.raises(OSError, match="No space left"):
            store.put("ann", digest, len(data), at, data[at : at + 333_333])
        assert store.stored_bytes("ann", digest, len(data)) == at
        disk.grow(8)
        while at < len(data):
            at = store.put("ann", digest, len(data), at, data[at : at + 333_333])
        assert blob_path(disk.path, "ann", digest).read_bytes() == data
        store.close()


def test_a_fault_in_the_thread_of_files_costs_one_answer(capsys: pytest.CaptureFixture[str]):
    async def go() -> list[object]:
        thread, text = FileThread("sgpu-test"), asyncio.Queue[object]()
        thread.do(lambda: 1 // 0, text.put_nowait, text.put_nowait)
        thread.do(lambda: 7, text.put_nowait, text.put_nowait)
        found = [await text.get(), await text.get()]
        thread.close()
        return found

    error, seven = asyncio.run(asyncio.wait_for(go(), 10))
    assert isinstance(error, OSError)
    assert "ZeroDivisionError: " in str(error)
    assert seven == 7
    assert "a fault in thread sgpu-test" in capsys.readouterr().err
