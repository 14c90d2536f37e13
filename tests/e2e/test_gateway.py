"""The ways into the pod network from the login host: the API server's, `slurmlet proxy`, and who is kept out of them."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from slurmlet.base.processes import Completed
from slurmlet.testbed.hosts import Testbed
from tests.e2e.conftest import CLUSTER, Kubectl, eventually, pod, secret
from tests.e2e.inspecting import Cluster
from tests.e2e.network_pods import TOOLS, Net, network_namespace, port, service

pytestmark = pytest.mark.e2e

LARGE_BYTES = 20 << 20
SERVE = f"""
mkdir /www && echo hello from the pod >/www/index.html && head -c {LARGE_BYTES} /dev/urandom >/www/large
sha256sum /www/large | cut -c1-64 >/www/sum
exec httpd -f -p 80 -h /www
"""
HELLO = "hello from the pod"
# Refuses pods that say so, lets all others in.
WEBHOOK = r"""
import http.server, json, ssl

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = review["request"]
        refused = "refuse" in (asked["object"]["metadata"].get("labels") or {})
        answer = {"uid": asked["uid"], "allowed": not refused, "status": {"message": "said the pod"}}
        body = json.dumps({"apiVersion": review["apiVersion"], "kind": review["kind"], "response": answer}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

server = http.server.ThreadingHTTPServer(("0.0.0.0", 8443), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("/keys/crt", "/keys/key")
server.socket = context.wrap_socket(server.socket, server_side=True)
print("ready", flush=True)
server.serve_forever()
"""

# A question each 50 ms, without waiting for answers; the time of each answer that comes.
ASKS = r"""
import socket, sys, time

name = b"".join(bytes([len(label)]) + label.encode() for label in sys.argv[1].split(".")) + b"\0"
server = next(line.split()[1] for line in open("/etc/resolv.conf") if line.startswith("nameserver"))
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
client.settimeout(0.05)
for number in range(1 << 16):
    head = number.to_bytes(2, "big") + bytes((1, 0, 0, 1, 0, 0, 0, 0, 0, 0))
    client.sendto(head + name + bytes((0, 1, 0, 1)), (server, 53))
    try:
        while client.recv(4096)[3] & 15 == 0:
            print(time.clock_gettime(time.CLOCK_BOOTTIME), flush=True)
    except OSError:
        pass
"""


@pytest.fixture(scope="module")
def net(testbed: Testbed, cluster: str) -> Iterator[Net]:
    """A pod `web`, and a Service and NodePort of the same name."""
    with network_namespace(testbed, cluster) as net:
        ready = {"readinessProbe": {"httpGet": {"port": 80, "path": "/sum"}, "periodSeconds": 1}}
        net.apply(
            pod("web", SERVE, metadata={"labels": {"app": "web"}}, container=ready),
            service("web", {"app": "web"}, port(8080, 80, "http"), type="NodePort"),
        )
        net.ready("web")
        yield net


def curl(testbed: Testbed, *words: str, user: str = "user1", check: bool = True) -> Completed:
    argv = ["curl", "-sS", "--max-time", "30", *words]
    return testbed.run(argv, user=user, check=check, timeout_s=40)


def digest_of(testbed: Testbed, *words: str) -> tuple[str, str]:
    """(what came, what the pod says it should be) of the large file at the address that is the last of `words`."""
    *options, url = words
    summing = ["sh", "-c", 'curl -sS --max-time 60 "$@" | sha256sum', "sh", *options, f"{url}/large"]
    came = testbed.run(summing, user="user1", timeout_s=70).stdout.split()[0]
    return came, curl(testbed, *options, f"{url}/sum").stdout.strip()


class TestApiServer:
    def test_proxies_to_a_pod_and_to_a_service(self, net: Net) -> None:
        base = f"/api/v1/namespaces/{net.namespace}"
        assert HELLO in net("get", "--raw", f"{base}/pods/web:80/proxy/").stdout
        assert HELLO in net("get", "--raw", f"{base}/services/web:8080/proxy/").stdout
        assert HELLO in net("get", "--raw", f"{base}/services/web:http/proxy/").stdout

    def test_kubectl_proxy_carries_many_bytes(self, net: Net, testbed: Testbed) -> None:
        process = net.start("proxy", "--port=0", stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            address = process.stdout.readline().decode().rsplit(" ", 1)[1].strip()
            path = f"/api/v1/namespaces/{net.namespace}/services/web:8080/proxy"
            came, wanted = digest_of(testbed, f"http://{address}{path}")
            assert came == wanted
        finally:
            testbed.stop(process)

    def test_says_why_when_nobody_listens(self, net: Net) -> None:
        base = f"/api/v1/namespaces/{net.namespace}"
        refused = net("get", "--raw", f"{base}/pods/web:81/proxy/", check=False)
        assert "refused" in refused.stderr

    def test_calls_a_webhook_in_a_pod(self, net: Net, testbed: Testbed) -> None:
        name = f"hook.{net.namespace}.svc"
        made = testbed.run(
            ["sh", "-c", 'd=$(mktemp -d) && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 '
             '-subj "/CN=$0" -addext "subjectAltName=DNS:$0" -keyout $d/key -out $d/crt 2>/dev/null && cat $d/crt $d/key; '
             'rm -r $d', name],
            user="user1",
        ).stdout  # fmt: skip
        certificate, _, rest = made.partition("-----BEGIN PRIVATE")
        container = {
            "image": TOOLS,
            "command": ["python3", "-c", WEBHOOK],
            "volumeMounts": [{"name": "keys", "mountPath": "/keys"}],
        }
        net.apply(
            secret("keys", crt=certificate, key="-----BEGIN PRIVATE" + rest),
            pod("hook", metadata={"labels": {"app": "hook"}}, container=container,
                volumes=[{"name": "keys", "secret": {"secretName": "keys"}}]),
            service("hook", {"app": "hook"}, port(443, 8443)),
        )  # fmt: skip
        net.ready("hook")
        net.listening("hook")
        with webhook(net, certificate):

            def refused() -> bool:
                asked = pod("refused", metadata={"labels": {"refuse": "yes"}})
                said = net("create", "--dry-run=server", "-f", "-", stdin=json.dumps(asked), check=False)
                return "said the pod" in said.stderr

            eventually(refused, 30)
            net("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod("welcome")))


@contextlib.contextmanager
def webhook(net: Net, certificate: str) -> Iterator[None]:
    name = f"hook-{net.namespace}"
    labels = {"kubernetes.io/metadata.name": net.namespace}
    net.apply(
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": name},
            "webhooks": [
                {
                    "name": "hook.slurmlet.io",
                    "clientConfig": {
                        "service": {"namespace": net.namespace, "name": "hook"},
                        "caBundle": base64.b64encode(certificate.encode()).decode(),
                    },
                    "rules": [
                        {
                            "apiGroups": [""],
                            "apiVersions": ["v1"],
                            "resources": ["pods"],
                            "operations": ["CREATE"],
                        }
                    ],
                    "namespaceSelector": {"matchLabels": labels},
                    "admissionReviewVersions": ["v1"],
                    "sideEffects": "None",
                    "failurePolicy": "Fail",
                    "timeoutSeconds": 5,
                }
            ],
        }
    )
    try:
        yield
    finally:
        net("delete", "validatingwebhookconfiguration", name)


@pytest.fixture(scope="module")
def proxy(net: Net, testbed: Testbed) -> Iterator[int]:
    """The port of a `slurmlet proxy` whose short names are those of the namespace."""
    argv = ["slurmlet", "proxy", "-c", CLUSTER, "-n", net.namespace, "-o", "json"]
    process = testbed.popen(argv, user="user1", stdout=subprocess.PIPE)
    try:
        yield read_address(process)["port"]
    finally:
        testbed.stop(process)


def read_address(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdout is not None
    text = ""
    while not text.endswith("}\n"):
        text += process.stdout.readline().decode()
        assert text, "slurmlet proxy said nothing"
    return json.loads(text)


class TestProxy:
    def test_curl_reaches_every_form_of_a_name(self, net: Net, testbed: Testbed, proxy: int) -> None:
        full = f"web.{net.namespace}.svc.cluster.local"
        urls = [f"{name}:8080" for name in ("web", f"web.{net.namespace}", f"web.{net.namespace}.svc", full)]
        urls += [
            net.ip("web"),
            f"web.{net.namespace}.pod",
            f"{net.ip('web').replace('.', '-')}.{net.namespace}.pod",
        ]
        for url in urls:
            for kind in ("socks5h", "http"):
                assert HELLO in curl(testbed, "-x", f"{kind}://127.0.0.1:{proxy}", f"http://{url}/").stdout, (
                    url
                )
            assert HELLO in curl(testbed, "-p", "-x", f"http://127.0.0.1:{proxy}", f"http://{url}/").stdout, (
                url
            )

    @pytest.mark.parametrize("kind", ["socks5h", "http"])
    def test_many_bytes_arrive_whole(self, testbed: Testbed, proxy: int, kind: str) -> None:
        came, wanted = digest_of(testbed, "-x", f"{kind}://127.0.0.1:{proxy}", "http://web:8080")
        assert came == wanted

    def test_outside_is_closed_unless_it_is_asked_for(self, net: Net, testbed: Testbed, proxy: int) -> None:
        cluster = Cluster(testbed, CLUSTER).read("cluster.json")
        outside = f"https://{cluster['api_address']}:{cluster['api_port']}/"
        refused = curl(testbed, "-x", f"socks5h://127.0.0.1:{proxy}", "-k", outside, check=False)
        assert not refused.ok
        everything = testbed.popen(
            ["slurmlet", "proxy", "-c", CLUSTER, "--all", "-o", "json"], user="user1", stdout=subprocess.PIPE
        )
        try:
            at = read_address(everything)["port"]
            assert "Unauthorized" in curl(testbed, "-x", f"socks5h://127.0.0.1:{at}", "-k", outside).stdout
        finally:
            testbed.stop(everything)

    def test_its_variables_are_for_any_program(self, net: Net, testbed: Testbed) -> None:
        argv = ["slurmlet", "proxy", "-c", CLUSTER, "-n", net.namespace, "-o", "json"]
        process = testbed.popen(argv, user="user1", stdout=subprocess.PIPE)
        script = f'eval "$(slurmlet proxy -c {CLUSTER} --print-env)"; curl -sS --max-time 10 http://web:8080/'
        try:
            read_address(process)
            assert HELLO in testbed.run(["sh", "-c", script], user="user1").stdout
        finally:
            testbed.stop(process)
        gone = testbed.run(["slurmlet", "proxy", "-c", CLUSTER, "--print-env"], user="user1", check=False)
        assert "no `slurmlet proxy` is running" in gone.stderr


class TestStrangers:
    def test_are_refused_by_the_proxy(self, testbed: Testbed, proxy: int) -> None:
        for kind in ("socks5h", "http"):
            tried = curl(
                testbed, "-x", f"{kind}://127.0.0.1:{proxy}", "http://web:8080/", user="user2", check=False
            )
            assert not tried.ok
            assert HELLO not in tried.stdout

    def test_are_refused_by_the_gateways_socket(self, testbed: Testbed, net: Net) -> None:
        path = f"{Cluster(testbed, CLUSTER).root}/run/gateway.sock"
        tried = curl(testbed, "--unix-socket", path, "http://x/", user="user2", check=False)
        assert not tried.ok
        # It listens all the same.
        own = curl(testbed, "--unix-socket", path, "-i", "http://x/").stdout
        assert "405" in own

    def test_get_no_answer_from_coredns(self, testbed: Testbed, net: Net) -> None:
        at = Cluster(testbed, CLUSTER).read("cluster.json")["dns_port"]
        question = "\\0\\041\\0\\1\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0\\12kubernetes\\0\\0\\1\\0\\1"
        asking = f"printf '{question}' | openssl s_client -quiet -connect 127.0.0.1:{at}"
        tried = testbed.run(["sh", "-c", f'timeout 5 sh -c "{asking}"'], user="user2", check=False)
        assert "certificate required" in tried.stderr


class TestLoginHost:
    def test_a_node_port_carries_many_bytes(self, net: Net, testbed: Testbed) -> None:
        at = net.get("service", "web")["spec"]["ports"][0]["nodePort"]
        came, wanted = digest_of(testbed, f"http://127.0.0.1:{at}")
        assert came == wanted

    def test_a_port_that_somebody_has_is_told_at_the_service(self, net: Net, testbed: Testbed) -> None:
        at = random.randrange(31000, 32000)
        holder = testbed.popen(["socat", f"TCP-LISTEN:{at},bind=0.0.0.0,fork", "EXEC:cat"], user="user2")
        try:
            eventually(
                lambda: (
                    curl(testbed, f"telnet://127.0.0.1:{at}", "--connect-timeout", "1", check=False).code != 7
                )
            )
            net.apply(service("held", {"app": "web"}, port(80, nodePort=at), type="NodePort"))
            eventually(lambda: net.told("held", "PortTaken", f"tcp port {at} of host"), 20)
        finally:
            testbed.stop(holder)
        eventually(lambda: HELLO in curl(testbed, f"http://127.0.0.1:{at}/", check=False).stdout, 10)


@pytest.mark.parametrize("component", ["coredns", "gateway"])
def test_after_a_kill_names_and_ports_work_again_within_two_seconds(
    net: Net, testbed: Testbed, component: str
) -> None:
    cluster = Cluster(testbed, CLUSTER)
    at = net.get("service", "web")["spec"]["ports"][0]["nodePort"]
    # In the pod, so that no exec has to find its way in meanwhile.
    net.apply(
        pod(
            f"asks-{component}", ["python3", "-u", "-c", ASKS, net.name_of("web")], container={"image": TOOLS}
        )
    )
    net.ready(f"asks-{component}")
    eventually(lambda: net("logs", f"asks-{component}").stdout)
    cluster.signal(cluster.pid(component), "KILL")
    killed_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    eventually(lambda: HELLO in curl(testbed, f"http://127.0.0.1:{at}/", check=False).stdout, 5, 0.05)

    def answered() -> list[float]:
        said = net("logs", f"asks-{component}", check=False).stdout.split()
        return [float(word) for word in said if float(word) > killed_s + 0.1]

    assert eventually(answered, 10)[0] - killed_s < 2
    Kubectl(testbed, net.namespace)("delete", "pod", f"asks-{component}", "--wait=false")
