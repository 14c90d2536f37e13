"""The webhook server: reviews in and out, failures as HTTP errors, certificates replaced under open connections."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from slurmlet.kube import webhook
from slurmlet.kube.credentials import load_pair
from slurmlet.kube.webhook import Review, Verdict, WebhookServer, denied, json_patch
from slurmlet.kube.webhook_certificates import MUTATING, VALIDATING, WebhookCertificates, issue, trust
from tests.unit.loopback import Api, Stored, api_server, make_keys, until

VALIDATING_PATH = f"/apis/admissionregistration.k8s.io/v1/{VALIDATING}"
MUTATING_PATH = f"/apis/admissionregistration.k8s.io/v1/{MUTATING}"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("pki"))


def review(obj: dict[str, Any], **request: Any) -> dict[str, Any]:
    asked = {
        "uid": "u-1", "operation": "CREATE", "kind": {"group": "", "version": "v1", "kind": "ConfigMap"},
        "namespace": "ns", "name": "cm", "userInfo": {"username": "user1", "groups": ["g"]}, "object": obj,
    }  # fmt: skip
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": asked | request}


async def decide(asked: Review) -> Verdict:
    assert (asked.user, asked.groups, asked.kind, asked.dry_run) == ("user1", ("g",), "ConfigMap", False)
    data = asked.object.get("data") or {}
    if data.get("deny"):
        return denied("not like this", 422)
    if data.get("hang"):
        await asyncio.sleep(60)
    if data.get("bug"):
        raise ValueError("secret words")
    if data.get("change"):
        return Verdict(changed={**asked.object, "data": {**data, "a/b": "~"}}, warnings=("changed",))
    return Verdict()


def serve(scenario: Callable[[Callable[[Any], Awaitable[tuple[int, Any]]]], Awaitable[None]]) -> None:
    async def run() -> None:
        issued = issue(["127.0.0.1"], 3600)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)

        load_pair(context, issued.certificate, issued.key)
        server = WebhookServer({"/check": decide}, timeout_s=0.1)
        port = await server.start("127.0.0.1", 0, context)
        trust = ssl.create_default_context(cadata=issued.authority.decode())
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust)) as session:

            async def ask(body: Any) -> tuple[int, Any]:
                raw = body if isinstance(body, bytes) else json.dumps(body).encode()
                async with session.post(f"https://127.0.0.1:{port}/check", data=raw) as response:
                    text = await response.text()
                    return response.status, json.loads(text) if response.status == 200 else text

            try:
                await scenario(ask)
            finally:
                await server.stop()

    asyncio.run(run())


Ask = Callable[[Any], Awaitable[tuple[int, Any]]]


def test_allowed_denied_and_changed() -> None:
    async def scenario(ask: Ask) -> None:
        status, answer = await ask(review({"data": {"x": "1"}}))
        assert (status, answer["response"]) == (200, {"uid": "u-1", "allowed": True})
        assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
        _, answer = await ask(review({"data": {"deny": "1"}}))
        assert answer["response"] == {
            "uid": "u-1", "allowed": False, "status": {"message": "not like this", "code": 422}
        }  # fmt: skip
        _, answer = await ask(review({"data": {"change": "1"}}))
        assert answer["response"]["patchType"] == "JSONPatch"
        assert json.loads(base64.b64decode(answer["response"]["patch"])) == [
            {"op": "add", "path": "/data/a~1b", "value": "~"}
        ]
        assert answer["response"]["warnings"] == ["changed"]

    serve(scenario)


def test_a_handler_that_fails_or_hangs_leaves_the_decision_to_the_failure_policy() -> None:
    async def scenario(ask: Ask) -> None:
        status, text = await ask(review({"data": {"bug": "1"}}))
        assert (status, text) == (500, "the webhook failed: ValueError")
        assert (await ask(review({"data": {"hang": "1"}})))[0] == 504
        assert (await ask(review({})))[0] == 200, "it serves on"

    serve(scenario)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"\xff", {"apiVersion": "admission.k8s.io/v1beta1", "kind": "AdmissionReview", "request": {}},
        {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {"uid": "x"}},
        {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": None},
    ],
)  # fmt: skip
def test_what_is_no_review_is_a_bad_request(body: Any) -> None:
    async def scenario(ask: Ask) -> None:
        assert (await ask(body))[0] == 400

    serve(scenario)


def test_a_body_beyond_the_limit_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "_BODY_LIMIT_BYTES", 1000)

    async def scenario(ask: Ask) -> None:
        assert (await ask(review({"data": {"x": "y" * 2000}})))[0] == 413
        assert (await ask(review({})))[0] == 200

    serve(scenario)


@pytest.mark.parametrize(
    ("before", "after", "steps"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({}, {"a": {"b": 1}}, [{"op": "add", "path": "/a", "value": {"b": 1}}]),
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 2}}, [{"op": "remove", "path": "/a/b"}]),
        ({"a": [1, 2]}, {"a": [2, 1]}, [{"op": "replace", "path": "/a", "value": [2, 1]}]),
        ({"a": 1}, {"a": True}, [{"op": "replace", "path": "/a", "value": True}]),
        ({"x/~y": 1}, {}, [{"op": "remove", "path": "/x~1~0y"}]),
        ({"a": {}}, {"a": None}, [{"op": "replace", "path": "/a", "value": None}]),
    ],
)
def test_json_patches(before: dict[str, Any], after: dict[str, Any], steps: list[Any]) -> None:
    assert json_patch(before, after) == steps


def configuration(name: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "webhooks": [{"name": "a.x.io", "clientConfig": {"url": "https://x"}}],
    }


async def served_subject(port: int) -> bytes:
    """The certificate that a new handshake is shown."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(True)
    writer.close()
    await asyncio.sleep(0)
    return shown


