"""`slurmlet proxy`."""

from __future__ import annotations

import click

from slurmlet.base.console import emit_json, say
from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane.user_tools import default_cluster


@click.command()
@click.option(
    "-c",
    "--cluster",
    default=default_cluster,
    help="Which cluster. [default: $SLURMLET_CLUSTER or 'default']",
)
@click.option("--port", default=0, metavar="P", help="Listen on this port. [default: one that is free]")
@click.option(
    "-n", "--namespace", default="default", show_default=True, help="Where short names are looked up."
)
@click.option(
    "--all", "everything", is_flag=True, help="Also what is outside the cluster, as this host reaches it."
)
@click.option("--print-env", is_flag=True, help="Print shell variables for the proxy that runs already.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def command(cluster: str, port: int, namespace: str, everything: bool, print_env: bool, output: str) -> None:
    """A SOCKS5 and HTTP proxy on 127.0.0.1 into the cluster, for your own programs only. Ctrl-C ends it.

    \b
    slurmlet proxy --port 1080 &
    curl -x socks5h://127.0.0.1:1080 http://web.default.svc.cluster.local:8080/
    curl -x http://127.0.0.1:1080 http://web:8080/
    eval "$(slurmlet proxy --print-env)"; curl http://web.default:8080/

    For a browser on your own machine: ssh -L 1080:127.0.0.1:1080 <login host>, then name 127.0.0.1:1080 as its SOCKS v5
    proxy, with DNS through the proxy.
    """
    from slurmlet.controlplane.proxy_process import Address, running, serve

    files = ClusterFiles.named(cluster)

    def show(address: Address) -> None:
        if output == "json":
            emit_json({"port": address.port, "http": address.http, "socks5": address.socks})
        else:
            print(f"{address.http} {address.socks}", flush=True)
        say(f"Cluster {cluster!r} is behind it. Ctrl-C ends it.")

    if print_env:
        for name, value in running(files).environment().items():
            print(f"export {name}={value}")
        return
    serve(files, port=port, namespace=namespace, everything=everything, ready=show)
