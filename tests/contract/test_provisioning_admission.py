"""Secrets made at a real API server that asks the Injection Webhook by the installed configuration, through TLS.

Two servers stand for two replicas of the operator: both show the certificate that is stored, and one of them replaces it.
"""

from __future__ import annotations

import asyncio
import base64
import datetime
import itertools
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from slurmlet.base.errors import SiteError
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.webhook import WebhookServer
from slurmlet.kube.webhook_certificates import MUTATING, issue
from slurmlet.model.stats_summary import exposition
from slurmlet.operators.provisioning.injection.injection_webhook import PATH
from slurmlet.operators.provisioning.stored_certificates import (
    SECRET,
    Called,
    MountedCertificates,
    StoredCertificates,
)
from tests.contract.control_plane import ControlPlane
from tests.contract.provisioning_manifests import webhook_configuration
from tests.contract.provisioning_site import KEY, Site, b64, run, site
from tests.contract.test_provisioning_injection import Hook
from tests.contract.test_provisioning_scaling import running

Obj = dict[str, Any]
ADMISSION = f"/apis/admissionregistration.k8s.io/v1/{MUTATING}"
_numbers = itertools.count()


class Replica:
    """A webhook server of the operator, on a port of its own."""

    def __init__(self, place: Site, name: str, **certificates: Any) -> None:
        self.certificates = StoredCertificates(
            place.client, place.home, ["127.0.0.1"], [Called(MUTATING, name, PATH)], **certificates
        )
        self.hook = Hook(place)
        handlers = {PATH: self.hook.webhook.review}
        self.server = WebhookServer(handlers, tokens=lambda: self.certificates.tokens)

    async def start(self, port: int = 0) -> int:
        await self.certificates.prepare()
        return await self.server.start("127.0.0.1", port, self.certificates.context)

    async def stop(self) -> None:
        await self.server.stop()
        await self.hook.workload.close()


async def injecting(place: Site, name: str, port: int) -> None:
    """The configuration is there, and heard of."""
    body = webhook_configuration(
        "slurmlet-provision-injection", name, f"https://127.0.0.1:{port}{PATH}", place.home
    )
    await place.client.create(ADMISSION, body)


async def created(place: Site, secret: Obj) -> dict[str, str]:
    made = await place.client.create(f"/api/v1/namespaces/{place.home}/secrets", secret)
    found: dict[str, str] = yaml.safe_load(base64.b64decode(made["data"]["metaData"]))
    return found


async def until_injected(place: Site, secret: Obj) -> None:
    while True:
        try:
            # Never the same: one that was made before the API server had heard of the configuration stays.
            metadata = {**secret["metadata"], "name": f"probe-{next(_numbers)}"}
            if "slurm_key_base64" in await created(place, {**secret, "metadata": metadata}):
                return
        except ApiError as error:
            if "failed calling webhook" not in error.message:
                raise
        await asyncio.sleep(0.1)


def test_secrets_are_injected_while_certificates_are_replaced_and_refused_while_nobody_answers(
    api_plane: ControlPlane,
) -> None:
    async def scenario(client: ApiClient) -> None:
        name = f"admission-{next(_numbers)}"
        place = await site(client, api_plane, name)
        await place.kubeconfig()
        await place.controller()
        secret = await place.machine("m-0", {"slurm-controller-namespace": place.slurm})
        first = Replica(place, name, settle_s=2.5, look_s=0.2)
        second = Replica(place, name)
        port = await first.start()
        await second.certificates.prepare()
        assert second.certificates.shown == first.certificates.shown
        await injecting(place, name, port)
        try:
            async with running(
                first.certificates.keep(), first.certificates.follow(), second.certificates.follow()
            ):
                await until_injected(place, secret)
                await _rotated(place, secret, first, second)
                await _only_the_configured_path_answers(place, name, secret, first, port)
                # The operator is away: closed, nothing is made without what a worker needs.
                await first.server.stop()
                with pytest.raises(ApiError, match="failed calling webhook"):
                    await created(place, {**secret, "metadata": {**secret["metadata"], "name": "late"}})
                # Secrets that are nobody's affair here never ask for it.
                await place.secret(place.home, "other", metaData="x: y")
                # Another replica takes over with the same certificate, at once.
                await second.start(port)
                await until_injected(place, {**secret, "metadata": {**secret["metadata"], "name": "again"}})
        finally:
            await client.delete(f"{ADMISSION}/{name}", {})
            await first.stop()
            await second.stop()

    run(api_plane, scenario)


