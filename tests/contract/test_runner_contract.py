"""A whole runner on this machine: namespaces, overlay, TLS and processes are real, hub and crun are stand-ins.

The scenarios are those that tests/e2e/test_runner_alone.py plays with the real crun on the testbed. Left to it are those
that ask for what only a real one can give (users, filters, PID namespaces), and `stop`, which measures time.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import slurmlet
from slurmlet.controlplane import pki
from slurmlet.controlplane.pki import Leaf
from tests.contract.runner_names import SCENARIO_NAMES

HERE = Path(__file__).parent
NOT_HERE = {"identity", "identity_of_root", "shared_pids", "stop"}
LINKS = {name: f"usr/{name}" for name in ("bin", "sbin", "lib", "lib64")}


def _image() -> bytes:
    """Nothing but places to bind this machine's system to."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("usr", "etc", "tmp", "dev", "proc", "sys"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for name, target in LINKS.items():
            if Path("/", name).is_symlink():
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = tarfile.SYMTYPE, target
                tar.addfile(entry)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("kit")
    leaves = [
        Leaf("hub", "hub-ca", "hub", server=True, dns=("hub.slurmlet",)),
        Leaf("other", "hub-ca", "other", server=True, dns=("other.slurmlet",)),
        Leaf("runner", "hub-ca", "slurmlet:pod:x", client=True),
    ]
    pki.ensure(made / "pki", leaves)
    (made / "certs").mkdir()
    for leaf in leaves:
        both = [(made / "pki" / f"{leaf.name}{end}").read_bytes() for end in (".crt", ".key")]
        (made / "certs" / f"{leaf.name}.pem").write_bytes(b"".join(both))
    (made / "certs" / "ca.pem").write_bytes((made / "pki" / "hub-ca.crt").read_bytes())
    (made / "sha256-00").mkdir()
    (made / "sha256-00" / "rootfs.tar").write_bytes(_image())
    (made / "bin").mkdir()
    crun = made / "bin" / "crun"
    source = Path(slurmlet.__file__).parents[1]
    begin = f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(source)!r})\n"
    crun.write_text(
        begin + "exec(compile(open({0!r}).read(), {0!r}, 'exec'))\n".format(str(HERE / "plain_crun.py"))
    )
    crun.chmod(0o755)
    return made


@pytest.mark.parametrize("scenario", [name for name in SCENARIO_NAMES if name not in NOT_HERE])
def test_runner(kit: Path, tmp_path: Path, scenario: str) -> None:
    argv = [
        sys.executable, str(HERE / "runner_scenarios.py"), str(tmp_path / "work"), str(kit / "sha256-00"),
        str(kit / "certs"), scenario, "--", sys.executable, "-m", "slurmlet.entrypoint",
    ]  # fmt: skip
    path = f"{kit / 'bin'}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "TMPDIR": str(tmp_path), "RIG_MAPPING": "single"}
    environ.pop("SLURM_TMPDIR", None)
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}\n{done.stdout}{done.stderr}"
