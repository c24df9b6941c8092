"""`sgpu pool deploy` and `undeploy`: a pool service as a job on a Ray cluster, over its Jobs API, without local Ray."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from sgpu_magic.errors import PoolError, UsageError
from sgpu_magic.nodes.ray.driver import package_archive
from sgpu_magic.nodes.ray.jobs_api import Job, JobsApi
from sgpu_magic.system.secure_sockets import reached_at

DEPLOYED = "SGPU_DEPLOYED"
"""The environment variable of the job that holds its `Deployment`, as JSON."""

POOL = "sgpu-pool"
# Ray's default of 3 s between stopping and killing a job is too short: a pool ends its agents and ranks first
_STOP_WAIT_S = 60
_POLL_S = 0.25
_START_S = 180.0
_OPTION = re.compile(r"--(?P<name>runtime-env-json|entrypoint-(?:num-cpus|num-gpus|memory|resources)|metadata-json)")
_WORDS = re.compile(r"pool \S+ · engine ray · (?P<address>tcp://\S+) · .*--key '(?P<key>[^']{40})'")


class Deployment(msgspec.Struct, frozen=True):
    """The configuration of a deployed pool.

    Args:
        name: The pool's name.
        listen: The address at which it listens for clients.
        clients: The authorized clients: name, public key, whether they are an admin.
    """

    name: str
    listen: str
    clients: tuple[tuple[str, str, bool], ...] = ()


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
            value: object = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, dict if name in ("runtime_env", "metadata", "entrypoint_resources") else int | float):
            raise UsageError(f"--{match['name']} takes JSON, not {text[:80]!r}.")
        fields[name] = value
    return fields


def deploy(api: JobsApi, what: Deployment, variables: Mapping[str, str], options: Mapping[str, object]) -> str:
    """Start the pool in the cluster, wait until clients can connect, and return a message for the user.

    Args:
        api: The cluster's Jobs API.
        what: The pool.
        variables: Its settings as environment variables, `SGPU_...`.
        options: Additional fields of Ray's request, from `job_options`.

    Raises:
        PoolError: The cluster refuses, a pool of this name runs already, or the pool does not start.
    """
    api.check()
    if going := _going(api, what.name):
        raise PoolError(
            f"a pool named {what.name} is already running on the Ray cluster {api.address} (job "
            f"{going[0].submission_id}). `sgpu pool undeploy --ray {api.address} --name {what.name}` ends it; --name "
            "starts another one beside it."
        )
    archive = package_archive()
    package = api.upload(f"_ray_pkg_{hashlib.blake2b(archive, digest_size=16).hexdigest()}.zip", archive)
    job = f"sgpu-{what.name}-{secrets.token_hex(4)}"
    api.submit(_request(job, what, package, variables, options))
    return _told(api, what, _words(api, job))


def undeploy(api: JobsApi, name: str) -> str:
    """End the pool with its agents and runs in the cluster, and return a message for the user.

    Raises:
        PoolError: The cluster refuses, has no such pool, or the pool does not end.
    """
    api.check()
    going = _going(api, name)
    if not going:
        raise PoolError(f"no pool named {name} was deployed on the Ray cluster {api.address}, or it has ended.")
    for job in going:
        api.stop(job.submission_id or "")
    deadline = time.monotonic() + _STOP_WAIT_S + 10
    while _going(api, name):
        if time.monotonic() > deadline:
            raise PoolError(
                f"the pool {name} was asked to end and is still running. Ray's dashboard {api.address} has its log."
            )
        time.sleep(_POLL_S)
    return f"the pool {name} on {api.address} has ended"


def _request(
    job: str, what: Deployment, package: str, variables: Mapping[str, str], options: Mapping[str, object]
) -> dict[str, object]:
    environment = _table(options.get("runtime_env"))
    modules = environment.get("py_modules")
    return {
        **options,
        # `exec` replaces the shell, so that Ray's signals reach the pool
        "entrypoint": "exec python -m sgpu_magic.cli.serving",
        "submission_id": job,
        "runtime_env": {
            **environment,
            "py_modules": [package, *(cast("list[object]", modules) if isinstance(modules, list) else [])],
            "env_vars": {
                "RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_WAIT_S),
                **variables,
                **_table(environment.get("env_vars")),
                DEPLOYED: msgspec.json.encode(what).decode(),
            },
        },
        "metadata": {**_table(options.get("metadata")), POOL: what.name},
    }


def _table(value: object) -> dict[str, object]:
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _going(api: JobsApi, name: str) -> list[Job]:
    return [job for job in api.jobs() if not job.is_over and (job.metadata or {}).get(POOL) == name]


def _words(api: JobsApi, name: str) -> re.Match[str]:
    """Wait until the pool has printed that it listens."""
    deadline = time.monotonic() + _START_S
    while True:
        if match := _WORDS.search(said := api.logs(name)):
            return match
        job = api.job(name)
        last = "\n".join((api.logs(name) or said).strip().splitlines()[-5:]) or (job.message or "")
        if job.is_over:
            raise PoolError(f"the pool did not start on the Ray cluster {api.address} (job {name}): {last[-1500:]}")
        if time.monotonic() > deadline:
            api.stop(name)
            raise PoolError(
                f"the pool did not listen within {_START_S:.0f} s on the Ray cluster {api.address}, so the job {name} "
                f"was ended: {last[-1500:]}"
            )
        time.sleep(_POLL_S)


def _told(api: JobsApi, what: Deployment, match: re.Match[str]) -> str:
    reached = reached_at(match["address"], api.host)
    names = sorted({name for name, _, _ in what.clients})
    admitted = (
        f"authorized users: {', '.join(names)}" if names else "no user is authorized yet: use `sgpu pool authorize`"
    )
    return (
        f"pool {what.name} · {reached} · {admitted}\n"
        f"add it with: sgpu pool add {what.name} {reached} --key '{match['key']}'\n"
        "all its ranks run as the one OS user of the Ray cluster: every user of this pool can read and change the "
        "files and memory of others' runs there. For users who must not, run a pool on a cluster of their own."
    )
