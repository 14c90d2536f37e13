"""`up` and `down`: from nothing, from a crash or from a running testbed to exactly what was asked for.

`up` converges: what runs stays, what is missing is started, what belongs to another plan is taken down first. `down`
ends every host, removes all that belonged to them and reports as an error whatever it could not remove.
"""

from __future__ import annotations

import os
import secrets
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from slurmlet.base.console import Steps
from slurmlet.base.errors import SiteError, SlurmletError
from slurmlet.base.files import locked, private_dir, write_json
from slurmlet.base.processes import run
from slurmlet.testbed import accounting_db, bridge, busybox_images, host_namespaces, rootfs, user_install
from slurmlet.testbed.config_files import files, power_programs, slurmdbd_conf
from slurmlet.testbed.daemons import Daemons, accounts, missing
from slurmlet.testbed.hosts import Testbed, recorded_plan, require_root
from slurmlet.testbed.testbed_plan import NAME_VARIABLE, SWITCH, USERS, Paths, Plan

_NODES_LIMIT_S = 60


@dataclass(frozen=True)
class Outcome:
    already_up: bool
    installed: bool
    elapsed_s: float


def up(plan: Plan, *, paths: Paths | None = None, quiet: bool = False) -> Outcome:
    """Bring the testbed up (or mend it). Returns when every node is idle and slurmlet is installed for its users."""
    require_root()
    where = paths or Paths.default()
    private_dir(where.base)
    steps = Steps(quiet=quiet)
    with locked(where.lock):
        if not rootfs.is_ready(where, plan):
            _clear(where)
            _refuse_neighbours(where)
            rootfs.ensure_root(where, plan, steps)
        if recorded_plan(where) != plan:
            _clear(where)
        changed = _converge(where, plan, steps)
        return Outcome(not changed.started, changed.installed, steps.elapsed_s())


def _refuse_neighbours(paths: Paths) -> None:
    """A new root takes the place of the old one, which must not be in use."""
    names = sorted(host_namespaces.neighbours(paths))
    if names:
        raise SiteError(
            f"the hosts' root file system must be rebuilt, but another testbed uses it: {', '.join(names)}",
            hint=f"Take it down first: {NAME_VARIABLE}={names[0]} slurmlet testbed down",
        )


@dataclass(frozen=True)
class _Changes:
    started: bool
    installed: bool


def _converge(paths: Paths, plan: Plan, steps: Steps) -> _Changes:
    fresh = recorded_plan(paths) is None
    if fresh:
        _prepare(paths, plan)
    if plan.dynamic:
        return _converge_dynamic(paths, plan, steps)
    linked = user_install.link_upstream(paths)
    user_install.lay_library_ready(paths)
    with _quick(steps, "Booting hosts", not fresh):
        booted = _boot_missing(paths, plan)
    with ThreadPoolExecutor(max_workers=plan.nodes + 3) as pool:
        # Meanwhile, and quietly: two spinners do not share a terminal.
        installing_it = pool.submit(user_install.install, paths, plan)
        started = _start_services(paths, plan, pool, steps)
        if started or booted:
            with steps.step("Waiting for Slurm's nodes"):
                _await_nodes(Testbed(paths, plan))
        with _quick(steps, "Installing slurmlet for the testbed's users", installing_it.done()):
            installed = installing_it.result()
    write_json(paths.plan, {"plan": plan.as_json(), "complete": True})
    return _Changes(bool(started or booted), installed or linked)


def _converge_dynamic(paths: Paths, plan: Plan, steps: Steps) -> _Changes:
    """Slurm's controller alone; nobody uses slurmlet on its hosts, so none is installed."""
    booted = _boot_missing(paths, plan)
    with ThreadPoolExecutor(max_workers=2) as pool:
        started = _start_services(paths, plan, pool, steps)
    write_json(paths.plan, {"plan": plan.as_json(), "complete": True})
    return _Changes(bool(started or booted), False)


def _quick(steps: Steps, title: str, nothing_to_tell: bool) -> AbstractContextManager[None]:
    return nullcontext() if nothing_to_tell else steps.step(title)


def _prepare(paths: Paths, plan: Plan) -> None:
    """All files of a new testbed, before any host runs."""
    private_dir(paths.run)
    write_json(paths.plan, {"plan": plan.as_json(), "complete": False})
    for folder in (
        paths.home,
        paths.opt,
        paths.opt / "venv",
        paths.opt / "wheels",
        paths.opt / "upstream",
        paths.opt / "images",
    ):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
    private_dir(paths.hosts)
    for user, uid in USERS.items():
        home = private_dir(paths.home / user)
        os.chown(home, uid, uid)
    _write_etc(paths, plan)
    if plan.dynamic:
        _write_power_programs(paths)


