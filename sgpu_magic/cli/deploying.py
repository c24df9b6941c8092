"""`sgpu pool deploy` and `undeploy`: a pool on a Ray cluster that this machine reaches only over the network."""

from __future__ import annotations

import argparse
import getpass
import os

from sgpu_magic.client.keys import own_key_path
from sgpu_magic.config import Settings
from sgpu_magic.nodes.ray.deploy import Deployment, deploy, job_options, undeploy
from sgpu_magic.nodes.ray.jobs_api import JobsApi
from sgpu_magic.pool.clients import read_clients
from sgpu_magic.pool.serving import CLIENTS, checked_listen, checked_name, served_settings
from sgpu_magic.system.secure_sockets import read_key_pair

# the pool's own settings, said where `sgpu pool deploy` is called; directories are the head's affair
_TRAVEL = ("SGPU_RAY_", "SGPU_USER_", "SGPU_FAIR_", "SGPU_LINK_", "SGPU_ADOPT_", "SGPU_PRICES", "SGPU_RESERVED_PRICES")


def run(settings: Settings, options: argparse.Namespace) -> str:
    """Do what was asked and return what to print.

    Raises:
        SgpuError: An option means nothing, the cluster refuses, or the pool does not start or end.
    """
    api = JobsApi(options.ray)
    name = checked_name(options.name)
    if options.action == "undeploy":
        return undeploy(api, name)
    what = Deployment(name, checked_listen(options.listen), _clients(settings, name))
    variables = {key: value for key, value in os.environ.items() if key.startswith(_TRAVEL)}
    return deploy(api, what, variables, job_options(options.job))


def _clients(settings: Settings, name: str) -> tuple[tuple[str, str, bool], ...]:
    """Who is let in: this user, and all that `sgpu pool authorize --name NAME` has listed here."""
    listed = read_clients(served_settings(settings, name).state_path / CLIENTS)
    clients = [(client.user, key, client.admin) for key, client in listed.items()]
    try:
        own = read_key_pair(own_key_path()).public
    except FileNotFoundError:
        return tuple(clients)
    return tuple(clients) if own in listed else ((getpass.getuser(), own, True), *clients)
