"""`python -m sgpu_magic.cli.deployed`: the Ray job of `sgpu pool deploy`; it becomes the pool service."""

from __future__ import annotations

import contextlib
import os
import sys

import msgspec

from sgpu_magic.cli.serving import serve
from sgpu_magic.config import load_settings, private_dir
from sgpu_magic.errors import SgpuError, UsageError
from sgpu_magic.nodes.ray.deploy import DEPLOYED, Deployment
from sgpu_magic.pool import clients
from sgpu_magic.pool.serving import CLIENTS, served_settings


def main() -> None:
    what = msgspec.json.decode(os.environ.pop(DEPLOYED), type=Deployment)
    try:
        settings = load_settings()
        folder = private_dir(served_settings(settings, what.name).state_path)
        for name, key, admin in what.clients:
            # whoever is listed there already stays as they are
            with contextlib.suppress(UsageError):
                clients.authorize(folder / CLIENTS, name, key, admin=admin)
        serve(settings, "ray", what.listen, what.name, same_files=settings.ray_same_files)
    except SgpuError as error:
        sys.exit(f"sgpu: {error.message}")


if __name__ == "__main__":
    main()
