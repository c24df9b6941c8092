"""`sgpu pool deploy` and `undeploy`: a served pool as a job of a Ray cluster.

`python -m sgpu_magic.cli.ray_deployment` is the entry point of that job, which becomes the pool's service.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import re
import sys
from collections.abc import Sequence

import msgspec

from sgpu_magic.cli.serving import serve
from sgpu_magic.client.this_machine import own_key_path
from sgpu_magic.config import Settings, load_settings, private_dir
from sgpu_magic.errors import SgpuError, UsageError
from sgpu_magic.nodes.ray.deploy import DEPLOYED, Deployment, JobsApi, deploy, undeploy
from sgpu_magic.pool import clients
from sgpu_magic.pool.clients import read_clients
from sgpu_magic.pool.serving import CLIENTS, checked_listen, checked_name, served_settings
from sgpu_magic.system.secure_sockets import read_key_pair
from sgpu_magic.wire.decoding import decode_json, load_json

# the pool's settings, taken from the environment of `sgpu pool deploy`; directories are set on the head node
_TRAVEL = (
    "SGPU_RAY_", "SGPU_USER_", "SGPU_FAIR_", "SGPU_LINK_", "SGPU_BULK_", "SGPU_ADOPT_",
    "SGPU_PRICES", "SGPU_RESERVED_PRICES",
)  # fmt: skip
_OPTION = re.compile(r"--(?P<name>runtime-env-json|entrypoint-(?:num-cpus|num-gpus|memory|resources)|metadata-json)")


def deploy_pool(settings: Settings, options: argparse.Namespace) -> str:
    """Deploy a pool on a Ray cluster or end it, and return a message.

    Raises:
        SgpuError: An option is not valid, the cluster refuses, or the pool does not start or end.
    """
    api = JobsApi(options.ray)
    name = checked_name(options.name)
    if options.action == "undeploy":
        return undeploy(api, name)
    what = Deployment(name, checked_listen(options.listen), _clients(settings, name))
    variables = {key: value for key, value in os.environ.items() if key.startswith(_TRAVEL)}
    reached, key = deploy(api, what, variables, job_options(options.job))
    users = sorted({user for user, _, _ in what.clients})
    admitted = (
        f"authorized users: {', '.join(users)}" if users else "no user is authorized yet: use `sgpu pool authorize`"
    )
    return (
        f"pool {name} · {reached} · {admitted}\n"
        f"add it with: sgpu pool add {name} {reached} --key '{key}'\n"
        "all its ranks run as the one OS user of the Ray cluster: every user of this pool can read and change the "
        "files and memory of others' runs there. For users who must not, run a pool on a cluster of their own."
    )


def job_options(words: Sequence[str]) -> dict[str, object]:
    """Parse the options after `--`, which are those of `ray job submit`, into fields of Ray's request.

    Raises:
        UsageError: An option is unknown or has an invalid value.
    """
    fields: dict[str, object] = {}
    rest = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while rest:
        match = _OPTION.fullmatch(rest[0])
        if match is None or len(rest) < 2:
            raise UsageError(
                f"{rest[0]!r} is not an option of the job. After --, use --runtime-env-json, --metadata-json, "
                "--entrypoint-num-cpus, --entrypoint-num-gpus, --entrypoint-memory and --entrypoint-resources, each "
                "with a value, as for `ray job submit`."
            )
        name, text = match["name"].removesuffix("-json").replace("-", "_"), rest[1]
        rest = rest[2:]
        try:
            value: object = load_json(text)
        except ValueError:
            value = None
        wanted = dict if name in ("runtime_env", "metadata", "entrypoint_resources") else int | float
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise UsageError(f"--{match['name']} takes JSON, not {text[:80]!r}.")
        fields[name] = value
    return fields


def _clients(settings: Settings, name: str) -> tuple[tuple[str, str, bool], ...]:
    """Return the authorized clients: this user, and those added here by `sgpu pool authorize --name NAME`."""
    listed = read_clients(served_settings(settings, name).state_path / CLIENTS)
    clients = [(client.user, key, client.admin) for key, client in listed.items()]
    try:
        own = read_key_pair(own_key_path()).public
    except FileNotFoundError:
        return tuple(clients)
    return tuple(clients) if own in listed else ((getpass.getuser(), own, True), *clients)


def main() -> None:
    try:
        what = decode_json(os.environ.pop(DEPLOYED, ""), type=Deployment)
    except msgspec.DecodeError as error:
        sys.exit(
            f"sgpu: this is the entry point of `sgpu pool deploy`, and the variable {DEPLOYED} is invalid: {error}"
        )
    try:
        settings = load_settings()
        folder = private_dir(served_settings(settings, checked_name(what.name)).state_path)
        for name, key, admin in what.clients:
            # clients that are listed there already are left unchanged
            with contextlib.suppress(UsageError):
                clients.authorize(folder / CLIENTS, name, key, admin=admin)
        serve(settings, "ray", what.listen, what.name, same_files=settings.ray_same_files)
    except SgpuError as error:
        sys.exit(f"sgpu: {error.message}")


if __name__ == "__main__":
    main()