def _write_power_programs(paths: Paths) -> None:
    folder = paths.opt / "power"
    folder.mkdir()
    for name, text in power_programs().items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "requests").touch()
    os.chown(folder / "requests", *accounts(paths.etc)["slurm"])


def _write_etc(paths: Paths, plan: Plan) -> None:
    run(["cp", "-a", "--", str(paths.root(plan) / "etc"), str(paths.etc)])
    for name, text in files(plan).items():
        target = paths.etc / name
        target.unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(0o644)
    known = accounts(paths.etc)
    secret_files = {
        "munge/munge.key": ("munge", secrets.token_bytes(128)),
        "slurm/jwt.key": ("slurm", secrets.token_bytes(32)),
        "slurm/slurmdbd.conf": ("slurm", slurmdbd_conf().encode()),
    }
    if plan.dynamic:
        secret_files["slurm/slurm.key"] = ("slurm", secrets.token_bytes(1024))
    for name, (owner, data) in secret_files.items():
        target = paths.etc / name
        target.unlink(missing_ok=True)
        target.touch(mode=0o600)
        target.write_bytes(data)
        os.chown(target, *known[owner])


def _boot_missing(paths: Paths, plan: Plan) -> list[str]:
    """Boot the hosts that are off, and connect all of them."""
    names = [SWITCH, *plan.hosts]
    off = [name for name in names if host_namespaces.find_init(paths, name) is None]
    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(lambda name: host_namespaces.boot(paths, plan, name), off))
    inits = {name: init for name in names if (init := host_namespaces.find_init(paths, name)) is not None}
    switch = inits.pop(SWITCH)
    bridge.make_switch(switch)
    bridge.plug(switch, inits)
    return off


def _start_services(paths: Paths, plan: Plan, pool: ThreadPoolExecutor, steps: Steps) -> bool:
    """Start what does not run. Hosts in parallel, the daemons of one host in order."""
    beds = {host: init for host in plan.hosts if (init := host_namespaces.find_init(paths, host)) is not None}
    todo = {host: absent for host, init in beds.items() if (absent := missing(plan, host, init))}
    if not todo:
        return False
    with steps.step("Starting " + ("Slurm" if len(todo) == len(beds) else ", ".join(todo))):
        waiting: list[Future[None]] = [
            pool.submit(start_on, paths, plan, host, beds[host], todo[host]) for host in todo
        ]
        for future in waiting:
            future.result()
    return True


def start_on(
    paths: Paths, plan: Plan, host: str, init: host_namespaces.Init, services: tuple[str, ...]
) -> None:
    daemons = Daemons(paths, host, init)
    for service in services:
        if service == "mariadb":
            accounting_db.prepare(paths, plan, daemons)
        daemons.start(service)
        if service == "registry":
            busybox_images.publish(paths, plan, init)


def _await_nodes(bed: Testbed) -> None:
    wanted = set(bed.plan.compute_hosts)

    def ready() -> bool:
        done = bed.run(
            ["sinfo", "--noheader", "--Node", "--format=%N %T"], user="root", check=False, timeout_s=10
        )
        states = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
        # A star means "does not answer". A node somebody drained is none of our business.
        return {
            n for n, state in states.items() if not (state.endswith("*") or state.startswith(("down", "unk")))
        } >= wanted

    host_namespaces.wait_until(ready, _NODES_LIMIT_S, "all nodes to be idle", pause_s=0.05)


def down(*, paths: Paths | None = None) -> bool:
    """Take the testbed away; whether there was anything to take. The cached root and downloads stay."""
    require_root()
    where = paths or Paths.default()
    if not where.base.exists():
        return False
    with locked(where.lock):
        return _clear(where)


def _clear(paths: Paths) -> bool:
    # The mark finds every host of ours, also those whose record was never written or was lost.
    found = host_namespaces.strays(paths)
    existed = bool(found) or paths.run.exists()
    host_namespaces.end(found)
    remains = host_namespaces.leftovers(paths)
    if remains:
        raise SlurmletError(
            f"the testbed left behind: {', '.join(remains)}",
            hint="Run `slurmlet testbed down` again; if it persists, look for processes stuck in the kernel (state D).",
            reason="Leftovers",
        )
    if paths.run.exists():
        rootfs.remove_tree(paths.run)
    return existed


def reinstall(*, paths: Paths | None = None, quiet: bool = False) -> bool:
    """Make slurmlet and the upstream binaries in the running testbed those of now; whether anything changed."""
    bed = Testbed.running(paths)
    with locked(bed.paths.lock):
        linked = user_install.link_upstream(bed.paths)
        user_install.lay_library_ready(bed.paths)
        with Steps(quiet=quiet).step("Installing slurmlet for the testbed's users"):
            return user_install.install(bed.paths, bed.plan) or linked
