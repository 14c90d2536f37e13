"""The text of every configuration file in a testbed. Pure: from a plan to text, so that a test can read it."""

from __future__ import annotations

from slurmlet.testbed.testbed_plan import (
    CPUS_PER_NODE,
    GPUS,
    LOGIN,
    MEMORY_PER_NODE_MB,
    OPT,
    SUBUID_RANGES,
    USER_PATH,
    Plan,
    address_of,
)

CLUSTER = "testbed"
ACCOUNT = "research"
REST_PORT = 6820

_SLURM = f"""\
ClusterName={CLUSTER}
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key=/etc/slurm/jwt.key
SlurmUser=slurm
StateSaveLocation=/var/lib/slurm/ctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=5
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=30
KillWait=5
MinJobAge=300
GresTypes=gpu
"""


# slurmctld refuses a job that none of its nodes could ever run. Where workers may be none at all, nodes that are always down
# tell it what they will look like: as many as a job may ask for at once.
SHAPES = {"small": "CPUs=4 RealMemory=2000", "large": "CPUs=8 RealMemory=4000"}
SHAPE_PREFIX = "shape-"
POWER_FOLDER = f"{OPT}/power"
_DYNAMIC = f"""\
SlurmctldHost={LOGIN}({address_of(LOGIN)})
AuthType=auth/slurm
CredType=cred/slurm
SlurmctldParameters=enable_configless,idle_on_node_suspend
MaxNodeCount=64
TreeWidth=65533
NodeName=cloud-[1-2] CPUs=4 RealMemory=2000 State=CLOUD
PartitionName=cloud Nodes=cloud-[1-2] MaxTime=INFINITE State=UP DefMemPerCPU=100 SuspendTime=8
ResumeProgram={POWER_FOLDER}/resume
SuspendProgram={POWER_FOLDER}/suspend
ResumeTimeout=180
SuspendTimeout=10
"""
# slurmctld cannot run slurmlet on its host: what it asks for is written down, and carried out from outside.
_POWER_PROGRAM = """\
#!/bin/sh
echo "{verb} $1" >> {folder}/requests
"""


def power_programs() -> dict[str, str]:
    """For Slurm's power saving: name of the program → its text."""
    return {verb: _POWER_PROGRAM.format(verb=verb, folder=POWER_FOLDER) for verb in ("resume", "suspend")}


def slurm_conf(plan: Plan) -> str:
    if plan.dynamic:
        shapes = (
            f"NodeName={SHAPE_PREFIX}{name}-[1-8] NodeAddr=127.0.0.1 {shape} Feature={name} State=DOWN Reason=shape\n"
            f"NodeSet={name} Feature={name}\n"
            f"PartitionName={name} Nodes={name} MaxTime=INFINITE State=UP DefMemPerCPU=100\n"
            for name, shape in SHAPES.items()
        )
        names = ",".join(SHAPES)
        every = f"PartitionName=batch Nodes={names} Default=YES MaxTime=INFINITE State=UP DefMemPerCPU=100\n"
        # Tests read records of jobs that ended long ago.
        return _SLURM.replace("MinJobAge=300", "MinJobAge=7200") + _DYNAMIC + "".join(shapes) + every
    nodes = f"c[1-{plan.nodes}]"
    storage = (
        f"AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost={LOGIN}\n"
        # As on most sites; limits of users are none until a test sets one (limits.py).
        "AccountingStorageEnforce=associations,limits,qos\n"
        if plan.accounting
        else ""
    )
    # One real core is shared by many: Slurm is told of more than there are, and jobs ask for little memory by default.
    return (
        _SLURM
        + f"SlurmctldHost={LOGIN}\nAuthType=auth/munge\n"
        + storage
        + "".join(_node(plan, host) for host in plan.compute_hosts)
        + f"PartitionName=batch Nodes={nodes} Default=YES MaxTime=INFINITE State=UP LLN=YES DefMemPerCPU=100\n"
        + f"PartitionName=short Nodes={nodes} MaxTime=10:00 DefaultTime=10:00 State=UP LLN=YES DefMemPerCPU=100\n"
    )


def _node(plan: Plan, host: str) -> str:
    gres = f" Gres=gpu:{GPUS}" if host == plan.gpu_host else ""
    return f"NodeName={host} CPUs={CPUS_PER_NODE} RealMemory={MEMORY_PER_NODE_MB} State=UNKNOWN{gres}\n"


def gres_conf(plan: Plan) -> str:
    if plan.gpu_host is None:
        return "AutoDetect=off\n"
    return f"AutoDetect=off\nNodeName={plan.gpu_host} Name=gpu File=/dev/nvidia[0-{GPUS - 1}]\n"


def cgroup_conf(plan: Plan) -> str:
    """No cgroups: machines with hybrid or v1 cgroups give Slurm nothing to work with."""
    # 22.05 cannot switch them off; its v1 plugin does nothing as long as no other plugin asks it to.
    return f"CgroupPlugin={'cgroup/v1' if plan.slurm == '22.05' else 'disabled'}\n"


def slurmdbd_conf() -> str:
    return f"""\
AuthType=auth/munge
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key=/etc/slurm/jwt.key
DbdHost={LOGIN}
SlurmUser=slurm
LogFile=/var/log/slurm/slurmdbd.log
PidFile=/run/slurmdbd/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StorageLoc=slurm_acct_db
"""


def mariadb_conf() -> str:
    """A database for one small testbed: socket only, and nobody mourns its last second after a crash."""
    return """\
[mariadbd]
user=mysql
datadir=/var/lib/mysql
socket=/run/mysqld/mysqld.sock
pid-file=/run/mysqld/mysqld.pid
log-error=/var/log/mariadb.log
skip-networking
skip-name-resolve
performance_schema=OFF
innodb_buffer_pool_size=64M
innodb_log_file_size=16M
innodb_flush_log_at_trx_commit=0
innodb_doublewrite=OFF
innodb_lock_wait_timeout=900
innodb_fast_shutdown=1
"""


def database_grants() -> str:
    return (
        "CREATE DATABASE IF NOT EXISTS slurm_acct_db;\n"
        "CREATE USER IF NOT EXISTS 'slurm'@'localhost' IDENTIFIED VIA unix_socket;\n"
        "GRANT ALL ON slurm_acct_db.* TO 'slurm'@'localhost';\n"
    )


def etc_hosts(plan: Plan) -> str:
    lines = [
        "127.0.0.1 localhost",
        "::1 localhost ip6-localhost",
        *(f"{address_of(h)} {h}" for h in plan.hosts),
    ]
    return "\n".join(lines) + "\n"


def subids() -> str:
    return "".join(f"{user}:{first}:{count}\n" for user, (first, count) in SUBUID_RANGES.items())


def profile() -> str:
    """For login shells; `testbed exec` sets the same without one (settings.user_environment)."""
    return f"export PATH={USER_PATH}\nexport SLURMLET_UPSTREAM_DIR={OPT}/upstream\n"


def files(plan: Plan) -> dict[str, str]:
    """Everything that goes under /etc of the hosts, readable by all."""
    made = {
        "hosts": etc_hosts(plan),
        "subuid": subids(),
        "subgid": subids(),
        "profile.d/slurmlet.sh": profile(),
        "slurm/slurm.conf": slurm_conf(plan),
        "slurm/cgroup.conf": cgroup_conf(plan),
        "slurm/gres.conf": gres_conf(plan),
        "resolv.conf": "",
    }
    if plan.accounting:
        made["mysql/testbed.cnf"] = mariadb_conf()
        made["mysql/grants.sql"] = database_grants()
    return made
