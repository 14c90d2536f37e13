"""Small test images out of Debian's busybox, and the registry on host login that serves them.

Made by `crane append` and `crane mutate`, as anybody without a container engine would; kept as archives in the cache
and pushed into each new registry (it keeps manifests in memory only).

    localhost:5000/busybox:1   busybox with all its applets
    localhost:5000/app:1       User app, WorkingDir /srv/app, Env GREETING=hello; prints id, pwd and the greeting
    localhost:5000/chowner:1   as root: chown to another uid, setgroups and setuid by su; prints "started"
    /opt/slurmlet/images/{busybox,app,chowner}.tar   the same as docker archives
"""

from __future__ import annotations

import hashlib
import io
import platform
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmlet.base.files import locked
from slurmlet.base.processes import run
from slurmlet.testbed.host_namespaces import Init
from slurmlet.testbed.testbed_plan import OPT, REGISTRY, Paths, Plan

_KEY_FILE = "key"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_USERS = """\
root:x:0:0:root:/root:/bin/sh
app:x:1000:1000:app:/home/app:/bin/sh
nobody:x:65534:65534:nobody:/:/bin/sh
"""
_GROUP = "root:x:0:\napp:x:1000:\nnogroup:x:65534:\n"
# What many packages' start scripts do as root. With one mapped uid each of these calls fails, unless success is faked.
_CHOWNER = """\
#!/bin/sh
set -e
touch /tmp/owned
chown 123:456 /tmp/owned
su nobody -s /bin/sh -c true
echo started
"""


@dataclass(frozen=True)
class Image:
    name: str
    options: tuple[str, ...]  # of crane mutate

    @property
    def reference(self) -> str:
        return f"{REGISTRY}/{self.name}:1"


IMAGES = (
    Image("busybox", ("--cmd=sh",)),
    Image(
        "app",
        ("--user=app", "--workdir=/srv/app", "--env=GREETING=hello",
         "--cmd=sh", "--cmd=-c", "--cmd=id; pwd; echo $GREETING"),
    ),
    Image("chowner", ("--user=0", "--cmd=/bin/chowner")),
)  # fmt: skip


def image_key(busybox: Path) -> str:
    parts = [_USERS, _GROUP, _CHOWNER, repr(IMAGES), hashlib.sha256(busybox.read_bytes()).hexdigest()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def layer(busybox: Path) -> bytes:
    """The one layer all images share; the same bytes each time, so digests stay."""
    applets = sorted(set(run([str(busybox), "--list"]).stdout.split()) - {"busybox"})
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for folder in (
            "bin",
            "dev",
            "etc",
            "home",
            "proc",
            "root",
            "run",
            "srv",
            "sys",
            "usr",
            "var",
            "var/log",
        ):
            tar.addfile(_entry(folder, tarfile.DIRTYPE, 0o755))
        for folder in ("tmp", "var/tmp"):
            tar.addfile(_entry(folder, tarfile.DIRTYPE, 0o1777))
        for folder in ("home/app", "srv/app"):
            tar.addfile(_entry(folder, tarfile.DIRTYPE, 0o755, owner=1000))
        _add_file(tar, "bin/busybox", busybox.read_bytes(), 0o755)
        _add_file(tar, "bin/chowner", _CHOWNER.encode(), 0o755)
        _add_file(tar, "etc/passwd", _USERS.encode(), 0o644)
        _add_file(tar, "etc/group", _GROUP.encode(), 0o644)
        for applet in applets:
            link = _entry(f"bin/{applet}", tarfile.SYMTYPE, 0o777)
            link.linkname = "busybox"
            tar.addfile(link)
    return buffer.getvalue()


def _entry(name: str, kind: bytes, mode: int, owner: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.uid, info.gid = kind, mode, owner, owner
    return info


def _add_file(tar: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    info = _entry(name, tarfile.REGTYPE, mode)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def publish(paths: Paths, plan: Plan, login: Init) -> None:
    """Fill the (just started, empty) registry of the host, making the images first where the cache has none."""
    busybox, folder = paths.root(plan) / "usr/bin/busybox", paths.images(plan)
    with locked(folder / "lock"):
        if _is_ready(folder, busybox):
            for image in IMAGES:
                _crane(login, ["push", f"{OPT}/images/{image.name}.tar", image.reference])
            return
        (folder / "layer.tar").write_bytes(layer(busybox))
        for image in IMAGES:
            _build(folder, login, image)
        (folder / "layer.tar").unlink()
        (folder / _KEY_FILE).write_text(image_key(busybox))


def _is_ready(folder: Path, busybox: Path) -> bool:
    key = folder / _KEY_FILE
    whole = all((folder / f"{image.name}.tar").exists() for image in IMAGES)
    return whole and key.exists() and key.read_text() == image_key(busybox)


def _build(folder: Path, login: Init, image: Image) -> None:
    machine = platform.machine()
    target = f"--set-platform=linux/{_ARCHITECTURES.get(machine, machine)}"
    _crane(login, ["append", "--oci-empty-base", "-f", f"{OPT}/images/layer.tar", "-t", image.reference])
    _crane(login, ["mutate", image.reference, "-t", image.reference, target, *image.options])
    # The images folder is read-only in the hosts: take the archive by way of the host's scratch.
    _crane(login, ["pull", image.reference, f"/run/{image.name}.tar"])
    made = login.root / "run" / f"{image.name}.tar"
    (folder / f"{image.name}.tar").write_bytes(made.read_bytes())
    (folder / f"{image.name}.tar").chmod(0o644)
    made.unlink()


def _crane(login: Init, arguments: Sequence[str]) -> None:
    argv = [
        "nsenter",
        f"--target={login.pid}",
        "--mount",
        "--net",
        "--root",
        "--wd",
        "--",
        f"{OPT}/upstream/crane",
    ]
    run([*argv, *arguments], env={"HOME": "/nonexistent", "PATH": "/usr/bin:/bin"}, timeout_s=60)
