"""The controller kit against a real API server: what a scripted one would only repeat of our own beliefs."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slurmlet.kube import finalizers
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.conditions import Condition, is_true, status_patch
from slurmlet.kube.controller import Again, Controller, Informer, key_of
from slurmlet.kube.credentials import Credentials, from_kubeconfig, in_cluster
from slurmlet.kube.discovery import Discovery, Resource
from slurmlet.kube.leader_lease import LeaderElector, LeaseTimes
from slurmlet.kube.webhook import Review, Verdict, WebhookServer, denied
from slurmlet.kube.webhook_certificates import MUTATING, VALIDATING, WebhookCertificates
from slurmlet.kube.work_queue import Backoff
from tests.contract.control_plane import ControlPlane, all_closed, environment

MAPS = "/api/v1/namespaces/default/configmaps"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
_numbers = itertools.count()


def name(prefix: str) -> str:
    return f"{prefix}-{next(_numbers)}"


async def until(true: Callable[[], Any], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not true():
            await asyncio.sleep(0.01)


def run(plane: ControlPlane, scenario: Callable[[ApiClient], Awaitable[None]]) -> None:
    async def go() -> None:
        async with all_closed(), asyncio.timeout(30), plane.client() as client:
            await scenario(client)

    asyncio.run(go())


async def stop(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def config_map(named: str, **data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": named}, "data": data}


# Credentials


def test_a_client_by_kubeconfig(api_plane: ControlPlane, tmp_path: Path) -> None:
    keys = api_plane.keys
    document = {
        "current-context": "x",
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "clusters": [
            {"name": "x", "cluster": {"server": api_plane.url, "certificate-authority": str(keys / "ca.crt")}}
        ],
        "users": [
            {
                "name": "x",
                "user": {
                    "client-certificate": str(keys / "admin.crt"),
                    "client-key": str(keys / "admin.key"),
                },
            }
        ],
    }
    (tmp_path / "config").write_text(json.dumps(document))

    async def go() -> None:
        async with ApiClient(from_kubeconfig(tmp_path / "config")) as client:
            assert (await client.get("/version"))["major"] == "1"

    asyncio.run(go())


def test_a_client_with_what_a_pod_is_given_whose_token_is_replaced(
    api_plane: ControlPlane, tmp_path: Path
) -> None:
    accounts = "/api/v1/namespaces/default/serviceaccounts"

    async def scenario(admin: ApiClient) -> None:
        who = name("operator")
        account = await admin.create(accounts, {"metadata": {"name": who}})
        request = {"spec": {"expirationSeconds": 600}}
        token = (await admin.create(f"{accounts}/{who}/token", request))["status"]["token"]
        (tmp_path / "token").write_text(token)
        (tmp_path / "ca.crt").write_bytes((api_plane.keys / "ca.crt").read_bytes())
        host, _, port = api_plane.url.removeprefix("https://").rpartition(":")
        pod = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        async with ApiClient(in_cluster(pod, tmp_path)) as client:

            async def who_am_i() -> str:
                found = await client.create("/apis/authentication.k8s.io/v1/selfsubjectreviews", review)
                return str(found["status"]["userInfo"]["username"])

            assert await who_am_i() == f"system:serviceaccount:default:{who}"
            # Made again it is another account: the token of the old one is refused, the new file is read by itself.
            await admin.delete(f"{accounts}/{who}", {"preconditions": {"uid": account["metadata"]["uid"]}})
            await admin.create(accounts, {"metadata": {"name": who}})
            token = (await admin.create(f"{accounts}/{who}/token", request))["status"]["token"]
            (tmp_path / "token").write_text(token)
            for _ in range(20):
                assert await who_am_i() == f"system:serviceaccount:default:{who}"

    run(api_plane, scenario)


# Requests


def test_server_side_apply_owns_fields_and_says_conflicts(api_plane: ControlPlane) -> None:
    async def scenario(client: ApiClient) -> None:
        path = f"{MAPS}/{name('applied')}"
        wanted = config_map(path.rpartition("/")[2], a="1", b="1")
        assert (await client.apply(path, wanted, "one"))["data"] == {"a": "1", "b": "1"}
        other = {**wanted, "data": {"b": "2"}}
        with pytest.raises(ApiError) as error:
            await client.apply(path, other, "two")
        assert (error.value.status, error.value.api_reason) == (409, "Conflict")
        assert 'conflict with "one"' in error.value.message
        assert (await client.apply(path, other, "two", force=True))["data"] == {"a": "1", "b": "2"}
        # What a manager no longer says, and nobody else does, goes.
        assert (await client.apply(path, {**wanted, "data": {}}, "one"))["data"] == {"b": "2"}

    run(api_plane, scenario)


def test_discovery_finds_paths_that_work(api_plane: ControlPlane) -> None:
    async def scenario(client: ApiClient) -> None:
        discovery = Discovery(client)
        deployment = await discovery.resource("Deployment", "apps")
        assert deployment.path("x", "ns", "status") == "/apis/apps/v1/namespaces/ns/deployments/x/status"
        assert {"status", "scale"} <= deployment.subresources
        for kind, group in (
            ("Node", ""),
            ("Pod", ""),
            ("Lease", "coordination.k8s.io"),
            ("CSIDriver", "storage.k8s.io"),
        ):
            listed = await client.get((await discovery.resource(kind, group)).path())
            assert listed["kind"] == f"{kind}List"
        assert not await discovery.has("Deployment", "none.example")
        assert not await discovery.has("Nothing", "apps")

    run(api_plane, scenario)


class OldVersions(ApiClient):
    """Asks for the first watch from a version that no API server has any more."""

    broken = 0

    def __init__(self, credentials: Credentials) -> None:
        super().__init__(credentials)
        self.said: list[int] = []

    async def watch(self, path: str, *, accept: str = "", **query: str) -> AsyncIterator[dict[str, Any]]:
        self.broken += 1
        if self.broken == 1:
            query["resourceVersion"] = "1"
        async for event in super().watch(path, accept=accept, **query):
            if event["type"] == "ERROR":
                self.said.append(event["object"]["code"])
            yield event


THING_GROUP = "contract.slurmlet.io"
THING_VERSION = f"{THING_GROUP}/v1"


async def thing_kind(client: ApiClient) -> Resource:
    """A kind of our own, defined when it is first wanted; discovery finds it as soon as it is served."""
    discovery = Discovery(client)
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}, "subresources": {"status": {}}
    }  # fmt: skip
    names = {"plural": "things", "singular": "thing", "kind": "Thing", "listKind": "ThingList"}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"things.{THING_GROUP}"},
        "spec": {"group": THING_GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    await client.apply(f"{path}/things.{THING_GROUP}", definition, "contract", force=True)
    async with asyncio.timeout(10):
        while not await discovery.has("Thing", THING_GROUP):
            await asyncio.sleep(0.05)
    return await discovery.resource("Thing", THING_GROUP)


def test_a_version_that_is_too_old_means_a_new_list(api_plane: ControlPlane) -> None:
    async def scenario(admin: ApiClient) -> None:
        label = name("expired")
        # The server's own kinds are kept from the first version on; those of a kind that came later are not.
        path = (await thing_kind(admin)).path(namespace="default")

        async def make(part: str) -> None:
            metadata = {"name": f"{label}-{part}", "labels": {"of": label}}
            await admin.create(path, {"apiVersion": THING_VERSION, "kind": "Thing", "metadata": metadata})

        await make("before")
        async with OldVersions(api_plane.credentials) as client:
            informer = Informer(client, path, labelSelector=f"of={label}")
            task = asyncio.create_task(informer.run())
            await until(lambda: client.broken == 2)
            assert client.said == [410]
            await make("after")
            await until(lambda: len(informer.objects()) == 2)
            await stop(task)

    run(api_plane, scenario)


# Controllers


def test_a_controller_with_finalizer_and_condition_from_creation_to_the_end(api_plane: ControlPlane) -> None:
    ours = "slurmlet.io/contract"

    async def scenario(client: ApiClient) -> None:
        label = name("flow")
        things = (await thing_kind(client)).path(namespace="default")
        outside: set[str] = set()
        informer = Informer(client, things, labelSelector=f"of={label}")
        trouble = [OSError("first try fails"), OSError("so does the second")]

        async def reconcile(key: str) -> Again:
            thing = informer.get(key)
            if thing is None:
                return None
            path = f"{things}/{thing['metadata']['name']}"
            if finalizers.is_deleting(thing):
                outside.discard(key)
                await finalizers.remove(client, path, ours)
                return None
            held = await finalizers.add(client, path, ours)
            if held is None:
                return None
            if trouble:
                raise trouble.pop()
            outside.add(key)
            change = status_patch(held, Condition("Made", True, "Made", "it is there"))
            if change is not None:
                informer.keep(await client.patch(f"{path}/status", change))
            return None

        controller = Controller("thing", reconcile, backoff=Backoff(0.05, 1.0))
        informer.feed(controller, key_of)
        tasks = [asyncio.create_task(work) for work in (informer.run(), controller.run())]
        key, path = f"default/{label}", f"{things}/{label}"

        def seen() -> dict[str, Any]:
            return informer.get(key) or {"metadata": {}}

        def observed() -> Any:
            conditions = (seen().get("status") or {}).get("conditions") or [{}]
            return conditions[0].get("observedGeneration")

        metadata = {"name": label, "labels": {"of": label}, "finalizers": ["example.com/other"]}
        await client.create(
            things, {"apiVersion": THING_VERSION, "kind": "Thing", "metadata": metadata, "spec": {"n": 1}}
        )
        await until(lambda: is_true(seen(), "Made"))
        assert (outside, trouble, observed()) == ({key}, [], 1)
        moved = seen()["status"]["conditions"][0]["lastTransitionTime"]
        await asyncio.sleep(1.1)  # a time that moved would show
        await client.patch(path, {"spec": {"n": 2}})
        await until(lambda: observed() == 2)
        assert seen()["status"]["conditions"][0]["lastTransitionTime"] == moved
        version = seen()["metadata"]["resourceVersion"]
        await asyncio.sleep(0.3)
        assert (await client.get(path))["metadata"]["resourceVersion"] == version, (
            "nothing to say, nothing written"
        )
        await client.delete(path, {})
        await until(lambda: not outside)
        await until(lambda: seen()["metadata"].get("finalizers") == ["example.com/other"])
        await client.patch(path, {"metadata": {"finalizers": None}})
        await until(lambda: informer.get(key) is None)
        assert controller.tally.failed == 2
        await stop(*tasks)

    run(api_plane, scenario)


ELECTOR = """
import asyncio, sys
from pathlib import Path
from slurmlet.kube.client import ApiClient
from slurmlet.kube.credentials import by_certificate
from slurmlet.kube.leader_lease import LeaderElector, LeaseTimes

