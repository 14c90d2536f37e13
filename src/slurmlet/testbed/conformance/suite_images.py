"""The images the specs name, made of what the suite's own sources and Debian's busybox give.

Written as docker archives and loaded under exactly the names the suite asks for, so that it runs unmodified and without
a registry. The names, tags included, come from the suite itself (`e2e.test --list-images`).

    agnhost      upstream's program, built; bash and busybox, Debian's curl, dig, getent, nc, ip, ss, ping (no iperf)
    busybox      busybox; `sh` on the PATH is bash, because Debian's build drops variables such as "data-1", which specs
                 ask for; /bin/sh is busybox, whose messages specs ask for
    glibc-dns-testing   the same tools as agnhost's
    nonewprivs   upstream's program, setuid
    nonroot      busybox as user 1234
    ipc-utils    busybox
    pause        a shell script that waits and ends at SIGTERM
    nginx        a stand-in: busybox httpd on port 80 where the pod may have that port, else it only waits
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import re
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from slurmlet.base.processes import run
from slurmlet.testbed.conformance.suite_build import Built

_FOLDERS = ("bin", "dev", "etc", "home", "proc", "root", "run", "sys", "uploads", "usr", "usr/bin", "usr/local",
            "usr/local/bin", "usr/share", "usr/share/nginx", "usr/share/nginx/html", "var", "var/log")  # fmt: skip
_USERS_FILE = """\
root:x:0:0:root:/root:/bin/sh
user-defined-in-image:x:1000:1000::/home/user-defined-in-image:/bin/sh
nobody:x:65534:65534:nobody:/:/bin/false
"""
_GROUPS_FILE = """\
root:x:0:
user-defined-in-image:x:1000:
group-defined-in-image:x:50000:user-defined-in-image
nobody:x:65534:
"""
_NETTOOLS = re.compile(
    r"usr/bin/(curl|dig|getent|nc|ip|ss|ping)|usr/lib/[^/]*-linux-gnu/.*\.so[.0-9]*|usr/lib64/.*"
)
_NAMES_FIRST = "passwd: files\ngroup: files\nhosts: files dns\n"
_WAIT = "trap 'exit 0' TERM INT\nwhile :; do sleep 86400 & wait; done\n"
_PAUSE = f"#!/bin/sh\n{_WAIT}"
_WEBSERVER = (
    f"#!/bin/sh\nhttpd -p 80 -h /usr/share/nginx/html || echo 'port 80 is not to be had' >&2\n{_WAIT}"
)


@dataclass(frozen=True)
class Recipe:
    """One image: which files besides busybox (path → program or text, mode), and its config."""

    programs: Mapping[str, str] = field(default_factory=dict)
    scripts: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    mode: int = 0o755
    nettools: bool = False
    config: Mapping[str, object] = field(default_factory=dict)


RECIPES = {
    "agnhost": Recipe(
        programs={"agnhost": "agnhost", "localhost.crt": "localhost.crt", "localhost.key": "localhost.key"},
        scripts={"etc/nsswitch.conf": _NAMES_FIRST},
        links={"agnhost-2": "agnhost"},
        nettools=True,
        config={"Entrypoint": ["/agnhost"], "Cmd": ["pause"]},
    ),
    "busybox": Recipe(config={"Cmd": ["sh"]}),
    "glibc-dns-testing": Recipe(
        scripts={"etc/nsswitch.conf": _NAMES_FIRST}, nettools=True, config={"Cmd": ["sh"]}
    ),
    "ipc-utils": Recipe(config={"Cmd": ["sh"]}),
    "nonewprivs": Recipe(programs={"usr/local/bin/nnp": "nnp"}, mode=0o6755, config={"Cmd": ["nnp"]}),
    "nonroot": Recipe(config={"User": "1234", "Cmd": ["sh"]}),
    "pause": Recipe(scripts={"pause": _PAUSE}, config={"Entrypoint": ["/pause"]}),
    "nginx": Recipe(scripts={"bin/webserver": _WEBSERVER}, config={"Cmd": ["/bin/webserver"]}),
}


def wanted(listed: str) -> dict[str, str]:
    """reference → recipe, of the references `e2e.test --list-images` printed; those nobody can make are left out."""
    found = {}
    for reference in listed.split():
        repository = reference.rsplit(":", 1)[0]
        name = repository.rsplit("/", 1)[-1]
        if name in RECIPES and repository.startswith("registry.k8s.io/"):
            found[reference] = name
    return found


@dataclass(frozen=True)
class Tools:
    """What every image has besides its own program."""

    busybox: Path
    shell: Mapping[str, bytes]  # bash and its libraries, by their paths in the image
    nettools: Mapping[str, bytes]  # programs that ask the network, and theirs

    @classmethod
    def of(cls, root: Path, nettools: Path) -> Tools:
        """Those of a Debian tree, and those of an image's archive (serverimages.NETTOOLS)."""
        listed = run(["chroot", str(root), "ldd", "/bin/bash"]).stdout
        paths = ["/bin/bash", *re.findall(r"(/\S+) \(0x", listed)]
        return cls(
            root / "usr/bin/busybox",
            {path.lstrip("/"): (root / path[1:]).read_bytes() for path in paths},
            files_of(nettools),
        )


