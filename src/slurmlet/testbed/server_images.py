"""Images of programs nobody here wrote, for tests of the network: servers and their clients, unchanged.

    localhost:5000/tools:1     curl, dig, ping, ip and ss, nc, socat, iperf3, Python; uv (linked with musl: its resolver);
                               grpc-server and grpc-client (Go; the example "metadata" of gRPC); kubectl
    localhost:5000/servers:1   nginx, Redis, PostgreSQL, Node.js, etcd
    localhost:5000/java:1      a Java runtime
    localhost:5000/bench:1     iperf3, sockperf, wrk, nginx, ping, slirp4netns, pasta: for `slurmlet bench network`
    localhost:5000/sysbench:1  sysbench, for examples/run

Made once, as docker archives in the cache, from Debian's packages, PyPI and the Go module proxy; the hosts see them
under /opt/slurmlet/images/servers. No registry serves them: pushing a few hundred megabytes at each start of a testbed
is dear, and `load` puts one into a user's store in seconds.

Must never install anything on the machine: the trees are files (see `debian`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from slurmlet.base.console import Steps
from slurmlet.base.files import locked, private_dir, write_private
from slurmlet.base.processes import run
from slurmlet.testbed.debian_packages import SUITE, Archive
from slurmlet.testbed.hosts import DEFAULT_USER, Testbed
from slurmlet.testbed.rootfs import ensure_root
from slurmlet.testbed.testbed_plan import OPT, REGISTRY, Paths, Plan
from slurmlet.upstream import pins as pinning
from slurmlet.upstream.binaries import ensure as ensure_upstream
from slurmlet.upstream.go_build import Builder

# Raise it when the steps below change the result.
_RECIPE = 1
_PATH = "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What the dependencies name for the sake of installing, or for a feature that nobody uses here.
_NEEDLESS = frozenset(
    (
       "adduser", "base-passwd", "bash", "ca-certificates", "ca-certificates-java", "debconf",
       "debianutils", "dpkg", "init-system-helpers", "java-common", "libaudit-common", "libc-l10n",
       "libdebconfclient0", "libgdbm-compat4t64", "libgdbm6t64", "libio-pty-perl", "libipc-run-perl",
       "libjson-perl", "libllvm19", "libpam-modules", "libpam-modules-bin", "libpam-runtime", "libperl5.40",
       "libsemanage-common", "libsemanage2", "libsepol2", "libtext-charwidth-perl", "libtext-wrapi18n-perl",
       "libz3-4", "locales", "login.defs", "mawk", "node-corepack", "openssl", "openssl-provider-legacy",
       "passwd", "perl", "perl-base", "perl-modules-5.40", "postgresql-client-common", "postgresql-common",
       "postgresql-common-dev", "readline-common", "sensible-utils", "ssl-cert", "sysvinit-utils", "tar",
       "ucf", "util-linux",
    )
)  # fmt: skip
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\npostgres:x:999:999::/var/lib/postgresql:/bin/sh\n"
    "www-data:x:33:33::/srv:/bin/sh\napp:x:1000:1000:app:/home/app:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n",
    "etc/group": "root:x:0:\npostgres:x:999:\nwww-data:x:33:\napp:x:1000:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n",
}
# For compilers and for character sets of old; a third of the files.
_DROPPED = ("usr/lib/postgresql/17/lib/bitcode", f"usr/lib/{os.uname().machine}-linux-gnu/gconv")
_OPEN_FOLDERS = ("tmp", "var/tmp", "run", "home/app", "srv", "var/lib/nginx", "var/log/nginx")
# A program that asks musl for addresses, and not glibc: the wheel for musl is linked statically.
_MUSL_WHEEL = "uv==0.13.7"
_MUSL_WHEEL_HASHES = {
    "x86_64": "8b8ac028ae4ebb2a3f9d04907c61794f2cf8d7a7002bfbb4019a3dee28351fb2",
    "aarch64": "a90f5d95716ab83091f0f73a8e7ec64e557abf2a28537fcd719b2ac88e6f725a",
}


@dataclass(frozen=True)
class ServerImage:
    name: str
    packages: tuple[str, ...]
    programs: tuple[str, ...] = ()  # of ours below, put into /usr/local/bin
    path: str = _PATH
    links: Mapping[str, str] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        return f"{REGISTRY}/{self.name}:1"


_BASE = ("base-files", "busybox-static", "dash", "netbase")
IMAGES = (
    ServerImage(
        "tools",
        (
            *_BASE,
            "curl",
            "bind9-dnsutils",
            "iputils-ping",
            "iproute2",
            "netcat-openbsd",
            "socat",
            "iperf3",
            "python3",
        ),
        ("uv", "grpc-server", "grpc-client", "kubectl"),
        links={"usr/bin/nc": "nc.openbsd"},
    ),
    ServerImage(
        "servers",
        (*_BASE, "nginx-light", "redis-server", "redis-tools", "postgresql-17", "nodejs"),
        ("etcd",),
        path=f"{_PATH}:/usr/lib/postgresql/17/bin",
    ),
    ServerImage(
        "java",
        (*_BASE, "openjdk-21-jre-headless"),
        path=f"{_PATH}:/usr/lib/jvm/java-21-openjdk-{pinning.architecture()[0]}/bin",
    ),
)
# Not for tests, so not made with the others.
BENCH = ServerImage(
    "bench",
    ("base-files", "busybox-static", "iperf3", "sockperf", "wrk", "nginx-light", "iputils-ping", "slirp4netns", "passt",
     "netbase"),
)  # fmt: skip
# For examples/run alone.
SYSBENCH = ServerImage("sysbench", (*_BASE, "sysbench"))
# What upstream's agnhost has besides its own program; testbed/conformance takes the files out of it.
NETTOOLS = ServerImage(
    "nettools",
    (
        "base-files",
        "busybox-static",
        "libc-bin",
        "curl",
        "bind9-dnsutils",
        "netcat-openbsd",
        "iproute2",
        "iputils-ping",
    ),
    links={"usr/bin/nc": "nc.openbsd"},
)
_GO_PROGRAMS = {
    "grpc-server": "google.golang.org/grpc/examples/features/metadata/server",
    "grpc-client": "google.golang.org/grpc/examples/features/metadata/client",
}
_GO_RECIPE = "servers"


def folder_of(paths: Paths, plan: Plan) -> Path:
    return paths.images(plan) / "servers"


def image_key(image: ServerImage) -> str:
    recipe = (pinning.recipes_dir() / _GO_RECIPE / "go.sum").read_text()
    made_of = [_RECIPE, SUITE, _FILES, _DROPPED, _OPEN_FOLDERS, _MUSL_WHEEL, _GO_PROGRAMS, sorted(_NEEDLESS)]
    said = [*made_of, asdict(image), recipe, pinning.load().label()]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def ensure(paths: Paths, plan: Plan, steps: Steps, images: Iterable[ServerImage] = IMAGES) -> dict[str, Path]:
    """name → archive of every image; those the cache lacks are made first (all of them: about two minutes)."""
    images = tuple(images)
    folder = folder_of(paths, plan)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(paths.images(plan) / "servers.lock"):
        missing = [image for image in images if not archive_of(folder, image).exists()]
        if missing:
            _make(missing, folder, Archive(ensure_root(paths, plan, steps), private_dir(paths.base)), steps)
    return {image.name: archive_of(folder, image) for image in images}


def archive_of(folder: Path, image: ServerImage) -> Path:
    return folder / f"{image.name}-{image_key(image)}.tar"


def load(bed: Testbed, names: Iterable[str], user: str = DEFAULT_USER) -> None:
    """Put images into the user's store, those it has not got yet."""
    wanted = [image for image in (*IMAGES, BENCH, SYSBENCH) if image.name in set(names)]
    archives = ensure(bed.paths, bed.plan, Steps(), wanted)
    listed = json.loads(bed.run(["slurmlet", "image", "ls", "-o", "json"], user=user).stdout)
    for image in wanted:
        archive = archives[image.name]
        if (image.reference, _digest(archive)) in {(entry["reference"], entry["digest"]) for entry in listed}:
            continue
        inside = f"{OPT}/images/servers/{archive.name}"
        bed.run(["slurmlet", "image", "load", inside, "--name", image.reference], user=user, timeout_s=120)


