"""Images before jobs: pull policies and their events in the kubelet's words, back-off, one pull for many pods."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slurmlet.base.errors import SlurmletError
from slurmlet.hub.pods import image_pulls
from slurmlet.hub.pods.image_pulls import Backoff, ImageProblem, Images
from slurmlet.images import references
from slurmlet.images.image_store import Image
from tests.unit.fakes import FakeEvents
from tests.unit.loopback import Api, api_server, make_keys


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("pki"))


class FakeStore:
    """A store without a registry behind it; names are still checked by the real rules."""

    def __init__(self) -> None:
        self.present: dict[str, Image] = {}
        self.pulls: list[tuple[str, Any]] = []
        self.on_pull: Callable[[], None] = lambda: None

    def lookup(self, reference: str) -> Image | None:
        references.parse(reference)
        return self.present.get(reference)

    def pull(self, reference: str, *, auths: Any = None) -> Image:
        self.pulls.append((reference, auths))
        self.on_pull()
        return self.hold(reference)

    def hold(self, reference: str) -> Image:
        self.present[reference] = Image(
            "sha256:1", reference, f"{reference}@sha256:1", 42, Path("/store/sha256-1")
        )
        return self.present[reference]


class Rig:
    def __init__(self, api: Api, at_once: int) -> None:
        self.api, self.store, self.events = api, FakeStore(), FakeEvents()
        self.images = Images(self.store, api.client, self.events, at_once)  # type: ignore[arg-type]


def rigged(keys: Path, scenario: Callable[[Rig], Awaitable[None]], at_once: int = 3) -> None:
    async def run() -> None:
        async with api_server(keys) as api:
            await scenario(Rig(api, at_once))

    asyncio.run(run())


def pod(*images: str, policy: str = "", uid: str = "u-1", **spec: Any) -> dict[str, Any]:
    containers = [
        {"name": f"c{number}", "image": image, **({"imagePullPolicy": policy} if policy else {})}
        for number, image in enumerate(images)
    ]
    return {
        "metadata": {"name": "p", "namespace": "ns", "uid": uid},
        "spec": {"containers": containers, **spec},
    }


def fail() -> None:
    raise SlurmletError("manifest unknown")


# Policies


@pytest.mark.parametrize("policy", ["", "IfNotPresent", "Never"])
def test_what_is_in_the_store_is_not_pulled(keys: Path, policy: str) -> None:
    async def scenario(rig: Rig) -> None:
        held = rig.store.hold("app:1")
        assert await rig.images.ensure(pod("app:1", policy=policy), Backoff()) == {"app:1": held}
        assert rig.store.pulls == []
        assert rig.events.told == [
            ("Normal", "Pulled", 'Container image "app:1" already present on machine', "c0")
        ]

    rigged(keys, scenario)


@pytest.mark.parametrize(
    ("policy", "held"), [("Always", True), ("Always", False), ("IfNotPresent", False), ("", False)]
)
def test_what_must_be_pulled_is_pulled(keys: Path, policy: str, held: bool) -> None:
    async def scenario(rig: Rig) -> None:
        if held:
            rig.store.hold("app:1")
        found = await rig.images.ensure(pod("app:1", policy=policy), Backoff())
        assert found["app:1"].size_bytes == 42
        assert rig.store.pulls == [("app:1", None)]
        assert rig.events.reasons == ["Pulling", "Pulled"]
        assert rig.events.told[0][2] == 'Pulling image "app:1"'
        assert rig.events.told[1][2].startswith('Successfully pulled image "app:1" in ')
        assert rig.events.told[1][2].endswith(" Image size: 42 bytes.")

    rigged(keys, scenario)


def test_never_means_never(keys: Path) -> None:
    async def scenario(rig: Rig) -> None:
        with pytest.raises(ImageProblem) as problem:
            await rig.images.ensure(pod("app:1", policy="Never"), Backoff())
        text = 'Container image "app:1" is not present with pull policy of Never'
        assert problem.value.waiting == {"app:1": ("ErrImageNeverPull", text)}
        assert rig.store.pulls == []

    rigged(keys, scenario)


def test_a_name_that_is_none(keys: Path) -> None:
    async def scenario(rig: Rig) -> None:
        with pytest.raises(ImageProblem) as problem:
            await rig.images.ensure(pod("UPPER//case"), Backoff())
        ((reason, message),) = problem.value.waiting.values()
        assert reason == "InvalidImageName"
        assert message.startswith('Failed to apply default image tag "UPPER//case": ')
        assert rig.events.reasons == ["InspectFailed"]

    rigged(keys, scenario)


def test_an_image_of_several_containers_is_looked_at_once(keys: Path) -> None:
    async def scenario(rig: Rig) -> None:
        asked = pod("app:1", "app:1", "other:1", initContainers=[{"name": "i", "image": "app:1"}])
        assert set(await rig.images.ensure(asked, Backoff())) == {"app:1", "other:1"}
        assert [reference for reference, _ in rig.store.pulls] == ["app:1", "other:1"]

    rigged(keys, scenario)


# Failures and back-off


def test_a_failed_pull_is_told_and_then_left_alone_for_a_while(keys: Path) -> None:
    async def scenario(rig: Rig) -> None:
        rig.store.on_pull = fail
        backoff = Backoff()
        with pytest.raises(ImageProblem) as first:
            await rig.images.ensure(pod("app:1"), backoff)
        assert first.value.waiting == {"app:1": ("ErrImagePull", "manifest unknown")}
        assert [(reason, text) for _, reason, text, _ in rig.events.told] == [
            ("Pulling", 'Pulling image "app:1"'),
            ("Failed", 'Failed to pull image "app:1": manifest unknown'),
            ("Failed", "Error: ErrImagePull"),
        ]
        with pytest.raises(ImageProblem) as second:
            await rig.images.ensure(pod("app:1"), backoff)
        ((reason, message),) = second.value.waiting.values()
        assert reason == "ImagePullBackOff"
        assert message == 'Back-off pulling image "app:1": manifest unknown'
        assert 0 < second.value.retry_s <= 10
        assert len(rig.store.pulls) == 1

    rigged(keys, scenario)


def test_the_back_off_of_one_pod_is_not_that_of_another(keys: Path) -> None:
    async def scenario(rig: Rig) -> None:
        rig.store.on_pull = fail
        for uid in ("u-1", "u-2"):
            with pytest.raises(ImageProblem) as problem:
                await rig.images.ensure(pod("app:1", uid=uid), Backoff())
            assert problem.value.reason == "ErrImagePull"
        assert len(rig.store.pulls) == 2

    rigged(keys, scenario)


def test_back_off_doubles_up_to_its_limit_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(image_pulls.time, "monotonic", lambda: now[0])
    backoff = Backoff()
    assert backoff.wait_s("a") == (0.0, "")
    assert [backoff.failed("a", "x") for _ in range(7)] == [10, 20, 40, 80, 160, 300, 300]
    assert backoff.failed("b", "y") == 10
    now[0] += 299
    assert backoff.wait_s("a") == (1.0, "x")
    assert backoff.wait_s("b") == (0.0, "y")
    now[0] += 2
    assert backoff.wait_s("a")[0] == 0


# Many at once


def test_one_pull_serves_all_pods_that_wait_for_the_image(keys: Path) -> None:
    async def scenario(rig: Rig) -> None:
        rig.store.on_pull = lambda: time.sleep(0.05)
        asked = [pod("app:1", policy="Always", uid=f"u-{number}") for number in range(5)]
        found = await asyncio.gather(*(rig.images.ensure(one, Backoff()) for one in asked))
        assert len(rig.store.pulls) == 1
        assert len({image["app:1"].digest for image in found}) == 1
        await rig.images.ensure(asked[0], Backoff())
        assert len(rig.store.pulls) == 2, "what has landed is not shared with those who come later"

    rigged(keys, scenario)


def test_a_shared_pull_that_fails_fails_for_all(keys: Path) -> None:
    async def scenario(rig: Rig) -> None:
        rig.store.on_pull = lambda: (time.sleep(0.02), fail())[0]
        asked = [pod("app:1", uid=f"u-{number}") for number in range(3)]
        found = await asyncio.gather(
            *(rig.images.ensure(one, Backoff()) for one in asked), return_exceptions=True
        )
        assert [type(one) for one in found] == [ImageProblem] * 3
        assert len(rig.store.pulls) == 1

    rigged(keys, scenario)


def test_a_pod_that_goes_away_does_not_take_the_others_pull_with_it(keys: Path) -> None:
    async def scenario(rig: Rig) -> None:
        pulling = threading.Event()
        rig.store.on_pull = lambda: (pulling.set(), time.sleep(0.05))[0]
        first = asyncio.create_task(rig.images.ensure(pod("app:1", uid="u-1"), Backoff()))
        second = asyncio.create_task(rig.images.ensure(pod("app:1", uid="u-2"), Backoff()))
        await asyncio.to_thread(pulling.wait, 1)
        first.cancel()
        assert "app:1" in await second
        assert len(rig.store.pulls) == 1
        await asyncio.gather(first, return_exceptions=True)

    rigged(keys, scenario)


def test_only_a_few_pulls_run_at_once(keys: Path) -> None:
    lock, running, most = threading.Lock(), 0, 0

    def slow() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1

    async def scenario(rig: Rig) -> None:
        rig.store.on_pull = slow
        await asyncio.gather(*(rig.images.ensure(pod(f"app:{n}"), Backoff()) for n in range(8)))
        assert most == 2

    rigged(keys, scenario, at_once=2)


# Credentials


def secret(**auths: dict[str, str]) -> dict[str, Any]:
    text = base64.b64encode(json.dumps({"auths": auths}).encode()).decode()
    return {"type": "kubernetes.io/dockerconfigjson", "data": {".dockerconfigjson": text}}


def test_pull_secrets_go_with_their_own_pods_pull_only(keys: Path) -> None:
    async def scenario(rig: Rig) -> None:
        rig.api.on(
            "GET",
            "/api/v1/namespaces/ns/secrets/mine",
            secret(**{"r.example": {"username": "u", "password": "p"}}),
        )
        rig.store.on_pull = lambda: time.sleep(0.03)
        name = "r.example/app:1"
        entitled = pod(name, uid="u-1", imagePullSecrets=[{"name": "mine"}, {"name": "missing"}, {}])
        await asyncio.gather(
            rig.images.ensure(entitled, Backoff()), rig.images.ensure(pod(name, uid="u-2"), Backoff())
        )
        given = sorted(rig.store.pulls, key=lambda pull: pull[1] is None)
        assert len(given) == 2
        assert given[0][1]["r.example"]["username"] == "u"
        assert given[1][1] is None

    rigged(keys, scenario)


def test_images_of_a_submitted_pod_come_from_the_store_alone(keys: Path) -> None:
    async def scenario(rig: Rig) -> None:
        held = rig.store.hold("app:1")
        assert await rig.images.stored(pod("app:1", policy="Always")) == {"app:1": held}
        with pytest.raises(ImageProblem):
            await rig.images.stored(pod("app:1", "gone:1"))
        assert rig.store.pulls == []

    rigged(keys, scenario)
