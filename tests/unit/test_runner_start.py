"""What a runner loads until its first container runs: every pod waits for it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import slurmlet

# The outer process, which claims the pod and waits; then all that the inner one needs until a container runs.
OUTER = "entrypoint.job_step entrypoint.main runner.pod.pod_main runner.pod.claim runner.host.sandbox"
INNER = "runner.pod.pod_runner runner.network.network_attachment"
LOAD = """
import sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    __import__("slurmlet." + name)
if "slurmlet.runner.pod.pod_runner" in sys.modules:
    for name in sys.modules["slurmlet.runner.pod.pod_runner"]._AHEAD:
        __import__("slurmlet.runner." + name)
print(*sys.modules)
"""
# Each takes milliseconds to load, and whatever needs it can wait until a container runs.
EXPENSIVE = {
    "argparse", "asyncio", "concurrent", "dataclasses", "email", "hashlib", "http", "inspect", "ipaddress", "logging",
    "multiprocessing", "pathlib", "random", "shutil", "subprocess", "tarfile", "tempfile", "threading", "traceback",
    "typing", "urllib", "zipfile",
}  # fmt: skip
# Needed to speak to the hub, which only the inner process does.
INNER_ONLY = {"json", "socket", "ssl"}


def loaded(modules: str) -> set[str]:
    source = Path(slurmlet.__file__).parents[1]
    argv = [sys.executable, "-IS", "-c", LOAD, str(source), *modules.split()]
    return set(subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30).stdout.split())


def test_nothing_expensive_is_loaded_before_a_container_runs() -> None:
    found = loaded(f"{OUTER} {INNER}")
    assert "slurmlet.runner.containers.container" in found
    assert found & EXPENSIVE == set()


def test_the_outer_process_loads_nothing_that_only_the_inner_one_needs() -> None:
    assert loaded(OUTER) & (EXPENSIVE | INNER_ONLY) == set()


def test_the_types_of_the_protocol_cost_a_runner_nothing() -> None:
    types = {f"slurmlet.protocol.{name}" for name in (
        "messages", "pod_plan", "pod_report", "network_tables", "cluster_files", "checks", "version"
    )}  # fmt: skip
    found = loaded(INNER)
    assert "slurmlet.protocol.wire" in found
    assert found & types == set()


def test_private_modules_of_python_are_not_imported() -> None:
    root = Path(slurmlet.__file__).parent
    lines = [
        (path.name, line)
        for path in root.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.match(r"\s*(import|from) _(?!_future__|typeshed)", line)
    ]
    assert lines == []
