"""The root file system of all hosts: a Debian made by debootstrap and apt, kept in the cache.

A root is complete or absent: it is made under a temporary name, its key is the last thing written into it, and only
then it takes its place. Must never change packages of the machine, but for debootstrap where it is missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from slurmlet.base.console import Steps
from slurmlet.base.errors import SiteError
from slurmlet.base.files import locked
from slurmlet.base.processes import Completed, run
from slurmlet.testbed.testbed_plan import USERS, Paths, Plan

PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurmdbd", "slurm-wlm-mysql-plugin", "mariadb-server"),
    *("slurmrestd", "slurm-wlm-jwt-plugin", "munge"),
    *("crun", "uidmap", "fuse-overlayfs", "fuse3", "python3", "python3-venv", "busybox-static"),
    *(
        "tini",
        "iproute2",
        "iputils-ping",
        "procps",
        "psmisc",
        "curl",
        "ca-certificates",
        "less",
        "nano",
        "strace",
    ),
)
# Raise it when the steps below change the result.
RECIPE = 1
KEY_FILE = "etc/slurmlet-testbed-root"
_BUILD_LIMIT_S = 1800
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_NO_DOCS = "\n".join(
    [
        "force-unsafe-io",
        *(f"path-exclude=/usr/share/{d}/*" for d in ("doc", "man", "locale", "info", "lintian")),
    ]
)


def root_key(plan: Plan) -> str:
    said = json.dumps([RECIPE, plan.suite, sorted(PACKAGES), USERS], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def is_ready(paths: Paths, plan: Plan) -> bool:
    try:
        return (paths.root(plan) / KEY_FILE).read_text().strip() == root_key(plan)
    except OSError:
        return False


def ensure_root(paths: Paths, plan: Plan, steps: Steps) -> Path:
    """The ready root, made first where there is none (or one of other packages). Takes a minute or two then."""
    root = paths.root(plan)
    root.parent.mkdir(parents=True, exist_ok=True)
    with locked(root.parent / "root.lock"):
        if is_ready(paths, plan):
            return root
        for leftover in root.parent.glob("root.*-[0-9]*"):
            remove_tree(leftover)
        building, cache = root.with_name(f"root.building-{os.getpid()}"), _deb_cache(paths)
        with steps.step(f"Making the hosts' root file system: Debian {plan.suite}"):
            _debootstrap(plan.suite, building, cache)
        with steps.step(f"Making the hosts' root file system: Slurm {plan.slurm} and what it needs"):
            _install_packages(building, cache)
            _make_users(building)
        (building / KEY_FILE).write_text(root_key(plan) + "\n")
        if root.exists():
            root.rename(root.with_name(f"root.old-{os.getpid()}"))
        building.rename(root)
        for leftover in root.parent.glob("root.old-*"):
            remove_tree(leftover)
    return root


def remove_tree(path: Path) -> None:
    """rm -r that refuses to descend into anything still mounted below."""
    run(["rm", "-rf", "--one-file-system", "--", str(path)], timeout_s=300)


def _deb_cache(paths: Paths) -> Path:
    cache = paths.base / "downloads"
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def _debootstrap(suite: str, target: Path, cache: Path) -> None:
    _ensure_debootstrap()
    mirror = machine_mirror()
    argv = [
        "debootstrap",
        "--variant=minbase",
        "--include=ca-certificates",
        f"--cache-dir={cache}",
        suite,
        str(target),
    ]
    _run_quietly([*argv, *([mirror] if mirror else [])], "debootstrap")


def _ensure_debootstrap() -> None:
    if shutil.which("debootstrap") and _KEYRING.exists():
        return
    if shutil.which("apt-get") is None:
        raise SiteError(
            "debootstrap is missing", hint="Install debootstrap and Debian's archive keyring, then try again."
        )
    _run_quietly(["apt-get", "-qq", "update"], "apt-get update")
    wanted = ["debootstrap", "debian-archive-keyring"]
    _run_quietly(
        ["apt-get", "-qq", "-y", "install", "--no-install-recommends", *wanted], "apt-get install debootstrap"
    )


def machine_mirror() -> str | None:
    """The Debian mirror this machine itself uses, or None (then debootstrap takes its own default)."""
    if shutil.which("apt-get") is None:
        return None
    argv = [
        "apt-get",
        "indextargets",
        "--format",
        "$(SITE)",
        "Created-By: Packages",
        "Origin: Debian",
        "Label: Debian",
    ]
    said = run(argv, check=False).stdout.split()
    return said[0] if said else None


def _install_packages(root: Path, cache: Path) -> None:
    (root / "etc/dpkg/dpkg.cfg.d/testbed").write_text(_NO_DOCS + "\n")
    # Services are started by the testbed, never by a package's script.
    policy = root / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    shutil.copyfile("/etc/resolv.conf", root / "etc/resolv.conf")
    archives = root / "var/cache/apt/archives"
    for package in cache.glob("*.deb"):
        _link_or_copy(package, archives / package.name)
    options = ["-qq", "-o", "Dpkg::Use-Pty=0", *_proxy_options()]
    chroot(root, ["apt-get", *options, "update"])
    chroot(root, ["apt-get", *options, "install", "-y", "--no-install-recommends", *PACKAGES])
    for package in archives.glob("*.deb"):
        if not (cache / package.name).exists():
            _link_or_copy(package, cache / package.name)
    chroot(root, ["apt-get", "clean"])
    (root / "etc/resolv.conf").write_text("")
    remove_tree(root / "var/lib/mysql")


def _proxy_options() -> list[str]:
    said = run(
        ["apt-config", "dump", "--format", "%f=%v%n", "Acquire::http::Proxy", "Acquire::https::Proxy"],
        check=False,
    )
    return [part for line in said.stdout.split() if not line.endswith("=") for part in ("-o", line)]


def _make_users(root: Path) -> None:
    for user, uid in USERS.items():
        chroot(
            root,
            ["useradd", "--no-create-home", "--shell", "/bin/bash", "--uid", str(uid), "--user-group", user],
        )
    for service in ("registry", "restd"):
        chroot(
            root,
            [
                "useradd",
                "--system",
                "--no-create-home",
                "--shell",
                "/usr/sbin/nologin",
                "--user-group",
                service,
            ],
        )
    for needed in ("home", "opt/slurmlet", "var/lib/slurm", "var/lib/mysql", "etc/slurm"):
        (root / needed).mkdir(parents=True, exist_ok=True)
    # useradd gives everybody a subuid range; who has one is the testbed's decision (configuring.py).
    for name in ("etc/subuid", "etc/subgid"):
        (root / name).write_text("")


def chroot(root: Path, argv: Sequence[str]) -> Completed:
    """Run argv in the root, in namespaces of its own: what a package script leaves running or mounted dies with it."""
    inside = [
        "unshare",
        "--mount",
        "--pid",
        "--ipc",
        "--uts",
        "--fork",
        "--kill-child",
        f"--mount-proc={root}/proc",
    ]
    return _run_quietly([*inside, "chroot", str(root), *argv], argv[0])


def _run_quietly(argv: Sequence[str], what: str) -> Completed:
    keep = {k: v for k, v in os.environ.items() if k.lower().endswith("_proxy")}
    env = {
        **keep,
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C.UTF-8",
        "DEBIAN_FRONTEND": "noninteractive",
    }
    done = run(argv, timeout_s=_BUILD_LIMIT_S, env=env, check=False)
    if not done.ok:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise SiteError(
            f"{what} failed ({done.code}) while building the testbed's root file system:\n{said}",
            hint="Check that the Debian mirror is reachable (apt-get update), then run `slurmlet testbed up` again.",
        )
    return done


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
