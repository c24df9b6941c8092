"""What a launch has in the pool's store comes to this node: the payload into memory, code and wheels into files."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from sgpu_magic.agent.background_call import call_in_background
from sgpu_magic.agent.inputs.blob_cache import BlobCache
from sgpu_magic.agent.inputs.kept_inputs import CodeBundles, Uploaded
from sgpu_magic.agent.reports import Send
from sgpu_magic.config import Settings, private_dir
from sgpu_magic.files.content_store import join_blobs, join_parts, piece_sizes
from sgpu_magic.files.whole_file import appearing
from sgpu_magic.system.byte_sizes import fits_memory
from sgpu_magic.wire.attachments import CodeBundle, StoredPayload, Wheel
from sgpu_magic.wire.node import Launch


def travels_by_blobs(launch: Launch) -> bool:
    """Whether something of it has to come from the pool's store before it can be started."""
    wheels = launch.environment.wheels if launch.environment is not None else ()
    if any(upload.manifest for upload in launch.uploads):
        return True
    return isinstance(launch.payload.source, StoredPayload) or any(each.blobs for each in (*launch.code, *wheels))


Item = TypeVar("Item", CodeBundle, Wheel)


class LaunchInputs:
    """Brings together what launches need of the notebook's code and files.

    Args:
        settings: Where files of a launch lie until it has started.
        send: Sends to the pool service of now.

    Attributes:
        blobs: Where blobs come from.
        uploaded: Has the folders that went along.
        code: Unpacks local code.
    """

    def __init__(self, settings: Settings, send: Send) -> None:
        self._folder = settings.state_path / "arrivals"
        self.blobs = BlobCache(settings, send)
        self.uploaded = Uploaded(settings, self.blobs)
        self.code = CodeBundles(settings)

    async def luggage(self, launch: Launch) -> Launch:
        """Return the launch with code, wheels and uploads that lie in files of this node, code and wheels until `over`.

        Raises:
            BlobMissing: Something can't be had.
            OSError: It can't be written.
        """
        code = [await self._on_disk(launch, bundle, f"code-{at}") for at, bundle in enumerate(launch.code)]
        launch = msgspec.structs.replace(launch, code=tuple(code))
        environment = launch.environment
        if environment is not None and environment.wheels:
            wheels = [await self._on_disk(launch, wheel, f"wheel-{at}") for at, wheel in enumerate(environment.wheels)]
            environment = msgspec.structs.replace(environment, wheels=tuple(wheels))
            launch = msgspec.structs.replace(launch, environment=environment)
        return await self.uploaded.arrive(launch) if launch.uploads else launch

    async def payload(self, launch: Launch, source: StoredPayload) -> tuple[int, str]:
        """Bring the payload together: in memory, or in a file where that is short.

        Returns:
            Its descriptor, and the file's path, "" for memory.

        Raises:
            BlobMissing: A part can't be had.
            OSError: There is no room.
        """
        run_id = launch.spec.run_id
        paths = await asyncio.gather(
            *(self.blobs.path(run_id, launch.store, part.digest, part.size, far=launch.far) for part in source.parts)
        )
        joined = call_in_background(lambda: _joined(launch.run_dir, source, paths), "sgpu-arrival")
        try:
            return await asyncio.shield(joined)
        except asyncio.CancelledError:
            joined.add_done_callback(_discard)
            raise

    def over(self, run_id: str) -> None:
        """What came is at work or of no use any more."""
        self.blobs.leave(run_id)
        shutil.rmtree(self._folder / run_id, ignore_errors=True)

    def release(self, run_id: str) -> None:
        """The run's ranks are gone: what it had of the notebook's code and files is free."""
        self.code.release(run_id)
        self.uploaded.release(run_id)

    # ------------------------------------------------------------ within

    async def _on_disk(self, launch: Launch, each: Item, name: str) -> Item:
        if not each.blobs:
            return each
        run_id = launch.spec.run_id
        paths = [
            await self.blobs.path(run_id, launch.store, digest, size, far=launch.far)
            for digest, size in zip(each.blobs, piece_sizes(each.size), strict=True)
        ]
        if len(paths) == 1:
            return msgspec.structs.replace(each, path=str(paths[0]))
        target = private_dir(self._folder / run_id) / name
        await call_in_background(lambda: _join(paths, target), "sgpu-arrival")
        return msgspec.structs.replace(each, path=str(target))


def _joined(run_dir: str, source: StoredPayload, paths: Sequence[Path]) -> tuple[int, str]:
    file = ""
    if fits_memory(source.size):
        descriptor = os.memfd_create("sgpu-payload-arrived", os.MFD_CLOEXEC)
    else:
        file = os.path.join(run_dir, ".payload.bin.part")
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        join_parts(descriptor, source.size, zip(source.parts, paths, strict=True))
    except BaseException:
        _remove(descriptor, file)
        raise
    return descriptor, file


def _discard(joined: asyncio.Future[tuple[int, str]]) -> None:
    """Nobody wants it any more."""
    if joined.exception() is None:
        _remove(*joined.result())


def _remove(descriptor: int, file: str) -> None:
    os.close(descriptor)
    if file:
        Path(file).unlink(missing_ok=True)


def _join(paths: Sequence[Path], target: Path) -> None:
    with appearing(target) as file:
        join_blobs(file.fileno(), [(path, path.stat().st_size) for path in paths])