def test_who_does_not_know_the_token_of_the_path_gets_404_whatever_they_send() -> None:
    asked: list[Review] = []

    async def handler(review: Review) -> Verdict:
        asked.append(review)
        return Verdict()

    async def run() -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        issued = issue(["127.0.0.1"], 3600)
        load_pair(context, issued.certificate, issued.key)
        tokens = ["first"]
        server = WebhookServer({"/check": handler}, tokens=lambda: tokens)
        port = await server.start("127.0.0.1", 0, context)
        async with aiohttp.ClientSession(f"https://127.0.0.1:{port}") as session:

            async def status(path: str, body: Any = None) -> int:
                async with session.post(path, json=body or review({}), ssl=False) as response:
                    return response.status

            wrong = ["/check", "/check/", "/check/firs", "/check/first/", "/check/%C3%BC", "/check/second"]
            assert [await status(path) for path in wrong] == [404] * len(wrong)
            assert await status("/check/second", {"no": "review"}) == 404, "the body is not looked at"
            assert asked == []
            assert await status("/check/first") == 200
            tokens.append("second")
            assert [await status("/check/first"), await status("/check/second")] == [200, 200]
            tokens[:] = [""]
            assert [await status("/check/first"), await status("/check/")] == [404, 404]
        await server.stop()

    asyncio.run(run())


def test_trust_and_path_are_written_at_once_and_only_where_they_differ(keys: Path) -> None:
    async def run() -> None:
        async with api_server(keys) as api:
            stored = Stored(api, VALIDATING_PATH)
            service = {"name": "s", "namespace": "n", "port": 443}
            stored.put(
                {"metadata": {"name": "a"}, "webhooks": [{"name": "w", "clientConfig": {"service": service}}]}
            )
            await trust(api.client, VALIDATING, "a", "QQ==", "/p/t")
            url = {"url": "https://h:1/old", "caBundle": "QQ=="}
            stored.put({"metadata": {"name": "b"}, "webhooks": [{"name": "w", "clientConfig": url}]})
            await trust(api.client, VALIDATING, "b", "QQ==", "/p/t")
            both = {"url": "https://h:1/p/t", "caBundle": "QQ=="}
            stored.put({"metadata": {"name": "c"}, "webhooks": [{"name": "w", "clientConfig": both}]})
            await trust(api.client, VALIDATING, "c", "QQ==", "/p/t")
            written = [body["webhooks"] for how, _, _, body in api.requests if how == "PATCH"]
            assert written == [
                [{"name": "w", "clientConfig": {"caBundle": "QQ==", "service": {"path": "/p/t"}}}],
                [{"name": "w", "clientConfig": {"url": "https://h:1/p/t"}}],
            ]

    asyncio.run(run())


def bundles(api: Api) -> list[list[bytes]]:
    """What was written into caBundles, in order: each as the authorities in it."""
    found = [
        body["webhooks"][0]["clientConfig"]["caBundle"] for how, _, _, body in api.requests if how == "PATCH"
    ]
    return [base64.b64decode(one).split(b"-----BEGIN")[1:] for one in found]


def test_a_certificate_is_replaced_under_open_connections_and_both_are_trusted_meanwhile(keys: Path) -> None:
    async def run() -> None:
        async with api_server(keys) as api:
            for path in (VALIDATING_PATH, MUTATING_PATH):
                Stored(api, path).put(configuration("ours"))
            configurations = [(VALIDATING, "ours"), (MUTATING, "ours")]
            certificates = WebhookCertificates(api.client, ["127.0.0.1"], configurations, settle_s=0.02)
            server = WebhookServer({"/check": decide})
            port = await server.start("127.0.0.1", 0, certificates.context)
            trust = ssl.create_default_context(cadata=base64.b64decode(certificates.bundle).decode())
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust, limit=1)) as session:

                async def ask() -> int:
                    async with session.post(f"https://127.0.0.1:{port}/check", json=review({})) as response:
                        await response.read()
                        return response.status

                assert await ask() == 200
                before = await served_subject(port)
                await certificates.rotate()
                assert await served_subject(port) != before
                assert await ask() == 200, "a connection that stands stays"
            assert [len(one) for one in bundles(api)] == [2, 2, 1, 1]
            assert bundles(api)[0][1] == bundles(api)[2][0], "the new one stays"
            await server.stop()

    asyncio.run(run())


def test_certificates_are_replaced_before_their_end_and_wait_for_configurations(keys: Path) -> None:
    async def run() -> None:
        async with api_server(keys) as api:
            stored = Stored(api, VALIDATING_PATH)
            certificates = WebhookCertificates(
                api.client, ["x.svc"], [(VALIDATING, "late")], lifetime_s=0.3, settle_s=0.01, retry_s=0.01
            )
            first = certificates.bundle
            task = asyncio.create_task(certificates.run())
            await asyncio.sleep(0.05)
            stored.put(configuration("late"))
            await until(lambda: bundles(api))
            await until(lambda: certificates.bundle != first)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