async def _rotated(place: Site, secret: Obj, first: Replica, second: Replica) -> None:
    """Every Secret that is made meanwhile is whole."""
    before, ended, made = first.certificates.shown, asyncio.Event(), 0
    assert before is not None
    (token,) = before.tokens

    async def traffic(number: int) -> None:
        nonlocal made
        while not ended.is_set():
            metadata = {**secret["metadata"], "name": f"load-{number}-{made}"}
            found = await created(place, {**secret, "metadata": metadata})
            assert found["slurm_key_base64"] == b64(KEY)
            made += 1

    async with asyncio.TaskGroup() as tasks:
        for number in range(3):
            tasks.create_task(traffic(number))
        new = await first.certificates.rotate(before)
        while first.certificates.shown != new or second.certificates.shown != new:
            await asyncio.sleep(0.05)
        assert token not in new.tokens
        count = made
        while made < count + 6:
            await asyncio.sleep(0.05)
        ended.set()
    text = exposition(first.hook.webhook.families())
    counted = text.partition('duration_seconds_count{outcome="injected"} ')[2].partition("\n")[0]
    assert int(counted) >= made


async def _only_the_configured_path_answers(
    place: Site, name: str, secret: Obj, replica: Replica, port: int
) -> None:
    """A pod that reaches the port and knows a Metal3Data to its uid, beside the API server."""
    (token,) = replica.certificates.tokens
    configuration = await place.client.get(f"{ADMISSION}/{name}")
    (url,) = [one["clientConfig"]["url"] for one in configuration["webhooks"]]
    assert url == f"https://127.0.0.1:{port}{PATH}/{token}"
    request = {
        "uid": "forged", "operation": "CREATE", "kind": {"kind": "Secret"}, "namespace": place.home, "object": secret,
    }  # fmt: skip
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    async with aiohttp.ClientSession(f"https://127.0.0.1:{port}") as session:
        for path in (PATH, f"{PATH}/", f"{PATH}/{token[:-1]}", f"{PATH}/{token}x", f"{PATH}/{token}/x"):
            async with session.post(path, json=review, ssl=False) as answer:
                assert answer.status == 404, path
                assert "patch" not in await answer.text()
        async with session.post(f"{PATH}/{token}", json=review, ssl=False) as answer:
            assert "patch" in (await answer.json())["response"]


def test_a_pair_that_cannot_be_used_is_made_anew_and_an_old_one_replaced(api_plane: ControlPlane) -> None:
    async def scenario(client: ApiClient) -> None:
        place = await site(client, api_plane, f"pair-{next(_numbers)}")
        path = f"/api/v1/namespaces/{place.home}/secrets/{SECRET}"
        now = datetime.datetime.now(datetime.UTC)

        def replica() -> StoredCertificates:
            return StoredCertificates(
                client, place.home, ["127.0.0.1"], [], settle_s=0.0, look_s=0.05, now=lambda: now
            )

        one = replica()
        await one.prepare()
        await client.patch(path, {"data": {"tls.key": b64("no key")}})
        other = replica()
        await other.prepare()
        assert other.shown is not None
        assert other.shown != one.shown
        async with running(one.keep(), one.follow()):
            while one.shown != other.shown:
                await asyncio.sleep(0.05)
            # Two thirds of its life are over.
            now += datetime.timedelta(days=61)
            while one.shown == other.shown:
                await asyncio.sleep(0.05)

    run(api_plane, scenario)


