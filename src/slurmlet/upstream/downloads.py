"""Official releases over HTTPS, each checked against the checksum its project publishes.

Most sites this runs on reach some hosts and not others, so a host that does not answer is asked once per run
and then left alone. Never returns bytes whose checksum was not compared, never follows a redirect from https
to http.
"""

from __future__ import annotations

import hashlib
import http.client
import re
import shutil
import socket
import tarfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from slurmlet.base.errors import SlurmletError
from slurmlet.upstream.pins import Program

CONNECT_TIMEOUT_S = 2.0
STALL_TIMEOUT_S = 30.0
SIZE_CAP_BYTES = 1 << 30
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


class DownloadFailed(SlurmletError):
    reason = "DownloadFailed"
    transient = True


class NoDowngrade(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if req.type == "https" and not newurl.startswith("https:"):
            raise DownloadFailed(f"{req.full_url} redirects to an unencrypted address")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class Downloader:
    """One run's downloads; remembers which hosts answer."""

    def __init__(self, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._answers: dict[tuple[str, int], bool] = {}
        self._opener = urllib.request.build_opener(NoDowngrade())

    def probe(self, urls: Iterable[str]) -> None:
        """Try all hosts at once, so that a site without a way out costs one connect timeout in total."""
        threads = {}
        for endpoint in {_endpoint(url) for url in urls} - self._answers.keys():
            # A thread, because name resolution has a timeout of its own that no socket option shortens.
            threads[endpoint] = threading.Thread(target=self._connect, args=(endpoint,), daemon=True)
            threads[endpoint].start()
        deadline_s = time.monotonic() + self._connect_timeout_s
        for endpoint, thread in threads.items():
            thread.join(max(0.0, deadline_s - time.monotonic()))
            self._answers.setdefault(endpoint, False)

    def reachable(self, url: str) -> bool:
        self.probe([url])
        return self._answers[_endpoint(url)]

    def fetch(self, program: Program, binary: str, directory: Path) -> Path:
        """The verified binary as a new file in `directory`; raises DownloadFailed otherwise."""
        url = program.expand(program.url, binary)
        if not self.reachable(url):
            raise DownloadFailed(f"{urllib.parse.urlsplit(url).hostname} does not answer")
        wanted = self._published_checksum(program.expand(program.checksums, binary), url)
        target = directory / binary
        if not program.member:
            self._save(url, target, wanted)
            return target
        archive = directory / f"{binary}.archive"
        self._save(url, archive, wanted)
        _extract(archive, program.expand(program.member, binary), target)
        return target

    def _connect(self, endpoint: tuple[str, int]) -> None:
        try:
            socket.create_connection(endpoint, timeout=self._connect_timeout_s).close()
        except OSError:
            self._answers.setdefault(endpoint, False)
        else:
            self._answers.setdefault(endpoint, True)

    def _published_checksum(self, checksums_url: str, url: str) -> str:
        with self._open(checksums_url) as answer:
            try:
                text = answer.read(1 << 20).decode(errors="replace")
            except (OSError, http.client.HTTPException) as error:
                raise DownloadFailed(f"{checksums_url}: {error}") from error
        return checksum_for(text, url.rsplit("/", 1)[-1])

    def _save(self, url: str, path: Path, wanted: str) -> None:
        digest = hashlib.sha256()
        size_bytes = 0
        with self._open(url) as answer, path.open("wb") as file:
            try:
                while chunk := answer.read(1 << 20):
                    digest.update(chunk)
                    file.write(chunk)
                    size_bytes += len(chunk)
                    if size_bytes > SIZE_CAP_BYTES:
                        raise DownloadFailed(f"{url} is larger than {SIZE_CAP_BYTES >> 20} MiB")
            except (OSError, http.client.HTTPException) as error:
                raise DownloadFailed(f"{url} broke off after {size_bytes} bytes: {error}") from error
        if digest.hexdigest() != wanted:
            path.unlink()
            raise DownloadFailed(
                f"{url} ({size_bytes} bytes) does not have the checksum its project publishes"
            )

    def _open(self, url: str) -> http.client.HTTPResponse:
        request = urllib.request.Request(url, headers={"User-Agent": "slurmlet"})  # noqa: S310 - pinned URLs
        try:
            answer = self._opener.open(request, timeout=STALL_TIMEOUT_S)
        except (OSError, http.client.HTTPException) as error:
            raise DownloadFailed(f"{url}: {error}") from error
        assert isinstance(answer, http.client.HTTPResponse)
        return answer


def checksum_for(text: str, file_name: str) -> str:
    """The sha256 of `file_name` out of a checksum file: a bare sum, or lines of sum and name."""
    rows = [line.split() for line in text.splitlines() if line.strip()]
    for row in rows:
        named = row[-1].lstrip("*").rsplit("/", 1)[-1]
        if _SHA256.fullmatch(row[0]) and (named == file_name or len(rows) == len(row) == 1):
            return row[0].lower()
    raise DownloadFailed(f"no checksum is published for {file_name}")


def _endpoint(url: str) -> tuple[str, int]:
    """Where a connection for `url` goes: its host, or the proxy the user's environment names."""
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(host):
        parts = urllib.parse.urlsplit(proxy if "//" in proxy else f"//{proxy}")
        host = parts.hostname or host
    return host, parts.port or (443 if parts.scheme == "https" else 80)


def _extract(archive: Path, member: str, target: Path) -> None:
    try:
        with tarfile.open(archive) as tar:
            inside = tar.extractfile(member)
            if inside is None:
                raise DownloadFailed(f"{member} in the release archive is not a file")
            with inside, target.open("wb") as out:
                shutil.copyfileobj(inside, out)
    except (KeyError, tarfile.TarError, OSError) as error:
        raise DownloadFailed(f"the release archive has no usable {member}: {error}") from error
    finally:
        archive.unlink(missing_ok=True)
