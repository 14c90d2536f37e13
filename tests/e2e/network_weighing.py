"""What a pod's processes and the cluster's weigh: descriptors, threads, memory; read from /proc, never asked of them."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from slurmlet.testbed.hosts import Testbed

# Of processes whose command line has the word: pid, name, descriptors (those of processes apart), threads, KiB that are
# theirs alone.
_WEIGH = """
import json, os, sys
found = []
for entry in filter(str.isdigit, os.listdir("/proc")):
    try:
        line = open(f"/proc/{entry}/cmdline", "rb").read().replace(b"\\0", b" ").decode(errors="replace")
        if sys.argv[1] not in line or int(entry) == os.getpid():
            continue
        status = dict(one.split(":", 1) for one in open(f"/proc/{entry}/status").read().splitlines())
        fds = [os.readlink(f"/proc/{entry}/fd/{fd}") for fd in os.listdir(f"/proc/{entry}/fd")]
        handles = sum("pidfd" in fd for fd in fds)
        rest = [handles, int(status["Threads"]), int(status["RssAnon"].split()[0])]
        found.append([int(entry), status["Name"].strip(), len(fds) - handles, *rest])
    except (OSError, KeyError):
        continue
print(json.dumps(found))
"""
NETD = "slurmlet-netd"


class Weight(NamedTuple):
    pid: int
    name: str
    fds: int
    # Descriptors of processes: netd keeps those of the latest it has served, dead or alive.
    handles: int
    threads: int
    memory_kib: int


def weigh(testbed: Testbed, host: str, word: str) -> list[Weight]:
    said = testbed.run(["python3", "-c", _WEIGH, word], host=host, user="root").stdout
    return [Weight(*each) for each in json.loads(said)]


def of_pod(testbed: Testbed, host: str, pod: Any) -> dict[str, Weight]:
    """netd and the runner of a pod. The runner is two processes; the first only waits for the second."""
    found = weigh(testbed, host, f"/pods/{pod['metadata']['uid']}")
    (netd,) = [each for each in found if each.name == NETD]
    runner = max((each for each in found if each.name != NETD), key=lambda each: each.fds)
    return {"netd": netd, "runner": runner}


def of_components(testbed: Testbed, root: str) -> dict[str, Weight]:
    """Hub and gateway of the cluster whose directory is `root`."""
    named = {name: weigh(testbed, "login", f"-m slurmlet.{name} {root}") for name in ("hub", "gateway")}
    return {name: each[0] for name, each in named.items()}