def test_a_token_of_a_rotation_that_was_cut_short_is_taken_back_and_a_deleted_one_replaced(
    api_plane: ControlPlane,
) -> None:
    async def scenario(client: ApiClient) -> None:
        place = await site(client, api_plane, f"cut-{next(_numbers)}")
        one = StoredCertificates(client, place.home, ["127.0.0.1"], [], settle_s=0.0, look_s=0.05)
        await one.prepare()
        (token,) = one.tokens
        both = b64(f"{token}\n{'0' * 64}")
        path = f"/api/v1/namespaces/{place.home}/secrets/{SECRET}"
        await client.patch(path, {"data": {"path-tokens": both}})
        async with running(one.follow()):
            while len(one.tokens) != 2:
                await asyncio.sleep(0.05)
            async with running(one.keep()):
                while one.tokens != (token,):
                    await asyncio.sleep(0.05)
                # Deleted by who thinks that it is known.
                await client.delete(path, {})
                while one.tokens == (token,):
                    await asyncio.sleep(0.05)
        # One that could be guessed is none.
        await client.patch(path, {"data": {"path-tokens": b64("short")}})
        other = StoredCertificates(client, place.home, ["127.0.0.1"], [])
        await other.prepare()
        assert len(other.tokens[0]) >= 64

    run(api_plane, scenario)


def test_with_certificates_of_cert_manager_only_the_path_is_written(api_plane: ControlPlane) -> None:
    async def scenario(client: ApiClient) -> None:
        name = f"mounted-{next(_numbers)}"
        place = await site(client, api_plane, name)
        bundle = base64.b64encode(issue(["127.0.0.1"], 3600).authority).decode()
        body = webhook_configuration("slurmlet-provision-injection", name, "https://127.0.0.1:1/", place.home)
        body["webhooks"][0]["clientConfig"] = {
            "service": {"name": "slurmlet-provision", "namespace": place.home, "port": 443}, "caBundle": bundle,
        }  # fmt: skip
        await client.create(ADMISSION, body)
        try:
            configurations = [Called(MUTATING, name, PATH)]
            stored = StoredCertificates(client, place.home, ["127.0.0.1"], configurations, bundles=False)
            await stored.prepare()
            async with running(stored.keep()):
                while True:
                    config = (await client.get(f"{ADMISSION}/{name}"))["webhooks"][0]["clientConfig"]
                    if config["service"].get("path") == f"{PATH}/{stored.tokens[0]}":
                        break
                    await asyncio.sleep(0.05)
            assert (config["caBundle"], config["service"]["name"]) == (bundle, "slurmlet-provision")
        finally:
            await client.delete(f"{ADMISSION}/{name}", {})

    run(api_plane, scenario)


def test_mounted_certificates_are_read_again_when_they_fit(tmp_path: Path) -> None:
    def write(pair: Any) -> None:
        (tmp_path / "tls.crt").write_bytes(pair.certificate)
        (tmp_path / "tls.key").write_bytes(pair.key)

    async def scenario() -> None:
        mounted = MountedCertificates(tmp_path, look_s=0.01)
        with pytest.raises(SiteError, match="that fit each other"):
            await mounted.prepare()
        old, new = (issue(["127.0.0.1"], 3600) for _ in range(2))
        write(old)
        await mounted.prepare()
        server = WebhookServer({})
        port = await server.start("127.0.0.1", 0, mounted.context)
        try:
            async with running(mounted.follow()):
                assert await _shown(port) == old.certificate
                (tmp_path / "tls.crt").write_bytes(new.certificate)  # without its key yet
                assert await _shown(port) == old.certificate
                (tmp_path / "tls.key").write_bytes(new.key)
                async with asyncio.timeout(10):
                    while await _shown(port) != new.certificate:
                        await asyncio.sleep(0.02)
        finally:
            await server.stop()

    asyncio.run(scenario())


async def _shown(port: int) -> bytes:
    return (await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))).encode()
