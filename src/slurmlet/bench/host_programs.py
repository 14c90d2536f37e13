"""The bare hosts' half of a network measurement: the programs of an image, run by Slurm straight on two hosts.

The image's files are unpacked once on the shared file system and started through their own loader: nothing is installed,
nothing wraps them, and they are the very files that the pods run. slirp4netns and pasta wrap a client the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurmlet.base.errors import SlurmletError, UserError
from slurmlet.base.processes import Completed
from slurmlet.bench.network_measurements import BARE, PASTA, SLIRP, Ports, nginx_conf, server_commands
from slurmlet.images.image_store import Store
from slurmlet.model.ids import JobId
from slurmlet.model.slurm_values import JobSpec
from slurmlet.slurm.command_options import srun_words
from slurmlet.slurm.commands import CommandSlurm
from slurmlet.slurm.task import run_task

_SRUN_LIMIT_S = 120.0
_FOLDERS = ("usr/sbin", "usr/bin")
_SLIRP_MTU = 65520

# $1: where to leave word; $2: slirp4netns and its options, quoted; the rest: the client.
_BEHIND_SLIRP = """\
word=$1; slirp=$2; shift 2
rm -f "$word.up" "$word.made"
unshare --map-root-user --net sh -c '
  : > "$0.made"
  until [ -s "$0.up" ]; do sleep 0.02; done
  exec "$@"' "$word" "$@" &
client=$!
until [ -e "$word.made" ]; do sleep 0.02; done
eval "$slirp --ready-fd=3 $client tap0" 3> "$word.up" > "$word.log" 2>&1 &
wait $client; code=$?
kill $! 2> /dev/null
exit $code
"""


@dataclass(frozen=True)
class Tree:
    """The files of an image on the shared file system."""

    root: Path

    @classmethod
    def unpacked(cls, store: Store, reference: str, root: Path) -> Tree:
        image = store.lookup(reference)
        if image is None:
            raise UserError(
                f"image {reference} is not in your store",
                hint="It needs iperf3, sockperf, wrk, nginx and ping. On the testbed: slurmlet testbed load bench",
            )
        with tarfile.open(image.directory / "rootfs.tar") as tar:
            tar.extractall(root, filter="tar")
        return cls(root)

    def has(self, program: str) -> bool:
        return self._find(program) is not None

    def argv(self, command: Sequence[str]) -> list[str]:
        """The command as this host can run it without the image's root."""
        found = self._find(command[0])
        loader = next(iter(sorted(self.root.glob("usr/lib/*-linux-gnu*/ld-linux-*.so.*"))), None)
        if found is None or loader is None:
            raise UserError(
                f"the image has no {command[0]}",
                hint="Use a Debian image that has this program. On the testbed: slurmlet testbed load bench",
            )
        return [str(loader), "--library-path", str(loader.parent), str(found), *command[1:]]

    def _find(self, program: str) -> Path | None:
        return next((path for folder in _FOLDERS if (path := self.root / folder / program).exists()), None)


class HostSide:
    """Clients on one host; servers, in a job of their own, on another."""

    def __init__(self, tree: Tree, client: str, server: str, work: Path, size: JobSpec) -> None:
        """`size`: what a job on either side asks for."""
        self._tree, self._client, self._server, self._work = tree, client, server, work
        self._size = replace(size, name="slurmlet-bench", nodes=1)
        self._slurm = CommandSlurm()
        self._job: JobId | None = None

    def start(self, ports: Ports) -> None:
        conf = self._work / "nginx-host.conf"
        conf.write_text(nginx_conf(ports.web, str(self._work)))
        servers = server_commands(ports, str(conf)).values()
        lines = [f"{shlex.join(self._tree.argv(command))} &" for command in servers]
        script = "\n".join(["#!/bin/sh", *lines, "wait", ""])
        output = str(self._work / "servers.log")
        spec = replace(self._size, script=script, output=output, hosts=(self._server,))
        self._job = asyncio.run(self._slurm.submit(spec))

    def stop(self) -> None:
        if self._job is not None:
            with contextlib.suppress(SlurmletError):
                asyncio.run(self._slurm.cancel([self._job]))

    def can(self, way: str) -> str:
        """ "" or why not."""
        program = {SLIRP: "slirp4netns", PASTA: "pasta"}.get(way)
        return "" if program is None or self._tree.has(program) else f"the image has no {program}"

    def run(self, way: str, command: Sequence[str]) -> Completed:
        """The client on its host, in one of the ways. Raises CommandError when it does not end."""
        options = ["--quiet", *srun_words(replace(self._size, tasks=1, hosts=(self._client,)))]
        return run_task(options, self._wrapped(way, command), timeout_s=_SRUN_LIMIT_S)

    def _wrapped(self, way: str, command: Sequence[str]) -> list[str]:
        client = self._tree.argv(command)
        if way == BARE:
            return client
        if way == PASTA:
            return [*self._tree.argv(["pasta", "--config-net", "--quiet", "--"]), *client]
        slirp = shlex.join(self._tree.argv(["slirp4netns", "--configure", f"--mtu={_SLIRP_MTU}"]))
        return ["sh", "-c", _BEHIND_SLIRP, "sh", str(self._work / "slirp"), slirp, *client]
