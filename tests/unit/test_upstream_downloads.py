"""Downloads against a real HTTP server on loopback: what is good is kept, what is not never counts."""

from __future__ import annotations

import hashlib
import io
import socket
import tarfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.client import HTTPMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from slurmlet.base.errors import SiteError
from slurmlet.upstream.binaries import inventory
from slurmlet.upstream.downloads import Downloader, DownloadFailed, NoDowngrade, checksum_for
from slurmlet.upstream.pins import Program, load

BODY = b"#!/bin/sh\necho upstream\n" * 1000


@dataclass
class Site:
    """A release page: path -> (bytes sent, length claimed), and every path that was asked for."""

    base: str
    pages: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def put(self, path: str, body: bytes, claimed_bytes: int | None = None) -> None:
        self.pages[path] = (body, len(body) if claimed_bytes is None else claimed_bytes)


@pytest.fixture
def site() -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.asked.append(self.path)
            if self.path in found.redirects:
                self.send_response(302)
                self.send_header("Location", found.redirects[self.path])
                self.end_headers()
                return
            if self.path not in found.pages:
                self.send_error(404)
                return
            body, claimed_bytes = found.pages[self.path]
            self.send_response(200)
            self.send_header("Content-Length", str(claimed_bytes))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Site(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def program(base: str) -> Program:
    return Program(
        name="tool",
        version="v1.2.3",
        module="example.org/tool",
        binaries={"tool": "example.org/tool"},
        url=f"{base}/{{version}}/{{name}}",
        checksums=f"{base}/{{version}}/{{name}}.sha256",
    )


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def test_a_good_download_is_returned_whole(site: Site, tmp_path: Path) -> None:
    site.put("/v1.2.3/tool", BODY)
    site.put("/v1.2.3/tool.sha256", sha256(BODY) + b"\n")
    assert Downloader().fetch(program(site.base), "tool", tmp_path).read_bytes() == BODY


def test_a_wrong_checksum_leaves_nothing(site: Site, tmp_path: Path) -> None:
    site.put("/v1.2.3/tool", BODY)
    site.put("/v1.2.3/tool.sha256", sha256(BODY + b"!"))
    with pytest.raises(DownloadFailed, match="does not have the checksum"):
        Downloader().fetch(program(site.base), "tool", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_connection_that_breaks_off_is_an_error(site: Site, tmp_path: Path) -> None:
    site.put("/v1.2.3/tool", BODY[:1000], claimed_bytes=len(BODY))
    site.put("/v1.2.3/tool.sha256", sha256(BODY))
    with pytest.raises(DownloadFailed):
        Downloader().fetch(program(site.base), "tool", tmp_path)


def test_without_a_published_checksum_the_binary_is_not_even_asked_for(site: Site, tmp_path: Path) -> None:
    site.put("/v1.2.3/tool", BODY)
    with pytest.raises(DownloadFailed, match="404"):
        Downloader().fetch(program(site.base), "tool", tmp_path)
    assert "/v1.2.3/tool" not in site.asked


def test_the_member_of_an_archive(site: Site, tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        inside = tarfile.TarInfo("tool-v1.2.3/tool")
        inside.size = len(BODY)
        tar.addfile(inside, io.BytesIO(BODY))
    site.put("/v1.2.3/tool", packed.getvalue())
    site.put("/v1.2.3/tool.sha256", sha256(packed.getvalue()) + b"  ./release/tool\n")
    archived = replace(program(site.base), member="tool-{version}/tool")
    assert Downloader().fetch(archived, "tool", tmp_path).read_bytes() == BODY
    assert [path.name for path in tmp_path.iterdir()] == ["tool"]
    with pytest.raises(DownloadFailed, match="no usable other"):
        Downloader().fetch(replace(archived, member="other"), "tool", tmp_path)


def test_redirects_are_followed(site: Site, tmp_path: Path) -> None:
    site.redirects["/v1.2.3/tool"] = f"{site.base}/moved"
    site.put("/moved", BODY)
    site.put("/v1.2.3/tool.sha256", sha256(BODY))
    assert Downloader().fetch(program(site.base), "tool", tmp_path).read_bytes() == BODY


def test_a_refused_connection_falls_through_at_once(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{unused.getsockname()[1]}"
    downloader = Downloader()
    began_s = time.monotonic()
    with pytest.raises(DownloadFailed, match="does not answer"):
        downloader.fetch(program(base), "tool", tmp_path)
    assert time.monotonic() - began_s < 0.5


def test_hosts_that_swallow_packets_cost_one_timeout_together() -> None:
    # A listener whose backlog is full leaves further connections unanswered, as a firewall that drops does.
    with socket.socket() as one, socket.socket() as two, socket.socket() as fill1, socket.socket() as fill2:
        urls = []
        for listener, filler in ((one, fill1), (two, fill2)):
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            filler.connect(listener.getsockname())
            urls.append(f"http://127.0.0.1:{listener.getsockname()[1]}/x")
        downloader = Downloader(connect_timeout_s=0.3)
        began_s = time.monotonic()
        downloader.probe(urls)
        assert [downloader.reachable(url) for url in urls] == [False, False]
        assert time.monotonic() - began_s < 0.55


def test_checksum_files_of_every_shape() -> None:
    one, two = "a" * 64, "b" * 64
    assert checksum_for(f"{one}\n", "kubectl") == one
    assert checksum_for(f"{one}  other.tar.gz\n{two}  ./dist/etcd.tar.gz\n", "etcd.tar.gz") == two
    assert checksum_for(f"{one.upper()} *runc.amd64\n", "runc.amd64") == one
    for text in ("", "<html>not found</html>", f"{one}  other\n", f"{one}\n{two}\n"):
        with pytest.raises(DownloadFailed):
            checksum_for(text, "kubectl")


def test_a_redirect_must_not_leave_encryption() -> None:
    request = urllib.request.Request("https://release.example/tool")
    with pytest.raises(DownloadFailed, match="unencrypted"):
        NoDowngrade().redirect_request(
            request, io.BytesIO(), 302, "Found", HTTPMessage(), "http://release.example/tool"
        )


def test_a_download_ends_in_the_cache(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURMLET_CACHE", str(tmp_path))
    monkeypatch.delenv("SLURMLET_UPSTREAM_DIR", raising=False)
    pins = replace(load(), programs=(program(site.base),))
    site.put("/v1.2.3/tool", BODY)
    site.put("/v1.2.3/tool.sha256", sha256(b"another file"))
    with pytest.raises(SiteError, match=r"tool v1\.2\.3 is not available"):
        inventory(["tool"], pins=pins, build=False)
    assert "does not have the checksum" in capsys.readouterr().err
    assert list((tmp_path / "upstream").rglob("tool*")) == []

    site.put("/v1.2.3/tool.sha256", sha256(BODY))
    [found] = inventory(["tool"], pins=pins, build=False)
    assert (found.source, found.path.read_bytes()) == ("download", BODY)
    asked = len(site.asked)
    assert inventory(["tool"], pins=pins, build=False, verify=True) == [found]
    assert len(site.asked) == asked
