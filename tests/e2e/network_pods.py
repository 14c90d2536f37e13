"""Pods for tests of the network: an agent that answers, a prober that asks, both in pods and on bare hosts.

The agent says who it is, sums what it gets and gives what it is asked for, over TCP and UDP. The prober takes a list of
questions and prints what became of each, with the error's name where there was one, so that one `kubectl exec` can ask
many. Both are plain Python over plain sockets and know nothing of slurmlet.
"""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from slurmlet.base.processes import Completed
from slurmlet.testbed.hosts import Testbed
from slurmlet.testbed.server_images import load
from slurmlet.testbed.testbed_plan import address_of
from tests.e2e.conftest import Kubectl, eventually, pod

TOOLS, SERVERS, JAVA = (f"localhost:5000/{name}:1" for name in ("tools", "servers", "java"))
CLUSTER_DOMAIN = "cluster.local"

# agent tcp:80 udp:53 …; one line asks: "who", "sum <bytes>" followed by them, "give <bytes> <seed>", "echo".
AGENT = r"""
import asyncio, hashlib, json, random, socket, sys

NAME = socket.gethostname()

async def serve(reader, writer):
    try:
        line = (await reader.readline()).split()
        if line[:1] == [b"who"]:
            said = {"name": NAME} | {key: writer.get_extra_info(f"{key}name")[:2] for key in ("peer", "sock")}
            writer.write(json.dumps(said).encode())
        elif line[:1] == [b"sum"]:
            digest, left = hashlib.sha256(), int(line[1])
            while left and (piece := await reader.read(min(left, 1 << 18))):
                digest.update(piece)
                left -= len(piece)
            writer.write(digest.hexdigest().encode())
        elif line[:1] == [b"give"]:
            block = random.Random(line[2]).randbytes(1 << 20)
            for at in range(0, int(line[1]), len(block)):
                writer.write(block[: int(line[1]) - at])
                await writer.drain()
        elif line[:1] == [b"echo"]:
            while piece := await reader.read(1 << 16):
                writer.write(piece)
                await writer.drain()
        await writer.drain()
        writer.close()
    except OSError:
        pass

class Datagrams(asyncio.DatagramProtocol):
    def connection_made(self, transport):
        self.transport = transport

    def datagram_received(self, data, peer):
        if data == b"who":
            data = json.dumps({"name": NAME, "peer": peer[:2]}).encode()
        self.transport.sendto(data, peer)

async def main(words):
    loop = asyncio.get_running_loop()
    for word in words:
        protocol, _, port = word.partition(":")
        if protocol == "tcp":
            await asyncio.start_server(serve, "0.0.0.0", int(port), backlog=256)
        else:
            await loop.create_datagram_endpoint(Datagrams, ("0.0.0.0", int(port)))
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main(sys.argv[1:]))
"""

