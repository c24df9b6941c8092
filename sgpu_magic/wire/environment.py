"""Records of a run's Python packages and of the code that travels with it."""

from __future__ import annotations

from sgpu_magic.wire.record import Record


class Wheel(Record, frozen=True, kw_only=True):
    """A wheel that no registry has: a local project's, or one repacked from what is installed.

    Args:
        file: Its file name, `name-1.0-py3-none-any.whl`.
        sha256: Of its bytes, hexadecimal; what it is kept under.
        size: In bytes.
        path: Where the client has it.
        blobs: Digests of the pool's blobs that it consists of, in order, where nodes don't see the client's files.
    """

    file: str
    sha256: str
    size: int
    path: str
    blobs: tuple[str, ...] = ()


class CodeBundle(Record, frozen=True, kw_only=True):
    """The modules under one entry of the kernel's `sys.path`, as a zip archive.

    Args:
        entry: The kernel's path entry; on the node the unpacked bundle stands in its place.
        sha256: Of the archive, hexadecimal. Alike for alike contents: file times and order are normalised.
        size: Of the archive, in bytes.
        path: Where the client has it.
        blobs: As a wheel's.
    """

    entry: str
    sha256: str
    size: int
    path: str
    blobs: tuple[str, ...] = ()


class Environment(Record, frozen=True, kw_only=True):
    """The packages that a run's ranks have, as a node that has to build them needs to know them.

    Args:
        digest: Over pins, hashes, Python tag, platform and the two choices below; what a built one is kept under.
        label: For people: "" is the notebook's own, else a base environment's, a saved one's or a file's name.
        own: The notebook's own: a node where the kernel's interpreter is at hand uses that and builds nothing.
        python: `3.11`.
        platform: As `packaging.tags` names it without the glibc's version: `linux_x86_64`.
        requirements: Lines of a requirements file, complete: they are installed without their dependencies. What a
            node's base layer brings (torch, `nvidia-*`, sgpu-magic and what its worker needs) is left out.
        needed: What the requirements' lines leave to the node's base layer, as pins for the record: `torch==2.13.0`.
        resolve: The requirements are what a person wrote: dependencies are looked up, versions may be open.
        wheels: Installed beside them.
        torch_mine: `--torch mine`: torch and `nvidia-*` are installed as the notebook has them.
        allow_build: Source distributions may be built.
        packages: How many there are, those of the base layer not counted.
        conda: Packages that conda has installed; a node that has to build refuses them.
    """

    digest: str
    label: str = ""
    own: bool = True
    python: str = ""
    platform: str = ""
    requirements: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    resolve: bool = False
    wheels: tuple[Wheel, ...] = ()
    torch_mine: bool = False
    allow_build: bool = False
    packages: int = 0
    conda: tuple[str, ...] = ()
