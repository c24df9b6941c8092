"""A node keeps copies of blobs and uploads per user: a digest alone gives no access to another user's bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from launches import launch
from msgspec.structs import replace

from sgpu_magic.agent.blobs import BlobCache, BlobMissing, Uploaded
from sgpu_magic.agent.reports import FileRequests
from sgpu_magic.config import Settings
from sgpu_magic.files.content_store import blob_digest
from sgpu_magic.wire.attachments import Manifest, Upload, UploadedFile, manifest_bytes
from sgpu_magic.wire.base import Record
from sgpu_magic.wire.files import BlobFetched, FetchBlob
from sgpu_magic.wire.node import Launch

SECRET = b"what ann has sent"
DIGEST = blob_digest(memoryview(SECRET))


class Node:
    """A node on another machine than the pool, which has a store for each user."""

    def __init__(self, state: Path, **settings: int) -> None:
        self.stores: dict[str, dict[str, bytes]] = {"ann": {}, "ben": {}}
        self.fetched: list[tuple[str, str]] = []
        made = Settings(state_dir=str(state), **settings)
        self.requests = FileRequests(self._answer)
        self.blobs = BlobCache(made, self.requests)
        self.uploads = Uploaded(made, self.blobs)

    def put(self, user: str, data: bytes) -> str:
        digest = blob_digest(memoryview(data))
        self.stores[user][digest] = data
        return digest

    def _answer(self, message: Record, frames: Sequence[bytes] = (), descriptors: Sequence[int] = ()) -> None:
        assert isinstance(message, FetchBlob)
        self.fetched.append((message.store, message.digest))
        data = self.stores[message.store].get(message.digest)
        problem = None if data is not None else "it is not in the store"
        part = (data or b"")[message.offset : message.offset + message.size]
        asyncio.get_running_loop().call_soon(
            self.requests.answered, BlobFetched(request=message.request, problem=problem), (part,)
        )


def run_of(user: str, run_id: str, *uploads: Upload) -> Launch:
    made = launch()
    return replace(made, spec=replace(made.spec, run_id=run_id), store=user, far=True, uploads=uploads)


def test_a_digest_alone_gives_no_blob_of_another_user(tmp_path: Path):
    async def check() -> None:
        node = Node(tmp_path)
        node.put("ann", SECRET)
        assert (await node.blobs.path(run_of("ann", "0000000a"), DIGEST, len(SECRET))).read_bytes() == SECRET
        with pytest.raises(BlobMissing):
            await node.blobs.path(run_of("ben", "0000000b"), DIGEST, len(SECRET))
        # nor during the fetch
        node = Node(tmp_path / "another")
        node.put("ann", SECRET)
        both = [node.blobs.path(run_of(user, f"000000{user}"), DIGEST, len(SECRET)) for user in ("ann", "ben")]
        found = await asyncio.gather(*both, return_exceptions=True)
        assert isinstance(found[0], Path)
        assert isinstance(found[1], BlobMissing)
        # the blob is fetched once for each user
        node.put("ben", SECRET)
        for _ in range(2):
            await node.blobs.path(run_of("ben", "0000000b"), DIGEST, len(SECRET))
        assert node.fetched == [("ann", DIGEST), ("ben", DIGEST), ("ben", DIGEST)]

    asyncio.run(check())


def test_a_manifest_alone_gives_no_folder_of_another_user(tmp_path: Path):
    async def check() -> None:
        node = Node(tmp_path)
        node.put("ann", SECRET)
        manifest = manifest_bytes(Manifest(files=(UploadedFile(name="a.txt", size=len(SECRET), blobs=(DIGEST,)),)))
        digests = [node.put(user, manifest) for user in ("ann", "ben")]
        upload = Upload(name="data", manifest=digests[0], manifest_size=len(manifest))
        arrived = await node.uploads.arrive(run_of("ann", "0000000a", upload))
        assert (Path(arrived.uploads[0].path) / "a.txt").read_bytes() == SECRET
        with pytest.raises(BlobMissing):
            await node.uploads.arrive(run_of("ben", "0000000b", upload))
        for run_id in ("0000000a", "0000000b"):
            node.uploads.release(run_id)

    asyncio.run(check())


@pytest.mark.parametrize("order", ["file first", "folder first"])
def test_a_file_and_its_folder_can_both_be_uploaded(order: str, tmp_path: Path):
    folder, file, cwd = tmp_path / "folder", tmp_path / "file", tmp_path / "cwd"
    (folder / "below").mkdir(parents=True)
    for path in (folder / "x.csv", folder / "below" / "y.csv", file):
        path.write_text(path.name)
    cwd.mkdir()
    uploads = [
        Upload(name="", path=str(file), below="data/x.csv"),
        Upload(name="", path=str(file), below="data/new.csv"),
        Upload(name="data", path=str(folder), below="data"),
    ]
    before = sorted(folder.rglob("*"))

    async def check() -> None:
        node = Node(tmp_path / "state")
        context = replace(launch().context, cwd=str(cwd), is_remote=True)
        ordered = uploads if order == "file first" else reversed(uploads)
        made = node.uploads.add_uploads(replace(run_of("ann", "0000000a", *ordered), context=context))
        # only what has a name is given to `runtime.upload_path`
        assert made.context.environ["SGPU_UPLOADS"].count("data") == 1

    asyncio.run(check())
    assert (cwd / "data" / "x.csv").read_text() in ("x.csv", "file")
    assert (cwd / "data" / "below" / "y.csv").read_text() == "y.csv"
    # nothing is written into another upload
    assert sorted(folder.rglob("*")) == before


def test_the_budget_is_of_all_users_together(tmp_path: Path):
    async def check() -> None:
        node = Node(tmp_path, blobs_bytes=250)
        paths: list[Path] = []
        for number, user in enumerate(("ann", "ben", "ann")):
            data = bytes([number]) * 100
            paths.append(await node.blobs.path(run_of(user, f"{number:08x}"), node.put(user, data), len(data)))
            if number < 2:
                node.blobs.release(f"{number:08x}")
        assert [path.exists() for path in paths] == [False, True, True]

    asyncio.run(check())