def _digest(archive: Path) -> str:
    """What the store knows an image of a docker archive by: the digest of its config."""
    with tarfile.open(archive) as tar:
        opened = tar.extractfile("config.json")
        assert opened is not None
        return f"sha256:{hashlib.sha256(opened.read()).hexdigest()}"


def _make(images: Iterable[ServerImage], folder: Path, source: Archive, steps: Steps) -> None:
    with steps.step("Images of servers: Debian's package lists"):
        source.refresh()
    with tempfile.TemporaryDirectory(dir=source.work, prefix="servers-") as scratch:
        work = Path(scratch)
        images = tuple(images)
        programs = _programs(work, steps) if any(image.programs for image in images) else {}
        for image in images:
            with steps.step(f"Images of servers: {image.name}"):
                tree = work / image.name
                tree.mkdir()
                source.unpack(image.packages, _NEEDLESS, tree)
                _furnish(tree, image, programs)
                made = work / f"{image.name}.tar"
                write_archive(tree, image, made)
                shutil.rmtree(tree)
            _replace(folder, image, made)


def _replace(folder: Path, image: ServerImage, made: Path) -> None:
    for old in folder.glob(f"{image.name}-*"):
        old.unlink()
    made.chmod(0o644)
    made.rename(archive_of(folder, image))