def files_of(nettools: Path) -> dict[str, bytes]:
    """Programs and libraries of an image's archive by their paths; links to a file are the file."""
    with tarfile.open(nettools) as outer, tarfile.open(fileobj=outer.extractfile("layer.tar")) as layer:
        members = [each for each in layer.getmembers() if _NETTOOLS.fullmatch(each.name)]
        # Where a library's link points to is not always beside it.
        return {each.name: found.read() for each in members if (found := _opened(layer, each)) is not None}


def _opened(layer: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes] | None:
    try:
        return layer.extractfile(member)
    except KeyError:
        return None  # a link to nothing


def archive(name: str, built: Built, tools: Tools) -> bytes:
    """The image as a docker archive."""
    layer = _layer(RECIPES[name], built, tools)
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            **RECIPES[name].config,
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    text = json.dumps(config).encode()
    config_name = f"{hashlib.sha256(text).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [], "Layers": ["layer.tar"]}]
    return _tar(
        [(config_name, text, 0o644), ("layer.tar", layer, 0o644),
         ("manifest.json", json.dumps(manifest).encode(), 0o644)]
    )  # fmt: skip


def _layer(recipe: Recipe, built: Built, tools: Tools) -> bytes:
    applets = sorted(set(run([str(tools.busybox), "--list"]).stdout.split()) - {"busybox"})
    files = [
        ("bin/busybox", tools.busybox.read_bytes(), 0o755),
        *((path, data, 0o755) for path, data in tools.shell.items()),
        *((path, data, 0o755) for path, data in (tools.nettools if recipe.nettools else {}).items()),
        ("etc/passwd", _USERS_FILE.encode(), 0o644),
        ("etc/group", _GROUPS_FILE.encode(), 0o644),
        ("usr/share/nginx/html/index.html", b"It works!\n", 0o644),
        *((path, built.program(name), recipe.mode) for path, name in recipe.programs.items()),
        *((path, text.encode(), 0o755) for path, text in recipe.scripts.items()),
    ]
    taken = {name for name, _, _ in files}
    links = {f"bin/{applet}": "busybox" for applet in applets if f"bin/{applet}" not in taken}
    links |= {"usr/local/bin/sh": "/bin/bash", **recipe.links}
    if recipe.nettools:
        # busybox's shell would run its own nc, whatever the PATH says.
        links["bin/sh"] = "bash"
    return _tar(
        files, folders={**dict.fromkeys(_FOLDERS, 0o755), "tmp": 0o1777, "var/tmp": 0o1777}, links=links
    )


def _tar(
    files: Sequence[tuple[str, bytes, int]],
    folders: Mapping[str, int] | None = None,
    links: Mapping[str, str] | None = None,
) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, mode in (folders or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, mode
            tar.addfile(info)
        for name, data, mode in files:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), mode
            tar.addfile(info, io.BytesIO(data))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    return buffer.getvalue()
