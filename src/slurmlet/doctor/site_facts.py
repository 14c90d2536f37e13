"""Gathers the facts: runs the probe here and on a node, asks Slurm, looks for binaries. Judges nothing.

Writes one small file into the user's home for the moment of the check (is home shared?); leaves nothing.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from slurmlet.base import files, layout
from slurmlet.base.console import Steps
from slurmlet.base.errors import SlurmletError
from slurmlet.base.processes import run
from slurmlet.doctor import reachability
from slurmlet.slurm import configuration, immediate, task
from slurmlet.upstream import binaries as locating
from slurmlet.upstream import pins

QUEUE_WAIT_S = 60.0
_PROBE_TIMEOUT_S = 60.0
_MARK = "slurmlet-probe "
_PROBES = ("probe.py", "probe_network.py")

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Findings:
    """Everything judging.py looks at. None: not asked, or no answer (then a problem says why)."""

    here: Facts | None = None
    node: Facts | None = None
    node_problem: str = ""
    node_timed_out: bool = False
    missing_commands: tuple[str, ...] = ()
    slurm_config: Mapping[str, str] = field(default_factory=dict)
    slurm_problem: str = ""
    at_once_problem: str | None = None  # "": pods can start at once
    binaries: Mapping[str, str] = field(default_factory=dict)  # name -> path, "" where missing
    only_here: bool = False  # --node: judge this host as if it were a compute node


def collect_here() -> Findings:
    """For `--node`: this host alone, no job."""
    return Findings(node=_probe_here({}), binaries=_binaries(), only_here=True)


def collect(steps: Steps, *, partition: str | None, wait_s: float = QUEUE_WAIT_S) -> Findings:
    with steps.step("checking this host"):
        here = _probe_here({})
        binaries = _binaries()
    missing = tuple(configuration.missing_commands())
    if missing:
        return Findings(here=here, missing_commands=missing, binaries=binaries)
    config, problem = _slurm_config()
    if problem:
        return Findings(here=here, slurm_problem=problem, binaries=binaries)
    at_once = immediate.look_at_site(configuration.capabilities_of(config)).problem
    with steps.step("checking a compute node, through a small job"):
        job = _probe_node(partition, wait_s)
    node = _parse(job.output)
    return Findings(
        here=here,
        node=node,
        node_problem="" if node is not None else job.problem or "the probe said nothing",
        node_timed_out=job.timed_out,
        slurm_config=config,
        at_once_problem=at_once,
        binaries=binaries,
    )


def _slurm_config() -> tuple[dict[str, str], str]:
    try:
        return configuration.show_config(), ""
    except SlurmletError as error:
        return {}, error.message


def _probe_node(partition: str | None, wait_s: float) -> task.ProbeJob:
    with _home_file() as home, reachability.beacon() as beacon:
        wanted = {"home": home, "login": asdict(beacon)}
        return task.run_on_node(_program(wanted), partition=partition, wait_s=wait_s)


def _probe_here(wanted: Mapping[str, Any]) -> Facts | None:
    done = run([sys.executable, "-"], stdin=_program(wanted), timeout_s=_PROBE_TIMEOUT_S, check=False)
    return _parse(done.stdout)


def _program(wanted: Mapping[str, Any]) -> str:
    """The probes and their parameters as one text. repr of a JSON text is a Python literal whatever it holds."""
    here = resources.files("slurmlet.doctor")
    source = "\n\n".join(here.joinpath(name).read_text() for name in _PROBES)
    return f"{source}\n\nmain(json.loads({json.dumps(dict(wanted))!r}), network_facts)\n"


def _parse(output: str) -> Facts | None:
    """Prologs and login scripts may have spoken before the probe."""
    for line in output.splitlines():
        if line.startswith(_MARK):
            try:
                facts = json.loads(line.removeprefix(_MARK))
            except ValueError:
                return None
            return facts if isinstance(facts, dict) else None
    return None


@contextmanager
def _home_file() -> Iterator[dict[str, str]]:
    """A file with random content where slurmlet would keep its state (or as near to it as exists)."""
    directory = layout.home_dir()
    while not directory.is_dir():
        directory = directory.parent
    path: Path = directory / f".slurmlet-doctor-{secrets.token_hex(8)}"
    content = secrets.token_hex(16)
    files.write_private(path, content)
    try:
        yield {"path": str(path), "content": content}
    finally:
        path.unlink(missing_ok=True)


def _binaries() -> dict[str, str]:
    return {name: str(locating.find(name) or "") for name in pins.load().names()}
