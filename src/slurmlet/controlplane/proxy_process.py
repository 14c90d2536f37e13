"""`slurmlet proxy`: a foreground process between a person's programs and the gateway, found again by its record in run/."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Callable, Iterator

from slurmlet.base.errors import SlurmletError, UserError
from slurmlet.base.files import read_json, write_json
from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane.api_probe import ApiProbe
from slurmlet.controlplane.run_files import ProcessIdentity, run_files, running_supervisor

HOST = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Address:
    port: int

    @property
    def http(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def socks(self) -> str:
        return f"socks5h://{HOST}:{self.port}"

    def environment(self) -> dict[str, str]:
        """What curl, Python, Go and most others read; names inside the cluster are left to the proxy."""
        names = {"http_proxy": self.http, "https_proxy": self.http, "all_proxy": self.socks}
        return {**names, **{name.upper(): value for name, value in names.items()}}


def serve(
    files: ClusterFiles,
    *,
    port: int,
    namespace: str,
    everything: bool,
    ready: Callable[[Address], None],
) -> None:
    """Until SIGINT or SIGTERM."""
    from slurmlet.gateway.proxy_server import Options, ProxyServer, listen
    from slurmlet.linux.event_loop import Loop

    if running_supervisor(files, "proxy") is None:
        raise UserError(
            f"cluster {files.name!r} is not running", hint=f"Start it: slurmlet up -c {files.name}"
        )
    try:
        listener = listen(port)
    except OSError as error:
        raise UserError(
            f"port {port}: {error.strerror}",
            hint="Choose another port, or leave out --port to get a free one.",
        ) from error
    loop = Loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.on_signal(number, loop.stop)
    probe = ApiProbe(files)
    server = ProxyServer(
        loop, listener, Options(files.gateway_socket, namespace, not everything, probe.pod_address)
    )
    with _recorded(files, server.port):
        ready(Address(server.port))
        loop.run()


def running(files: ClusterFiles) -> Address:
    """The proxy that runs for this cluster on this host, if one does."""
    raw = read_json(run_files(files).proxy)
    with contextlib.suppress(KeyError, TypeError, ValueError):
        identity = ProcessIdentity(int(raw["pid"]), int(raw["start_ticks"]), raw["boot_id"], raw["host"])
        if identity.alive():
            return Address(int(raw["port"]))
    raise SlurmletError(
        f"no `slurmlet proxy` is running for cluster {files.name!r} on this host",
        hint=f"Start it in another terminal, or in the background: slurmlet proxy -c {files.name} &",
    )


@contextlib.contextmanager
def _recorded(files: ClusterFiles, port: int) -> Iterator[None]:
    identity = ProcessIdentity.of(os.getpid())
    assert identity is not None
    path = run_files(files).proxy
    write_json(path, {**dataclasses.asdict(identity), "port": port})
    try:
        yield
    finally:
        if (read_json(path) or {}).get("pid") == os.getpid():
            path.unlink(missing_ok=True)
