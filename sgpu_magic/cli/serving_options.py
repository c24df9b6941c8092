"""The options of `sgpu pool serve`, `deploy`, `undeploy`, `keygen`, `authorize` and `revoke`."""

from __future__ import annotations

from typing import Any


def add_actions(actions: Any) -> None:
    """Add them to the actions of `sgpu pool`."""
    serve = actions.add_parser("serve", help="be a pool for other machines, in the foreground", allow_abbrev=False)
    serve.add_argument("--engine", choices=("local", "ray"), default="local", help="where ranks run (local)")
    serve.add_argument("--listen", required=True, metavar="tcp://0.0.0.0:PORT", help="where clients come in")
    _add_name(serve)
    serve.add_argument("--same-files", action="store_true", help="nodes see the clients' files and Pythons: build none")
    deploy = actions.add_parser("deploy", help="start such a pool on a Ray cluster, as a job of it", allow_abbrev=False)
    _add_ray(deploy)
    deploy.add_argument(
        "--listen", default="tcp://0.0.0.0:8700", metavar="tcp://0.0.0.0:PORT", help="where clients come in (port 8700)"
    )
    _add_name(deploy)
    deploy.add_argument("job", nargs="*", metavar="-- OPTIONS", help="of the job, as `ray job submit` has them")
    undeploy = actions.add_parser("undeploy", help="end a pool that was deployed", allow_abbrev=False)
    _add_ray(undeploy)
    _add_name(undeploy)
    keygen = actions.add_parser("keygen", help="make the key by which pools know you", allow_abbrev=False)
    keygen.add_argument("--force", action="store_true", help="in place of the one that there is")
    authorize = actions.add_parser("authorize", help="let a user into a pool that is served here", allow_abbrev=False)
    authorize.add_argument("who", metavar="WHO", help="the user's name, shown with their runs")
    authorize.add_argument("key", metavar="KEY", help="their public key, which `sgpu pool keygen` prints")
    authorize.add_argument("--admin", action="store_true", help="they may end everybody's runs and stop the pool")
    _add_name(authorize)
    revoke = actions.add_parser("revoke", help="let a user in no longer", allow_abbrev=False)
    revoke.add_argument("who", metavar="WHO")
    _add_name(revoke)


def _add_ray(parser: Any) -> None:
    parser.add_argument("--ray", required=True, metavar="http://HEAD:8265", help="Ray's dashboard")


def _add_name(parser: Any) -> None:
    parser.add_argument("--name", default="team", metavar="NAME", help="the served pool's name (team)")
