"""Connections of pods to IPv6 addresses of the world, and the policies that hold them."""

from __future__ import annotations

import errno
import select
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.unit.network_making import on_a_host_of_its_own
from tests.unit.substituted import World, compiled, needs_notifications

__all__ = ["compiled"]
pytestmark = needs_notifications
FOUR, SIX = "192.0.2.7", "2001:db8::7"
NAMED, OTHER = [[6, 8080, 8080]], [[6, 1, 79], [17, 8080, 8080]]
EVERYBODY = [["0.0.0.0/0", []]]


def rule(peers: Any = None, ports: Any = None) -> dict[str, Any]:
    return {"peers": peers, "ports": ports}


@pytest.mark.parametrize("path", ["python", "native"])
@pytest.mark.parametrize(
    ("egress", "open_"),
    [
        (None, True),
        ([], False),
        ([rule()], True),
        ([rule(ports=NAMED)], True),
        ([rule(ports=OTHER)], False),
        # Ranges are IPv4; the widest of them does not mean IPv6.
        ([rule(EVERYBODY)], False),
        ([rule(EVERYBODY, NAMED), rule(ports=OTHER)], False),
        ([rule([]), rule(ports=NAMED)], True),
    ],
    ids=["free", "isolated", "all", "port", "other ports", "ipv4", "ipv4 and other ports", "one of two"],
)
def test_egress_to_the_world(egress: Any, open_: bool, path: str, tmp_path: Path, compiled: Any) -> None:
    if path == "native" and isinstance(compiled, str):
        pytest.skip(compiled)

    def act() -> None:
        server = socket.create_server((SIX, 8080), family=socket.AF_INET6)
        world = World(tmp_path, compiled if path == "native" else None)
        world.push(policy={"ingress": None, "egress": egress})

        def client() -> Any:
            with socket.socket(socket.AF_INET6) as made:
                made.setblocking(False)
                first = made.connect_ex((SIX, 8080))
                reached = bool(select.select([], [made], [], 0.3)[1])
                return [first, reached, made.getpeername()[:2] if reached else made.connect_ex((SIX, 8080))]

        assert world.two.run(client) == [
            errno.EINPROGRESS,
            open_,
            [SIX, 8080] if open_ else errno.EALREADY,
        ]
        assert bool(select.select([server], [], [], 0)[0]) == open_

    on_a_host_of_its_own(act, FOUR, six=SIX)