# prober '<JSON list of [verb, host, port, argument]>' prints a JSON list of answers.
PROBER = r"""
import hashlib, json, os, random, socket, sys, time

def ask(host, port, line, rest=b"", limit_s=10):
    with socket.create_connection((host, port), limit_s) as connection:
        connection.settimeout(60)
        connection.sendall(line.encode() + b"\n" + rest)
        connection.shutdown(socket.SHUT_WR)
        while piece := connection.recv(1 << 18):
            yield piece

def begun(seen):
    # Whoever waits for the first answer of a watcher reads this.
    if len(seen) == 1:
        print("begun", file=sys.stderr, flush=True)

def who(host, port, limit_s=10):
    return json.loads(b"".join(ask(host, port, "who", limit_s=limit_s or 10)))

def many(host, port, count):
    return [who(host, port)["name"] for _ in range(count)]

def push(host, port, size):
    data = (os.urandom(1 << 20) * (size // (1 << 20) + 1))[:size]
    return b"".join(ask(host, port, f"sum {size}", data)).decode() == hashlib.sha256(data).hexdigest()

def pull(host, port, size):
    block, digest, heard = random.Random(b"7").randbytes(1 << 20), hashlib.sha256(), hashlib.sha256()
    for at in range(0, size, len(block)):
        digest.update(block[: size - at])
    for piece in ask(host, port, f"give {size} 7"):
        heard.update(piece)
    return heard.hexdigest() == digest.hexdigest()

def datagram(host, port, data, limit_s=1.0):
    # Datagrams may be lost on any network: three tries.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(limit_s)
        client.connect((socket.gethostbyname(host), port))
        for attempt in range(3):
            client.send(data)
            try:
                return client.recv(65536), client.getpeername()
            except TimeoutError:
                pass
    raise TimeoutError("no datagram came back")

def udp_who(host, port, _):
    data, peer = datagram(host, port, b"who")
    return {**json.loads(data), "answered_from": peer}

def udp_many(host, port, count):
    return [udp_who(host, port, None)["name"] for _ in range(count)]

def udp_echo(host, port, size):
    data = os.urandom(size)
    return datagram(host, port, data)[0] == data

def resolve(host, _, __):
    return sorted({found[4][0] for found in socket.getaddrinfo(host, None, socket.AF_INET)})

def reverse(host, _, __):
    return socket.gethostbyaddr(host)[0]

def watch(host, port, seconds):
    # Who answered when, as often as it goes; failures by their name.
    seen, end = [], time.time() + seconds
    while time.time() < end:
        at = time.time()
        try:
            name = who(host, port, 1)["name"]
        except (OSError, ValueError) as error:
            # An end before the answer is one too: whoever relayed it was killed in between.
            name = type(error).__name__
        seen.append([at, name])
        begun(seen)
        time.sleep(0.01)
    return seen

def hold(host, port, seconds):
    # One connection, kept: what came back over it when.
    seen, end = [], time.time() + seconds
    with socket.create_connection((host, port), 10) as connection:
        connection.settimeout(5)
        connection.sendall(b"echo\n")
        while time.time() < end:
            at = time.time()
            try:
                connection.sendall(b"still")
                name = connection.recv(100).decode()
            except OSError as error:
                name = type(error).__name__
            seen.append([at, name])
            begun(seen)
            time.sleep(0.05)
    return seen

def watch_name(host, _, seconds):
    # When the cluster's DNS told an address, by questions of our own: a resolver would hide five seconds of silence.
    (server,) = [line.split()[1] for line in open("/etc/resolv.conf") if line.startswith("nameserver")]
    labels = b"".join(bytes([len(part)]) + part.encode() for part in host.split("."))
    question = b"\x12\x34\x01\x00\x00\x01" + bytes(6) + labels + b"\x00\x00\x01\x00\x01"
    seen, end = [], time.time() + seconds
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(0.1)
        client.connect((server, 53))
        while time.time() < end:
            at = time.time()
            try:
                client.send(question)
                told = client.recv(512)
                name = "found" if told[3] & 15 == 0 and told[7] else "not found"
            except OSError as error:
                name = type(error).__name__
            seen.append([at, name])
            begun(seen)
            time.sleep(0.01)
    return seen

answers = []
for verb, host, port, argument in json.loads(sys.argv[1]):
    try:
        answers.append(globals()[verb](host, port, argument))
    except OSError as error:
        answers.append(type(error).__name__)
print(json.dumps(answers))
"""

Question = tuple[str, str, int, Any]


class Net(Kubectl):
    """kubectl in one namespace, with words for the tests of the network. Addresses are looked up once."""

    def __init__(self, testbed: Testbed, namespace: str, cluster: str, user: str = "user1") -> None:
        super().__init__(testbed, namespace, user, cluster)
        self._addresses: dict[tuple[str, str], str] = {}

    def __call__(self, *arguments: str, **options: Any) -> Completed:
        if arguments[0] in ("delete", "rollout"):
            self._addresses.clear()
        return super().__call__(*arguments, **options)

    def ask(self, pod_name: str, *questions: Question, timeout_s: float = 90) -> list[Any]:
        """What the prober in that pod's first container saw."""
        argv = ("exec", pod_name, "--", "python3", "-c", PROBER, json.dumps(questions))
        return list(json.loads(self(*argv, timeout_s=timeout_s).stdout))

    def ask_one(self, pod_name: str, verb: str, host: str, port: int = 0, argument: Any = None) -> Any:
        (answer,) = self.ask(pod_name, (verb, host, port, argument))
        return answer

    def ask_from_host(self, host: str, *questions: Question) -> list[Any]:
        """What the prober saw on a bare host, as an ordinary process of the user."""
        argv = ["python3", "-c", PROBER, json.dumps(questions)]
        return list(json.loads(self.testbed.run(argv, host=host, user=self.user, timeout_s=90).stdout))

    def run(
        self, pod_name: str, *argv: str, check: bool = True, timeout_s: float = 60, stdin: str | None = None
    ) -> Any:
        flags = ("-i",) if stdin is not None else ()
        return self("exec", *flags, pod_name, "--", *argv, check=check, timeout_s=timeout_s, stdin=stdin)

    def ip(self, pod_name: str) -> str:
        key = "pod", pod_name
        if key not in self._addresses:
            self._addresses[key] = str(eventually(lambda: self.pod(pod_name)["status"].get("podIP")))
        return self._addresses[key]

    def ready(self, *names: str, timeout_s: float = 90) -> None:
        pods = [f"pod/{name}" for name in names]
        self("wait", "--for=condition=Ready", *pods, f"--timeout={timeout_s:g}s", timeout_s=timeout_s + 10)

    def listening(self, pod_name: str, container: str = "main") -> None:
        """Wait until the agent of the pod has all its ports."""
        eventually(lambda: "ready" in self("logs", pod_name, "-c", container, check=False).stdout)

    def cluster_ip(self, service_name: str) -> str:
        key = "service", service_name
        if key not in self._addresses:
            self._addresses[key] = str(self.get("service", service_name)["spec"]["clusterIP"])
        return self._addresses[key]

    def name_of(self, service_name: str) -> str:
        return f"{service_name}.{self.namespace}.svc.{CLUSTER_DOMAIN}"


