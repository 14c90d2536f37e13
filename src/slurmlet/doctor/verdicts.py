"""From facts to lines to a verdict. Pure: a table of rules and no I/O.

Each line says what was looked at, what was found, what slurmlet will use, and what is lost without it. Only a line
marked fatal makes slurmlet unusable; it carries the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slurmlet.doctor.findings import ASK, LOGIN, NODE, Line
from slurmlet.doctor.network_verdicts import network_lines
from slurmlet.doctor.site_facts import Facts, Findings

MIN_PYTHON = (3, 9)
MIN_FILES = 4096
MIN_PROCESSES = 512
MIN_SCRATCH_BYTES = 2 << 30
_FIREWALL = (
    f"{ASK} to let compute nodes open TCP connections to this host, or run slurmlet on one that they reach."
)


@dataclass(frozen=True)
class Verdict:
    lines: tuple[Line, ...]

    @property
    def usable(self) -> bool:
        return not any(line.fatal for line in self.lines)

    @property
    def remedies(self) -> list[str]:
        return [f"{line.what}: {line.remedy}" for line in self.lines if line.fatal]

    @property
    def advice(self) -> list[str]:
        """What would make a usable site better."""
        lines = (line for line in self.lines if line.status != "ok" and line.remedy and not line.fatal)
        return [f"{line.what}: {line.remedy}" for line in lines]


def judge(findings: Findings) -> Verdict:
    lines: list[Line] = []
    if not findings.only_here:
        lines += _slurm(findings)
        if findings.here is not None:
            lines += _login_host(findings.here)
        lines.append(_binaries(findings.binaries))
    if findings.node is not None:
        lines += _node(findings.node, findings.binaries)
    elif not findings.missing_commands and not findings.slurm_problem:
        lines.append(_no_node(findings))
    return Verdict(tuple(lines))


def _slurm(findings: Findings) -> Iterator[Line]:
    uses, without = "sbatch, squeue, scancel, sinfo", "no pods at all"
    if findings.missing_commands:
        yield Line(
            LOGIN, "Slurm", "missing", f"no {', '.join(findings.missing_commands)} in PATH", uses, without,
            "Run slurmlet on a host with Slurm's commands (a login node), or run `module load slurm` first.",
            fatal=True,
        )  # fmt: skip
        return
    if findings.slurm_problem:
        yield Line(
            LOGIN, "Slurm", "missing", findings.slurm_problem, uses, without,
            "slurmctld does not answer: try again later, or check SLURM_CONF.", fatal=True,
        )  # fmt: skip
        return
    config = findings.slurm_config
    yield Line(LOGIN, "Slurm", "ok", config.get("SLURM_VERSION", "?"), uses, without)
    yield from _plugins(config)
    if (problem := findings.at_once_problem) is not None:
        yield Line(
            LOGIN, "immediate start", "degraded" if problem else "ok", problem or "yes",
            "sbatch only" if problem else "srun, and Slurm's library for a job's exit code",
            "a pod starts up to a second later, as every batch job does",
        )  # fmt: skip


def _plugins(config: Mapping[str, str]) -> Iterator[Line]:
    select = config.get("SelectType", "?")
    shares = "cons" in select
    yield Line(
        LOGIN, "select plugin", "ok" if shares else "degraded", select,
        "jobs of single cores" if shares else "whole nodes", "each pod takes a whole node",
    )  # fmt: skip
    tracking = config.get("ProctrackType", "?")
    by_cgroup = "cgroup" in tracking
    yield Line(
        LOGIN, "proctrack plugin", "ok" if by_cgroup else "degraded", tracking,
        "Slurm's limits on the job" if by_cgroup else "a PID namespace ends every process of a pod",
        "memory limits of pods are not enforced",
    )  # fmt: skip
    yield Line(LOGIN, "auth plugin", "ok", config.get("AuthType", "?"), "as Slurm's commands do", "-")
    accounting = config.get("AccountingStorageType", "?")
    kept = accounting not in ("?", "(null)", "accounting_storage/none")
    yield Line(
        LOGIN, "accounting", "ok" if kept else "degraded", accounting,
        "sacct, for jobs that ended while the hub was down" if kept else "slurmctld's record of recent jobs",
        "after MinJobAge the end of a job is unknown",
    )  # fmt: skip


def _login_host(here: Facts) -> Iterator[Line]:
    yield Line(LOGIN, "kernel", "ok", _kernel(here), "-", "-")
    yield Line(LOGIN, "Python", "ok", _version(here), str(here.get("python_path", "python")), "no slurmlet")
    yield _limits(here, LOGIN, "etcd, the API server and the hub", "a burst of many pods fails")
    compiler = str(here.get("compiler", ""))
    yield Line(
        LOGIN, "C compiler", "ok" if compiler else "degraded", compiler or "none", "pods' new connections in C",
        "new connections of pods are handled in Python and take several times longer; throughput is the same",
        "" if compiler else "Have a C compiler (cc) in PATH the first time you run `slurmlet up`.",
    )  # fmt: skip
    problem = str(here.get("user_namespace", ""))
    yield Line(
        LOGIN,
        "user namespaces",
        "degraded" if problem else "ok",
        problem or "yes",
        "not needed on this host",
        "nothing on this host",
    )


def _binaries(binaries: Mapping[str, str]) -> Line:
    missing = [name for name, path in binaries.items() if not path]
    found = f"{len(binaries) - len(missing)} of {len(binaries)}"
    return Line(
        LOGIN, "Kubernetes binaries", "degraded" if missing else "ok",
        f"{found} (missing: {', '.join(missing)})" if missing else found,
        "binaries provided by `slurmlet upstream`", "`slurmlet up` downloads or builds them first",
    )  # fmt: skip


def _no_node(findings: Findings) -> Line:
    if findings.node_timed_out:
        return Line(
            NODE, "compute node", "degraded", "not checked: no node became free in time", "-",
            "nothing is known about compute nodes",
            "Run it again when the queue is shorter, or choose a partition: slurmlet doctor --partition NAME",
        )  # fmt: skip
    problem = findings.node_problem
    if "execve" in problem and "python3" in problem:
        return _python_line("no python3", ok=False)
    return Line(
        NODE, "compute node", "missing", problem, "a job for each pod", "no pods at all",
        "Check that `srun -n1 true` works, or choose a partition: slurmlet doctor --partition NAME", fatal=True,
    )  # fmt: skip


def _node(node: Facts, binaries: Mapping[str, str]) -> Iterator[Line]:
    yield Line(NODE, "host", "ok", f"{node.get('host', '?')} ({node.get('machine', '?')})", "-", "-")
    yield Line(NODE, "kernel", "ok", _kernel(node), "-", "-")
    version = tuple(node.get("python") or ())
    yield _python_line(_version(node), ok=version >= MIN_PYTHON)
    yield _user_namespace(node)
    yield _subuids(node)
    yield from _root_file_systems(node)
    yield from network_lines(node)
    yield _runtime(node, binaries)
    yield _scratch(node)
    yield _limits(node, NODE, "the containers", "pods with many processes fail")
    yield from _between(node)


def _python_line(found: str, *, ok: bool) -> Line:
    return Line(
        NODE, "Python", "ok" if ok else "missing", found, "python3, for the runner in each job", "no pods at all",
        "" if ok else "Compute nodes need python3 ≥ 3.9 on the PATH of batch jobs (`module load`, or your own in ~/bin).",
        fatal=not ok,
    )  # fmt: skip


def _user_namespace(node: Facts) -> Line:
    problem = str(node.get("user_namespace", "not tried"))
    return Line(
        NODE, "user namespaces", "missing" if problem else "ok", problem or "yes", "a sandbox for each pod",
        "no pods at all",
        f"{ASK} for unprivileged user namespaces on compute nodes (sysctl user.max_user_namespaces > 0; on Debian and "
        "Ubuntu also kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0)."
        if problem else "",
        fatal=bool(problem),
    )  # fmt: skip


def _subuids(node: Facts) -> Line:
    facts: Mapping[str, Any] = node.get("subuids") or {}
    count, problem = int(facts.get("count", 0)), str(facts.get("problem", ""))
    works = count > 0 and not problem
    found = f"{count} ids" if works else problem or "none for you in /etc/subuid"
    return Line(
        NODE, "subordinate uids", "ok" if works else "degraded", found,
        "newuidmap: several users in a container" if works else "one uid; chown reports success without effect",
        "containers with several users see only one",
    )  # fmt: skip


def _root_file_systems(node: Facts) -> Iterator[Line]:
    scratch: Mapping[str, Any] = node.get("scratch") or {}
    problem = str(scratch.get("overlay", "not tried"))
    fuse = not node.get("fuse") and bool(node.get("fuse_overlayfs"))
    instead = "fuse-overlayfs" if fuse else "a copy of the image for each container"
    yield Line(
        NODE, "overlay", "degraded" if problem else "ok", problem or "yes",
        instead if problem else "the kernel's overlay in a user namespace",
        "containers start more slowly and use more disk space",
    )  # fmt: skip
    trouble = str(node.get("fuse", "not tried"))
    found = trouble or (
        f"yes, {node['fuse_overlayfs']}" if node.get("fuse_overlayfs") else "yes, but no fuse-overlayfs"
    )
    yield Line(
        NODE, "FUSE", "ok" if fuse or not problem else "degraded", found,
        "fuse-overlayfs" if fuse and problem else "not needed, overlay works" if not problem else "-",
        "no fallback when overlay fails",
    )  # fmt: skip


def _runtime(node: Facts, binaries: Mapping[str, str]) -> Line:
    found: Mapping[str, str] = node.get("runtimes") or {}
    own = bool(binaries.get("runc"))
    working = {name: version for name, version in found.items() if version != "does not start"}
    uses = (
        "crun" if "crun" in working else "slurmlet's own runc" if own else "runc" if "runc" in working else ""
    )
    shown = ", ".join(f"{name} {version}" for name, version in found.items()) or "none on the node"
    return Line(
        NODE, "container runtime", "ok" if uses else "missing", shown, uses or "-", "no pods at all",
        "" if uses else "Run `slurmlet upstream`: it provides a static runc that needs no installation on compute nodes.",
        fatal=not uses,
    )  # fmt: skip


def _scratch(node: Facts) -> Line:
    facts: Mapping[str, Any] = node.get("scratch") or {}
    path, free_bytes, problem = (
        str(facts.get("path", "")),
        int(facts.get("free_bytes", 0)),
        str(facts.get("problem", "")),
    )
    found = f"{path}, {free_bytes / 2**30:.1f} GiB free" if path else "none"
    if problem:
        found = f"{found}; {problem}"
    good = bool(path) and not problem and free_bytes >= MIN_SCRATCH_BYTES
    return Line(
        NODE, "scratch", "ok" if good else "degraded" if path else "missing", found,
        "unpacked images, emptyDir, writable layers", "large images do not fit; set TMPDIR for jobs",
    )  # fmt: skip


def _limits(facts: Facts, where: str, uses: str, without: str) -> Line:
    limits: Mapping[str, list[int]] = facts.get("limits") or {}
    # Hard limits: Go programs raise their own soft ones. -1 means no limit.
    files, processes = (limits.get(name, [0, 0])[1] for name in ("nofile", "nproc"))
    good = (files < 0 or files >= MIN_FILES) and (processes < 0 or processes >= MIN_PROCESSES)
    shown = [str(value) if value >= 0 else "unlimited" for value in (files, processes)]
    return Line(
        where,
        "limits",
        "ok" if good else "degraded",
        f"{shown[0]} files, {shown[1]} processes",
        uses,
        without,
    )


def _between(node: Facts) -> Iterator[Line]:
    """Lines about login host and node together; absent when there was no login host (--node)."""
    home = node.get("home")
    if home is not None:
        problem = str(home.get("problem", ""))
        yield Line(
            NODE, "shared home", "missing" if problem else "ok", problem or "same content on both", "state, images, logs",
            "no pods at all",
            "Set SLURMLET_HOME to a directory that login and compute nodes share (scratch, project)." if problem else "",
            fatal=bool(problem),
        )  # fmt: skip
    login = node.get("login")
    if login is not None:
        problem = str(login.get("problem", ""))
        yield Line(
            NODE, "connection to the login host", "missing" if problem else "ok",
            problem or f"{login.get('address')} in {login.get('milliseconds')} ms",
            "one TLS connection from each pod to the hub", "no pods at all",
            _FIREWALL if problem else "", fatal=bool(problem),
        )  # fmt: skip


def _kernel(facts: Facts) -> str:
    return str(facts.get("kernel", "?"))


def _version(facts: Facts) -> str:
    return ".".join(str(part) for part in facts.get("python") or ()) or "?"
