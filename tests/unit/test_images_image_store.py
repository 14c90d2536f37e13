"""Pulling with the real crane from a registry on loopback that asks for a password; names, removal, two at once."""

from __future__ import annotations

import base64
import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmlet.base.errors import SlurmletError, UserError
from slurmlet.base.files import locked
from slurmlet.images import crane
from slurmlet.images.image_store import Store
from slurmlet.images.references import InvalidImageName
from tests.unit.images_building import contents, layer, layout_files

LAYERS = [layer(("a", "f", b"1"), ("b", "f", b"b")), layer((".wh.a", "f", b""), ("c", "f", b"c"))]
PASSWORD = "hunter2 with spaces"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class Registry(http.server.ThreadingHTTPServer):
    """The read side of the distribution API for one image, under `open/` for all and `closed/` with a password."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        files = layout_files(LAYERS)
        self.blobs = {f"sha256:{name[13:]}": raw for name, raw in files.items() if name.startswith("blobs")}
        self.manifest = json.loads(files["index.json"])["manifests"][0]["digest"]
        self.gets: list[str] = []
        self.delay_s = 0.0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Registry

    def do_GET(self) -> None:
        wanted = "Basic " + base64.b64encode(f"user1:{PASSWORD}".encode()).decode()
        if self.path.startswith("/v2/closed/") and self.headers.get("Authorization") != wanted:
            return self._answer(
                401, b'{"errors":[{"code":"UNAUTHORIZED","message":"authentication required"}]}'
            )
        if self.path == "/v2/":
            return self._answer(401 if "Authorization" not in self.headers else 200, b"{}")
        name = self.path.rpartition("/")[2]
        name = self.server.manifest if name == "1" else name
        raw = self.server.blobs.get(name)
        if raw is None:
            return self._answer(404, b'{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}')
        if self.command == "GET" and "/blobs/" in self.path:
            self.server.gets.append(name)
            time.sleep(self.server.delay_s)
        return self._answer(200, raw, name)

    do_HEAD = do_GET

    def _answer(self, code: int, raw: bytes, name: str = "") -> None:
        self.send_response(code)
        if code == 401:
            self.send_header("WWW-Authenticate", 'Basic realm="test"')
        if name:
            self.send_header("Docker-Content-Digest", name)
            self.send_header(
                "Content-Type", MANIFEST if "/manifests/" in self.path else "application/octet-stream"
            )
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def registry() -> Iterator[Registry]:
    server = Registry()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    try:
        crane._program()
    except SlurmletError:
        pytest.skip("crane is not here; `make setup` provides it")
    return Store(tmp_path / "store")


def test_pull_stores_the_image_once(store: Store, registry: Registry) -> None:
    name = f"{registry.address}/open/app:1"
    assert store.lookup(name) is None
    image = store.pull(name)
    assert image.digest == registry.manifest == store.resolve(name, None)
    assert image.repo_digest == f"{registry.address}/open/app@{registry.manifest}"
    assert image.reference == name
    assert contents(image.directory / "rootfs.tar") == {"b": b"b", "c": b"c"}
    assert image.config["config"]["Entrypoint"] == ["/bin/sh"]
    transferred = list(registry.gets)
    again = store.pull(f"{registry.address}/open/other:1")
    assert again.digest == image.digest
    assert again.repo_digest == f"{registry.address}/open/other@{registry.manifest}"
    assert registry.gets == transferred
    assert store.lookup(f"{registry.address}/any@{image.digest}") is not None


def test_two_pulls_at_once_transfer_once(store: Store, registry: Registry) -> None:
    registry.delay_s = 0.2
    results: list[str] = []
    pulls = [
        threading.Thread(target=lambda: results.append(store.pull(f"{registry.address}/open/app:1").digest))
        for _ in range(3)
    ]
    for thread in pulls:
        thread.start()
    for thread in pulls:
        thread.join()
    assert results == [registry.manifest] * 3
    assert sorted(registry.gets) == sorted(set(registry.gets))


def test_a_password_from_a_pull_secret(store: Store, registry: Registry) -> None:
    name = f"{registry.address}/closed/app:1"
    with pytest.raises(SlurmletError) as caught:
        store.pull(name)
    assert (caught.value.reason, caught.value.transient) == ("ErrImagePull", True)
    assert "UNAUTHORIZED" in caught.value.message
    assert "imagePullSecret" in caught.value.hint
    right = {"username": "user1", "password": PASSWORD}
    assert store.pull(name, auths={registry.address: right}).digest == registry.manifest


def test_every_matching_credential_is_tried(store: Store, registry: Registry) -> None:
    auths = {
        f"{registry.address}/closed": {"username": "user1", "password": "wrong"},
        registry.address: {"auth": base64.b64encode(f"user1:{PASSWORD}".encode()).decode()},
    }
    assert store.resolve(f"{registry.address}/closed/app:1", auths) == registry.manifest


def test_a_password_from_the_users_docker_config(store: Store, registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "docker").mkdir()
    entry = {"auth": base64.b64encode(f"user1:{PASSWORD}".encode()).decode()}
    (tmp_path / "docker/config.json").write_text(json.dumps({"auths": {registry.address: entry}}))
    assert store.pull(f"{registry.address}/closed/app:1").digest == registry.manifest


def test_no_secret_in_arguments_or_environment(
    store: Store, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = tmp_path / "bin"
    spy.mkdir()
    (spy / "crane").write_text(
        f'#!/bin/sh\ntr "\\0" "\\n" < /proc/$$/environ >> {tmp_path}/seen\necho "$@" >> {tmp_path}/seen\n'
    )
    (spy / "crane").chmod(0o755)
    monkeypatch.setenv("SLURMLET_UPSTREAM_DIR", str(spy))
    with pytest.raises(SlurmletError):
        store.pull(
            f"{registry.address}/closed/app:1",
            auths={registry.address: {"username": "user1", "password": PASSWORD}},
        )
    seen = (tmp_path / "seen").read_text()
    assert "closed/app:1" in seen
    assert "DOCKER_CONFIG" in seen
    assert PASSWORD not in seen


def test_failures_say_what_and_leave_nothing(store: Store, registry: Registry, tmp_path: Path) -> None:
    for name, words in {
        f"{registry.address}/open/app:2": "MANIFEST_UNKNOWN",
        "127.0.0.1:1/open/app:1": "connection refused",
    }.items():
        with pytest.raises(SlurmletError) as caught:
            store.pull(name)
        assert caught.value.reason == "ErrImagePull"
        assert words in caught.value.message
        assert caught.value.hint
    with pytest.raises(InvalidImageName):
        store.pull("--insecure")
    assert store.list() == []


def test_a_registry_that_lies_about_a_layer(store: Store, registry: Registry, tmp_path: Path) -> None:
    packed = next(name for name, raw in registry.blobs.items() if raw[:2] == b"\x1f\x8b")
    registry.blobs[packed] = registry.blobs[packed][:-1] + b"?"
    with pytest.raises(SlurmletError) as caught:
        store.pull(f"{registry.address}/open/app:1")
    assert caught.value.reason == "ErrImagePull"
    assert store.lookup(registry.manifest) is None
    assert list((tmp_path / "store/work").iterdir()) == []


def test_remove_by_name_and_by_digest(store: Store, registry: Registry) -> None:
    first, second = f"{registry.address}/open/a:1", f"{registry.address}/open/b:1"
    image = store.pull(first)
    store.pull(second)
    assert [entry.reference for entry in store.list()] == [first, second]
    store.remove(first)
    assert store.lookup(first) is None
    assert store.lookup(second) is not None
    store.remove(second)
    assert not image.directory.exists()
    store.pull(first)
    store.pull(second)
    store.remove(image.digest)
    assert store.list() == []
    with pytest.raises(UserError, match="no image"):
        store.remove(first)


def test_an_image_without_a_name_is_listed_and_can_be_removed(
    store: Store, registry: Registry, tmp_path: Path
) -> None:
    image = store.pull(f"{registry.address}/open/a:1")
    (tmp_path / "store/references.json").write_text("{broken")
    assert [(entry.reference, entry.digest) for entry in store.list()] == [("", image.digest)]
    store.remove(image.digest)
    assert store.list() == []


def test_what_a_killed_pull_left_is_swept_and_what_a_live_one_holds_is_not(
    store: Store, registry: Registry, tmp_path: Path
) -> None:
    work = tmp_path / "store/work"
    for name in ("dead", "alive"):
        (work / name).mkdir(parents=True)
        (work / f"{name}.lock").touch()
    with locked(work / "alive.lock"):
        store.pull(f"{registry.address}/open/a:1")
    assert sorted(path.name for path in work.iterdir()) == ["alive", "alive.lock"]


def test_insecure_registries_are_named_by_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMLET_INSECURE_REGISTRIES", "a:1, b.example:80,,")
    assert crane._insecure_registries() == {"a:1", "b.example:80"}


def test_a_store_that_cannot_be_written_says_so(store: Store, registry: Registry, tmp_path: Path) -> None:
    store.pull(f"{registry.address}/open/a:1")
    (tmp_path / "store/images").rename(tmp_path / "gone")
    (tmp_path / "store/images").symlink_to("/proc/nowhere")
    with pytest.raises(SlurmletError) as caught:
        store.pull(f"{registry.address}/open/a:1")
    assert caught.value.hint
