"""Brings the control plane of a run up on its first host, and an agent beside it.

The same components, keys and supervisor as `slurmlet up`; only their directory is another one, and no partition becomes a
node. Credentials for the other hosts are laid down as soon as their key exists, long before the API server answers.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from slurmlet.base.console import say
from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import private_dir
from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane.cluster_config import ClusterConfig
from slurmlet.model.allocation_node import node_name
from slurmlet.upstream.binary_versions import version_of

_PR_SET_PDEATHSIG = 1
_TAIL_LINES = 15


class Progress:
    """Progress lines with times on a terminal, none in a pipe."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._began_s = time.monotonic()

    def tell(self, what: str) -> None:
        if self._shown:
            say(f"  {time.monotonic() - self._began_s:5.2f} s  {what}")


def prepare(files: ClusterFiles, binaries: Path, *, encrypt: bool = False) -> ClusterConfig:
    """Everything that the components read."""
    from slurmlet.base import host_addresses
    from slurmlet.controlplane import address_ranges, kubeconfigs, network_config, pki, scheduler_config
    from slurmlet.controlplane import cluster_config as configs
    from slurmlet.controlplane.run_files import make_dirs

    make_dirs(files)
    addresses = host_addresses.host_addresses()
    config = configs.decide(
        files,
        kubernetes=version_of(binaries / "kube-apiserver"),
        host=host_addresses.host_name(),
        addresses=addresses,
        api_address=host_addresses.advertised_address(addresses),
        partitions=(),
        ranges=address_ranges.choose(host_addresses.routed_networks(), address_ranges.Wanted()),
        encrypt=encrypt,
    )
    config = dataclasses.replace(config, partitions=(), ephemeral=True)
    pki.ensure(files.pki, pki.leaves(config.host, addresses, config.service_range, encrypt=encrypt))
    config.save(files)
    kubeconfigs.write_all(files, config)
    network_config.write_all(files, config)
    scheduler_config.write(files)
    return config


def equip_hosts(files: ClusterFiles, hosts: Sequence[str]) -> None:
    """Lay down what agents need. Their credentials come last: they wait for those."""
    from slurmlet.controlplane.runner_archive import write_runner
    from slurmlet.hub import hub_settings
    from slurmlet.hub.runner_credentials import NODE_NAME_PREFIX, RunnerAuthority
    from slurmlet.upstream import static_runc
    from slurmlet.upstream.netfast_build import write_library

    write_runner(files.runner)
    write_library(files.libraries)
    static_runc.write_for_this_host(files.libraries)
    authority = RunnerAuthority(hub_settings.load(files.root))
    private_dir(files.nodes)
    for host in hosts:
        name = node_name(host)
        authority.equip(files.node(name), name, NODE_NAME_PREFIX)


def start_supervisor(files: ClusterFiles, binaries: Path) -> int:
    """A fork that supervises: what it needs is loaded already. It dies with this process, and its components with it."""
    from slurmlet.controlplane.supervisor import main

    def supervise() -> int:
        os.setsid()
        _redirect(files.logs / "supervisor.log")
        return main([str(files.root), str(binaries)])

    return forked(supervise)


def start_agent(argv: Sequence[str], log: Path) -> int:
    def become() -> int:
        os.setsid()
        _redirect(log)
        os.execv(argv[0], list(argv))  # noqa: S606

    return forked(become)


def forked(work: Callable[[], int]) -> int:
    """The pid of a child that runs `work` with default signals and dies with us."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent()
        for number in (
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGHUP,
            signal.SIGQUIT,
            signal.SIGUSR1,
            signal.SIGUSR2,
        ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        code = work() if os.getppid() == parent else 1
    except SlurmletError as error:
        print(error.message, file=sys.stderr)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _redirect(log: Path) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(handle, 1)
    os.dup2(handle, 2)


def log_tail(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        lines = []
    return "".join(f"\n    {line[:400]}" for line in lines)