@contextmanager
def network_namespace(testbed: Testbed, cluster: str, *images: str, user: str = "user1") -> Iterator[Net]:
    """A namespace of its own, and the images (tools is always there)."""
    load(testbed, ["tools", *images], user)
    net = Net(testbed, f"n-{uuid.uuid4().hex[:8]}", cluster, user)
    net("create", "namespace", net.namespace)
    eventually(lambda: net("get", "serviceaccount", "default", check=False).ok)
    try:
        yield net
    finally:
        net("delete", "pods", "--all", "--grace-period=0", "--force", "--wait=false", check=False)
        net("delete", "namespace", net.namespace, "--wait=false", check=False)


def on_host(host: str) -> dict[str, str]:
    """The annotation that makes Slurm start the pod there."""
    return {"slurmlet.io/sbatch": f"--nodelist={host}"}


def placed(
    name: str,
    command: str | Sequence[str],
    host: str = "",
    image: str = TOOLS,
    labels: Mapping[str, str] | None = None,
    container: Mapping[str, Any] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """A pod of one container, on that host where one is named."""
    metadata = {"labels": dict(labels or {}), "annotations": on_host(host) if host else {}}
    return pod(name, command, metadata=metadata, container={"image": image, **(container or {})}, **spec)


def agent(name: str, *ports: str, host: str = "", **changes: Any) -> dict[str, Any]:
    """A pod whose agent listens on ports such as "tcp:80"."""
    return placed(name, ["python3", "-u", "-c", AGENT, *ports], host, **changes)


def service(
    name: str, selector: Mapping[str, str] | None, *ports: Mapping[str, Any], **spec: Any
) -> dict[str, Any]:
    shape: dict[str, Any] = {"ports": [dict(port) for port in ports], **spec}
    if selector:
        shape["selector"] = dict(selector)
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": shape}


def port(
    number: int, target: int | str | None = None, name: str = "", protocol: str = "TCP", **more: Any
) -> dict[str, Any]:
    shape = {"port": number, "targetPort": target or number, "protocol": protocol, **more}
    return {**shape, "name": name} if name else shape


def probe(seconds: int = 1, **action: Any) -> dict[str, Any]:
    return {"periodSeconds": seconds, "timeoutSeconds": 2, "failureThreshold": 1, **action}


def workload(kind: str, name: str, template: Mapping[str, Any], replicas: int, **spec: Any) -> dict[str, Any]:
    """A Deployment or StatefulSet of pods like `template`, which also says their labels."""
    labels = template["metadata"]["labels"]
    inside = {"metadata": template["metadata"], "spec": {**template["spec"], "restartPolicy": "Always"}}
    inside["metadata"] = {key: value for key, value in template["metadata"].items() if key != "name"}
    shape = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": inside, **spec}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name}, "spec": shape}


@contextmanager
def host_agent(testbed: Testbed, host: str, *ports: str) -> Iterator[str]:
    """An agent as an ordinary process of user1 on a bare host; yields the host's address."""
    process = testbed.popen(["python3", "-u", "-c", AGENT, *ports], host=host, stdin=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield address_of(host)
    finally:
        testbed.stop(process)
