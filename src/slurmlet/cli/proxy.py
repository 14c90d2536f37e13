"""`slurmlet proxy`."""

from __future__ import annotations

import click

from slurmlet.base.console import emit_json, say
from slurmlet.base.layout import ClusterFiles
from slurmlet.cli.options import cluster_option, output_option


@click.command()
@cluster_option
@click.option("--port", default=0, metavar="PORT", show_default="a free port", help="Port to listen on.")
@click.option(
    "-n",
    "--namespace",
    metavar="NAME",
    default="default",
    show_default=True,
    help="Namespace in which short names are resolved.",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Forward to destinations outside the cluster too, from this host.",
)
@click.option("--print-env", is_flag=True, help="Print the shell variables for a running proxy, and exit.")
@output_option
def command(cluster: str, port: int, namespace: str, everything: bool, print_env: bool, output: str) -> None:
    """Serve a SOCKS5 and HTTP proxy into the cluster, for a browser or curl.

    It listens on 127.0.0.1, accepts only your own programs, and runs until Ctrl-C.

    \b
    slurmlet proxy --port 1080 &
    curl -x socks5h://127.0.0.1:1080 http://web.default.svc.cluster.local:8080/
    curl -x http://127.0.0.1:1080 http://web:8080/
    eval "$(slurmlet proxy --print-env)"; curl http://web.default:8080/

    For a browser on your own machine: run ssh -L 1080:127.0.0.1:1080 <login host>, then set 127.0.0.1:1080 as its SOCKS v5
    proxy and enable DNS through the proxy.
    """
    from slurmlet.controlplane.proxy_process import Address, running, serve

    files = ClusterFiles.named(cluster)

    def show(address: Address) -> None:
        if output == "json":
            emit_json({"port": address.port, "http": address.http, "socks5": address.socks})
        else:
            print(f"{address.http} {address.socks}", flush=True)
        say(f"Proxy into cluster {cluster!r}. Stop it with Ctrl-C.")

    if print_env:
        for name, value in running(files).environment().items():
            print(f"export {name}={value}")
        return
    serve(files, port=port, namespace=namespace, everything=everything, ready=show)
