"""Slurm's accounting database: made once, kept in the cache as files, copied into each new testbed.

Making one (schema, cluster, account, users) takes about ten seconds, a copy takes a tenth of one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import locked
from slurmlet.base.processes import run
from slurmlet.testbed.config_files import ACCOUNT, CLUSTER, database_grants, mariadb_conf, slurmdbd_conf
from slurmlet.testbed.daemons import Daemons
from slurmlet.testbed.host_namespaces import enter_argv
from slurmlet.testbed.rootfs import remove_tree, root_key
from slurmlet.testbed.testbed_plan import USERS, Paths, Plan

_KEY_FILE = "testbed-key"
_ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/"}


def template_key(plan: Plan) -> str:
    said = "\0".join(
        [root_key(plan), mariadb_conf(), database_grants(), slurmdbd_conf(), CLUSTER, ACCOUNT, *USERS]
    )
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def prepare(paths: Paths, plan: Plan, daemons: Daemons) -> None:
    """Give the host a database directory, from the cache or made now; leaves one that is there alone."""
    data = paths.host_dir(daemons.host) / "mysql"
    if any(data.iterdir()):
        return
    template = paths.database(plan)
    with locked(paths.suite(plan) / "mariadb.lock"):
        if not _is_ready(template, plan):
            _make(paths, plan, daemons, data)
            return
    run(["cp", "-a", "--reflink=auto", "--", f"{template}/.", str(data)], timeout_s=120)


def _is_ready(template: Path, plan: Plan) -> bool:
    try:
        return (template / _KEY_FILE).read_text() == template_key(plan)
    except OSError:
        return False


def _make(paths: Paths, plan: Plan, daemons: Daemons, data: Path) -> None:
    # By copying at rest: a copy of running InnoDB files would be a crashed database each time.
    _inside(daemons, ["chown", "mysql:", "/var/lib/mysql"])
    _inside(
        daemons,
        ["mariadb-install-db", "--defaults-file=/etc/mysql/testbed.cnf", "--user=mysql", "--skip-test-db",
         "--auth-root-authentication-method=socket"],
    )  # fmt: skip
    daemons.start("mariadb")
    daemons.start("slurmdbd")
    _inside(daemons, ["sacctmgr", "--immediate", "add", "cluster", CLUSTER])
    _inside(
        daemons,
        ["sacctmgr", "--immediate", "add", "account", ACCOUNT, "Description=testbed", "Organization=testbed"],
    )
    _inside(daemons, ["sacctmgr", "--immediate", "add", "user", ",".join(USERS), f"Account={ACCOUNT}"])
    daemons.stop("slurmdbd")
    daemons.stop("mariadb")
    template = paths.database(plan)
    building = template.with_name("mariadb.building")
    for old in (building, template):
        if old.exists():
            remove_tree(old)
    run(["cp", "-a", "--reflink=auto", "--", str(data), str(building)], timeout_s=120)
    (building / _KEY_FILE).write_text(template_key(plan))
    building.rename(template)


def _inside(daemons: Daemons, argv: list[str]) -> None:
    done = run(enter_argv(daemons.init, "root", argv), env=_ENV, timeout_s=120, check=False)
    if not done.ok:
        raise SlurmletError(
            f"{argv[0]} failed while the accounting database was made: {(done.stderr or done.stdout).strip()}"
        )
