"""Many connections and many pods leave nothing behind in netd, runner, hub and gateway.

SOAK_CONNECTIONS and SOAK_PODS ask for more than a test run has time for (the full soak: 100000 and 200).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.conftest import eventually
from tests.e2e.inspecting import Cluster
from tests.e2e.network_pods import Net, network_namespace, placed, port, service
from tests.e2e.network_weighing import Weight, of_components, of_pod

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]

CONNECTIONS = int(os.environ.get("SOAK_CONNECTIONS", "10000"))
PODS = int(os.environ.get("SOAK_PODS", "30"))
AT_ONCE = 10
CLIENTS = 4
WHERE = {"client": "c1", "server": "c2"}
# What an interpreter's allocator may keep of a burst; a leak of one small object per connection is far more. The hub's heap
# is large and breaks up for some hundred pods before it stays as it is; it holds no more objects then than before.
MEMORY_KIB, HUB_MEMORY_KIB = 3000, 6000
# Pools of threads grow with use up to their size: the hub has one for Slurm's commands and one for files.
POOLS = {"hub": 12 + min(32, (os.cpu_count() or 1) + 4) + 2}
# Connections that the API server keeps open through the gateway for its next call, for a minute and a half.
KEPT = {"gateway": 6}
# Of processes that a netd served, by its Python part and by its native one; each keeps so many at most.
HANDLES = 2 * 256

# An echo of one byte that ends first every second time: the connections it ends are in TIME_WAIT here, the others there.
# Several ports: a host has 28,000 source ports for each destination, and one in TIME_WAIT is not given again for a minute.
PORTS = range(80, 88)
SERVE = (
    f"""
import os, socket
for port in {PORTS}:
    listening = socket.create_server(("", port), backlog=512)
    if not os.fork():
        break
"""
    + """
turn = 0
while True:
    accepted, _ = listening.accept()
    accepted.sendall(accepted.recv(1))
    turn += 1
    if turn % 2:
        accepted.recv(1)
    accepted.close()
"""
)
# count host: so many connections, shared among some processes; every fourth to loopback, where nobody listens.
CONNECT = f"""
import os, socket, sys
count, address = int(sys.argv[1]), socket.gethostbyname(sys.argv[2])
children = []
for _ in range({CLIENTS}):
    child = os.fork()
    if not child:
        for turn in range(count // {CLIENTS}):
            with socket.socket() as connection:
                if turn % 4 == 3:
                    assert connection.connect_ex(("127.0.0.1", 9)) == 111
                    continue
                connection.connect((address, {PORTS}[turn // 4 % {len(PORTS)}]))
                connection.sendall(b"x")
                assert connection.recv(1) == b"x"
        os._exit(0)
    children.append(child)
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


@pytest.fixture(scope="module")
def net(testbed: Any, cluster: str) -> Iterator[Net]:
    with network_namespace(testbed, cluster) as net:
        labels = {"app": "server"}
        net.apply(
            service("server", labels, *(port(each, name=f"p{each}") for each in PORTS)),
            placed("server", ["python3", "-c", SERVE], WHERE["server"], labels=labels),
            placed("client", "sleep 3600", WHERE["client"]),
        )
        net.ready("server", "client")
        eventually(lambda: connect(net, CLIENTS), 10)
        yield net


def connect(net: Net, count: int) -> bool:
    done = net.run("client", "python3", "-c", CONNECT, str(count), "server", check=False, timeout_s=1800)
    return bool(done.ok)


def all_weights(net: Net) -> dict[str, Weight]:
    found = of_components(net.testbed, Cluster(net.testbed, net.cluster).root)
    for name, host in WHERE.items():
        pod = of_pod(net.testbed, host, net.pod(name))
        found |= {f"{part} of {name}": weight for part, weight in pod.items()}
    return found


def grown(before: dict[str, Weight], after: dict[str, Weight]) -> list[str]:
    """What weighs more than before, in words."""
    said = []
    for name, old in before.items():
        new = after[name]
        assert new.pid == old.pid, f"{name} is not the process it was"
        if new.fds > old.fds + KEPT.get(name, 0):
            said.append(f"{name}: {old.fds} descriptors, then {new.fds}")
        if new.handles > HANDLES:
            said.append(f"{name}: {new.handles} handles of processes")
        if new.threads > max(old.threads, POOLS.get(name, 0)):
            said.append(f"{name}: {old.threads} threads, then {new.threads}")
        if new.memory_kib > old.memory_kib + (HUB_MEMORY_KIB if name == "hub" else MEMORY_KIB):
            said.append(f"{name}: {old.memory_kib} KiB, then {new.memory_kib}")
    return said


def assert_not_grown(net: Net, act: Callable[[], None]) -> None:
    before = all_weights(net)
    act()
    last: list[str] = []

    def calm() -> bool:
        last[:] = grown(before, all_weights(net))
        return not last

    try:
        eventually(calm, 30, 1)
    except AssertionError:
        pytest.fail("; ".join(last))


def test_many_connections_leave_nothing(net: Net) -> None:
    # The first ones fill tables, caches and allocators.
    assert connect(net, max(2000, CONNECTIONS // 10))

    def act() -> None:
        assert connect(net, CONNECTIONS)

    assert_not_grown(net, act)


def churn(net: Net, count: int) -> None:
    """Pods that each connect and end, some at once, by a Job."""
    name = f"churn-{random.randrange(1 << 32):x}"
    template = placed("x", ["python3", "-c", CONNECT, str(4 * CLIENTS), "server"])["spec"]
    spec = {"completions": count, "parallelism": AT_ONCE, "backoffLimit": 0, "template": {"spec": template}}
    net.apply({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec})
    limit_s = 60 + 10 * count
    net("wait", "--for=condition=Complete", f"job/{name}", f"--timeout={limit_s}s", timeout_s=limit_s + 10)
    net("delete", "job", name, "--cascade=foreground", "--wait=true", timeout_s=120)


def test_many_pods_leave_nothing(net: Net) -> None:
    churn(net, max(AT_ONCE, PODS // 2))
    assert_not_grown(net, lambda: churn(net, PODS))