async def lead():
    print("leading", flush=True)
    await asyncio.sleep(600)

async def main(url, keys, lease):
    files = (Path(keys) / name for name in ("ca.crt", "admin.crt", "admin.key"))
    async with ApiClient(by_certificate(url, *files)) as client:
        await LeaderElector(client, "default", lease, "first", lead, times=LeaseTimes(2, 1.5, 0.2)).run()

asyncio.run(main(*sys.argv[1:]))
"""


def test_a_leader_that_is_killed_is_followed_when_its_lease_is_over(api_plane: ControlPlane) -> None:
    async def scenario(client: ApiClient) -> None:
        lease, leading = name("leader"), asyncio.Event()

        async def lead() -> None:
            leading.set()
            await asyncio.sleep(60)

        argv = [sys.executable, "-c", ELECTOR, api_plane.url, str(api_plane.keys), lease]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment()) as first:
            assert first.stdout is not None
            assert await asyncio.to_thread(first.stdout.readline) == b"leading\n"
            second = LeaderElector(client, "default", lease, "second", lead, times=LeaseTimes(2, 1.5, 0.1))
            task = asyncio.create_task(second.run())
            # Longer than the lease lasts: it is renewed.
            await asyncio.sleep(2.5)
            assert not leading.is_set()
            first.kill()
            killed_s = asyncio.get_running_loop().time()
            await leading.wait()
            # Not before the lease is over; how soon after that is the machine's business.
            assert 1.0 < asyncio.get_running_loop().time() - killed_s < 20.0
        spec = (await client.get(f"{LEASES}/{lease}"))["spec"]
        assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("second", 1)
        await stop(task)
        assert not (await client.get(f"{LEASES}/{lease}"))["spec"].get("holderIdentity")

    run(api_plane, scenario)


def test_of_many_who_find_a_lease_free_one_leads(api_plane: ControlPlane) -> None:
    async def scenario(client: ApiClient) -> None:
        lease = name("contended")
        inside: list[str] = []
        terms: list[str] = []

        def candidate(who: str) -> asyncio.Task[None]:
            async def lead() -> None:
                inside.append(who)
                assert inside == [who], "two lead at once"
                await asyncio.sleep(0.05)
                inside.remove(who)
                terms.append(who)

            elector = LeaderElector(client, "default", lease, who, lead, times=LeaseTimes(15, 10.0, 0.02))
            return asyncio.create_task(elector.run())

        await asyncio.gather(*(candidate(f"c{number}") for number in range(5)))
        assert sorted(terms) == [f"c{number}" for number in range(5)]

    run(api_plane, scenario)


# Webhooks


def webhook_configuration(kind: str, named: str, url: str, bundle: str) -> dict[str, Any]:
    hook = {
        "name": f"{named}.slurmlet.io",
        "clientConfig": {"url": url, "caBundle": bundle},
        "rules": [
            {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}
        ],
        "objectSelector": {"matchLabels": {"hook": named}},
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
        "timeoutSeconds": 5,
    }
    title = "Validating" if kind == VALIDATING else "Mutating"
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": f"{title}WebhookConfiguration",
        "metadata": {"name": named},
        "webhooks": [hook],
    }


class Hooked:
    """A webhook server, its two configurations, and objects that go through it."""

    def __init__(self, client: ApiClient, settle_s: float = 1.0) -> None:
        self.client, self.label = client, name("hook")
        self.asked = 0
        kinds = [(kind, self.label) for kind in (VALIDATING, MUTATING)]
        self.certificates = WebhookCertificates(client, ["127.0.0.1"], kinds, settle_s=settle_s)
        self.server = WebhookServer({"/validate": self._validate, "/mutate": self._mutate}, timeout_s=1.0)

    async def __aenter__(self) -> Hooked:
        port = await self.server.start("127.0.0.1", 0, self.certificates.context)
        for kind, path in ((VALIDATING, "validate"), (MUTATING, "mutate")):
            url = f"https://127.0.0.1:{port}/{path}"
            wanted = webhook_configuration(kind, self.label, url, self.certificates.bundle)
            await self.client.create(f"{ADMISSION}/{kind}", wanted)
        async with asyncio.timeout(10):
            while (await self.make(probe="1"))["data"].get("seen") != "yes":
                await asyncio.sleep(0.05)
        return self

    async def __aexit__(self, *_: object) -> None:
        for kind in (VALIDATING, MUTATING):
            await self.client.delete(f"{ADMISSION}/{kind}/{self.label}", {})
        await self.server.stop()

    async def make(self, **data: str) -> dict[str, Any]:
        wanted = config_map(name(self.label), **data)
        wanted["metadata"] |= {"labels": {"hook": self.label}, "annotations": {"example.com/mine": "1"}}
        return await self.client.create(MAPS, wanted)

    async def _validate(self, review: Review) -> Verdict:
        assert (review.operation, review.kind, review.user) == ("CREATE", "ConfigMap", "slurmlet:admin")
        self.asked += 1
        if review.object["data"].get("fail"):
            raise ValueError("bug")
        if review.object["data"].get("bad"):
            return denied("bad is not wanted here", 422)
        return Verdict(warnings=("mind the gap",))

    async def _mutate(self, review: Review) -> Verdict:
        changed = {**review.object, "data": {**review.object["data"], "seen": "yes"}}
        metadata = review.object["metadata"]
        changed["metadata"] = {
            **metadata,
            "annotations": {**metadata["annotations"], "example.com/hook": "1"},
        }
        return Verdict(changed=changed)


def test_the_api_server_admits_denies_and_patches_by_the_webhook(api_plane: ControlPlane) -> None:
    async def scenario(client: ApiClient) -> None:
        async with Hooked(client) as hooked:
            made = await hooked.make(good="1")
            assert made["data"] == {"good": "1", "seen": "yes"}
            assert made["metadata"]["annotations"] == {"example.com/mine": "1", "example.com/hook": "1"}
            with pytest.raises(ApiError) as error:
                await hooked.make(bad="1")
            assert error.value.status == 422
            assert "denied the request: bad is not wanted here" in error.value.message
            with pytest.raises(ApiError) as error:
                await hooked.make(fail="1")
            assert (error.value.status, error.value.transient) == (500, True)
            assert "the webhook failed: ValueError" in error.value.message

    run(api_plane, scenario)


def test_no_request_fails_while_certificates_are_replaced(api_plane: ControlPlane) -> None:
    async def scenario(client: ApiClient) -> None:
        async with Hooked(client, settle_s=1.5) as hooked:
            ended = asyncio.Event()
            made = 0

            async def traffic() -> None:
                nonlocal made
                while not ended.is_set():
                    await hooked.make(good="1")
                    made += 1

            async with asyncio.TaskGroup() as tasks:
                for _ in range(4):
                    tasks.create_task(traffic())
                before = hooked.certificates.bundle
                await hooked.certificates.rotate()
                assert hooked.certificates.bundle != before
                count = made
                await until(lambda: made > count + 8)
                ended.set()
            found = await client.get(f"{ADMISSION}/{VALIDATING}/{hooked.label}")
            assert found["webhooks"][0]["clientConfig"]["caBundle"] == hooked.certificates.bundle
            assert hooked.asked >= made

    run(api_plane, scenario)
