"""One pod for each host, so that pods which listen on the same port do not meet.

Many specs have hostPorts, or pods on the host's network with fixed ports. A Slurm host of one CPU takes one pod, and ports
below 1024 are free for everybody there. Only for a testbed that is the suite's own.
"""

from __future__ import annotations

import re

from slurmlet.base.errors import UserError
from slurmlet.testbed.hosts import Testbed
from slurmlet.testbed.testbed_plan import DEFAULT_NAME, NAME_VARIABLE

_LOWEST_PORT = "/proc/sys/net/ipv4/ip_unprivileged_port_start"


def spread(bed: Testbed) -> None:
    if bed.paths.name == DEFAULT_NAME:
        raise UserError(
            "the conformance suite changes its testbed and needs one of its own",
            hint=f"Use `make conformance`, or set {NAME_VARIABLE}=run-conformance.",
        )
    config = bed.paths.etc / "slurm" / "slurm.conf"
    text = config.read_text()
    if (small := one_cpu_each(text)) != text:
        config.write_text(small)
        bed.run(["scontrol", "reconfigure"], user="root")
    for host in bed.plan.compute_hosts:
        bed.run(["tee", _LOWEST_PORT], host=host, user="root", stdin="0\n")


def one_cpu_each(config: str) -> str:
    return re.sub(r"^(NodeName=.*\bCPUs=)\d+", r"\g<1>1", config, flags=re.MULTILINE)
