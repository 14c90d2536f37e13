"""What dies of the network is replaced: connections that are open go on, new ones work within two seconds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.e2e.conftest import eventually
from tests.e2e.inspecting import Cluster
from tests.e2e.network_pods import PROBER, Net, Question, agent, network_namespace, port, service
from tests.e2e.network_weighing import of_pod

pytestmark = pytest.mark.e2e

LIMIT_S = 2.0
WATCHED_S = 4
WHERE = {"client": "c1", "server": "c2"}
LABELS = {"app": "server"}

# prober (name questions)…: watchers on their own, each with its answers in a file; comes back once all have begun.
BACKGROUND = """
for word; do
  case $word in
    [[]*) setsid python3 -c "$0" "$word" >/tmp/$name 2>/tmp/$name.begun </dev/null & ;;
    *) name=$word; names="$names $name"; rm -f /tmp/$name /tmp/$name.begun ;;
  esac
done
for name in $names; do while [ ! -s /tmp/$name.begun ]; do sleep 0.05; done; done
"""
# Waits in accept() in the plainest way, once for each line it is to print.
WAIT = """
import socket
listening = socket.create_server(("", 7000))
print("waiting")
for _ in range(2):
    accepted, peer = listening.accept()
    print(peer[0], accepted.getsockname()[1])
    accepted.close()
"""


@pytest.fixture(scope="module")
def net(testbed: Any, cluster: str) -> Iterator[Net]:
    with network_namespace(testbed, cluster) as net:
        net.apply(
            service("server", LABELS, port(80, name="www"), port(53, name="ask", protocol="UDP")),
            agent("server", "tcp:80", "udp:53", host=WHERE["server"], labels=LABELS),
            agent("client", "tcp:80", host=WHERE["client"]),
        )
        net.ready("server", "client")
        net.listening("server")
        eventually(lambda: isinstance(net.ask_one("client", "who", net.cluster_ip("server"), 80), dict), 10)
        yield net


def kill_netd(net: Net, name: str) -> None:
    netd = of_pod(net.testbed, WHERE[name], net.pod(name))["netd"]
    net.testbed.run(["kill", "-KILL", str(netd.pid)], host=WHERE[name], user="root")


def kill_component(net: Net, name: str) -> None:
    here = Cluster(net.testbed, net.cluster)
    here.signal(here.pid(name), "KILL")


def questions(net: Net) -> dict[str, Question]:
    """The good answer to what is tried all the time → the question: a kept connection, new ones, names."""
    ip = net.cluster_ip("server")
    return {
        "still": ("hold", ip, 80, WATCHED_S),
        "server": ("watch", ip, 80, WATCHED_S),
        "found": ("watch_name", net.name_of("server"), 0, WATCHED_S),
    }


def silences_s(net: Net, harm: Callable[[], None]) -> dict[str, float]:
    """What was tried → the longest time without a good answer, while harm was done amid of it.

    The watchers run in the pod on their own: an exec would go through what is harmed.
    """
    asked = questions(net)
    named = [word for name, question in asked.items() for word in (name, json.dumps([question]))]
    net.run("client", "sh", "-c", BACKGROUND, PROBER, *named)
    done_s = time.time()
    harm()
    found = watched(net, list(asked))
    said = {}
    for wanted, seen in found.items():
        good_s = [at for at, name in seen if name == wanted]
        assert good_s, (wanted, seen[:5])
        assert good_s[0] < done_s, f"{wanted}: nothing was answered before the harm was done"
        said[wanted] = max(
            later - earlier for earlier, later in zip(good_s, [*good_s[1:], seen[-1][0]], strict=True)
        )
    return said


def watched(net: Net, names: list[str]) -> dict[str, list[tuple[float, str]]]:
    """name → when it was answered what."""

    def read() -> list[str]:
        lines = str(net.run("client", "sh", "-c", "cd /tmp; cat $0", " ".join(names), check=False).stdout)
        return lines.splitlines() if lines.count("\n") == len(names) else []

    answers = [json.loads(line)[0] for line in eventually(read, WATCHED_S + 20)]
    return {
        name: [(float(at), str(what)) for at, what in seen] for name, seen in zip(names, answers, strict=True)
    }


@pytest.mark.parametrize("whose", ["client", "server"])
def test_netd_is_killed(net: Net, whose: str) -> None:
    silent_s = silences_s(net, lambda: kill_netd(net, whose))
    assert max(silent_s.values()) < LIMIT_S, silent_s
    assert net.ask_one("client", "udp_who", net.cluster_ip("server"), 53)["name"] == "server"
    assert all(one["restartCount"] == 0 for one in net.pod(whose)["status"]["containerStatuses"])


def test_a_program_waits_in_accept_while_netd_is_killed(net: Net) -> None:
    waiting = net.start("exec", "server", "--", "python3", "-u", "-c", WAIT)
    knock = f"import socket; socket.create_connection(('{net.ip('server')}', 7000), 10).recv(1)"
    try:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == b"waiting\n"
        net.run("client", "python3", "-c", knock)
        kill_netd(net, "server")
        net.run("client", "python3", "-c", knock)
        wanted = f"{net.ip('client')} 7000\n".encode()
        assert [waiting.stdout.readline() for _ in range(2)] == [wanted] * 2
    finally:
        net.testbed.stop(waiting)


def test_the_hub_is_killed(net: Net) -> None:
    silent_s = silences_s(net, lambda: kill_component(net, "hub"))
    # Nothing between pods asks the hub.
    assert max(silent_s.values()) < LIMIT_S / 2, silent_s
    net.apply(agent("late", "tcp:80", labels={"app": "late"}), service("late", {"app": "late"}, port(80)))
    net.ready("late")
    eventually(lambda: isinstance(net.ask_one("client", "who", net.cluster_ip("late"), 80), dict), 10)


def test_coredns_is_killed(net: Net) -> None:
    silent_s = silences_s(net, lambda: kill_component(net, "coredns"))
    assert silent_s["found"] < LIMIT_S, silent_s
    assert max(silent_s["still"], silent_s["server"]) < LIMIT_S / 2, silent_s


def test_the_gateway_is_killed(net: Net) -> None:
    """It relays names, and it is the way in on the login host."""
    net.apply(service("way-in", LABELS, port(80), type="NodePort"))
    number = net.get("service", "way-in")["spec"]["ports"][0]["nodePort"]
    eventually(lambda: isinstance(net.ask_from_host("login", ("who", "127.0.0.1", number, 1))[0], dict), 10)
    argv = ["python3", "-c", PROBER, json.dumps([("watch", "127.0.0.1", number, WATCHED_S)])]
    outside = net.testbed.popen(argv)
    try:
        silent_s = silences_s(net, lambda: kill_component(net, "gateway"))
        out, _ = outside.communicate(timeout=WATCHED_S + 20)
    finally:
        net.testbed.stop(outside)
    assert silent_s["found"] < LIMIT_S, silent_s
    assert max(silent_s["still"], silent_s["server"]) < LIMIT_S / 2, silent_s
    good_s = [at for at, name in json.loads(out)[0] if name == "server"]
    assert max(later - earlier for earlier, later in pairwise(good_s)) < LIMIT_S
