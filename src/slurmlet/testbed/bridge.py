"""The wire between hosts: one bridge, in a network namespace of its own, and one veth per host.

Nothing here is visible in the machine's own network namespace: no link, no address, no route, no filter rule. Hosts
reach each other and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurmlet.base.processes import run
from slurmlet.testbed.host_namespaces import Init, links_of, wait_until
from slurmlet.testbed.testbed_plan import address_of

BRIDGE = "slt0"


def _ip(init: Init, commands: Sequence[str]) -> None:
    # Without --pid: `netns PID` below means a pid of the machine.
    argv = [
        "nsenter",
        f"--target={init.pid}",
        "--mount",
        "--net",
        "--root",
        "--wd",
        "--",
        "ip",
        "-batch",
        "-",
    ]
    run(argv, stdin="\n".join(commands) + "\n", timeout_s=20)


def make_switch(switch: Init) -> None:
    if BRIDGE not in links_of(switch):
        _ip(switch, [f"link add {BRIDGE} type bridge", f"link set {BRIDGE} up", "link set lo up"])


def plug(switch: Init, hosts: dict[str, Init]) -> None:
    """Connect the hosts; those that are connected stay so (and a cut cable is mended)."""
    here = links_of(switch)
    new = {name: init for name, init in hosts.items() if "eth0" not in links_of(init)}
    # The cable of a host that died is removed by the kernel a little later than its processes.
    wait_until(lambda: not links_of(switch) & set(new), 10, "old cables to vanish")
    added = [f"link add {name} type veth peer name eth0 netns {init.pid}" for name, init in new.items()]
    _ip(
        switch,
        [*added, *(f"link set {name} master {BRIDGE} up" for name in hosts if name in here | set(new))],
    )
    for name, init in new.items():
        _address(init, address_of(name))


def plug_address(switch: Init, name: str, host: Init, address: str) -> None:
    """Connect one more host, under an address that its name does not tell."""
    wait_until(lambda: name not in links_of(switch), 10, f"the old cable of {name} to vanish")
    added = f"link add {name} type veth peer name eth0 netns {host.pid}"
    _ip(switch, [added, f"link set {name} master {BRIDGE} up"])
    _address(host, address)


def _address(init: Init, address: str) -> None:
    _ip(init, [f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"])


def set_cable(switch: Init, host: str, *, connected: bool) -> None:
    _ip(switch, [f"link set {host} {'up' if connected else 'down'}"])