def _programs(work: Path, steps: Steps) -> dict[str, Path]:
    """Where the programs lie that do not come from Debian."""
    upstream = ensure_upstream(["kubectl", "etcd"])
    made = private_dir(work / "programs")
    pins = pinning.load()
    builder = Builder(pinning.recipes_dir(), private_dir(work / "cache"), work / "logs", pins.go, steps)
    pair = pinning.Program(_GO_RECIPE, "(gRPC)", "", _GO_PROGRAMS, "", "", expected_build_s=20)
    found = builder.build(pair, list(_GO_PROGRAMS), made)
    with steps.step("Images of servers: a program linked with musl"):
        found["uv"] = _musl_program(made)
    return {**found, "kubectl": upstream / "kubectl", "etcd": upstream / "etcd"}


def _musl_program(work: Path) -> Path:
    machine = os.uname().machine
    wanted = work / "musl.txt"
    hashes = " ".join(f"--hash=sha256:{value}" for value in _MUSL_WHEEL_HASHES.values())
    write_private(wanted, f"{_MUSL_WHEEL} {hashes}\n")
    argv = [
        sys.executable,
        "-m",
        "pip",
        "--quiet",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--require-hashes",
    ]
    run([*argv, f"--platform=musllinux_1_1_{machine}", "--dest", str(work), "-r", str(wanted)], timeout_s=300)
    (wheel,) = work.glob("uv-*.whl")
    with zipfile.ZipFile(wheel) as opened:
        (member,) = (name for name in opened.namelist() if name.endswith("/scripts/uv"))
        (work / "uv").write_bytes(opened.read(member))
    return work / "uv"


def _furnish(tree: Path, image: ServerImage, programs: Mapping[str, Path]) -> None:
    """What maintainers' scripts would have made, and what every image has."""
    for folder in ("dev", "proc", "sys", "root", "etc", "usr/local/bin", "var/log", "var/lib"):
        (tree / folder).mkdir(parents=True, exist_ok=True)
    for folder in _OPEN_FOLDERS:
        (tree / folder).mkdir(parents=True, exist_ok=True)
        (tree / folder).chmod(0o1777)
    for folder in _DROPPED:
        shutil.rmtree(tree / folder, ignore_errors=True)
    for name, text in _FILES.items():
        (tree / name).write_text(text)
    for program in image.programs:
        shutil.copyfile(programs[program], tree / "usr/local/bin" / program)
        (tree / "usr/local/bin" / program).chmod(0o755)
    for link, target in image.links.items():
        (tree / link).symlink_to(target)
    # Not busybox as the shell: it would prefer its own applets to the programs that are here.
    have = {path.name for place in ("bin", "sbin") for path in (tree / "usr" / place).iterdir()}
    for applet in run([str(tree / "usr/bin/busybox"), "--list"]).stdout.split():
        if applet not in have:
            (tree / "usr/bin" / applet).symlink_to("busybox")


def write_archive(tree: Path, image: ServerImage, target: Path) -> None:
    """The tree as a docker archive of one layer. Everything belongs to root; the same tree gives the same bytes."""
    layer = target.with_suffix(".layer")
    with tarfile.open(layer, "w") as tar:
        for path in sorted(tree.rglob("*")):
            tar.add(path, path.relative_to(tree), recursive=False, filter=_plain)
    with layer.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    config = json.dumps(
        {
            "architecture": pinning.architecture()[0],
            "os": "linux",
            "config": {"Env": [f"PATH={image.path}"], "Cmd": ["sh"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
    ).encode()
    manifest = [{"Config": "config.json", "RepoTags": [image.reference], "Layers": ["layer.tar"]}]
    with tarfile.open(target, "w") as tar:
        for name, data in (("config.json", config), ("manifest.json", json.dumps(manifest).encode())):
            file = target.with_suffix(".part")
            file.write_bytes(data)
            tar.add(file, name, filter=_plain)
            file.unlink()
        tar.add(layer, "layer.tar", filter=_plain)
    layer.unlink()


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info
