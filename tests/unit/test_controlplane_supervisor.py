"""The real supervisor process over small stand-ins for the upstream programs."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmlet.base.files import private_dir
from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane import pki
from slurmlet.controlplane.cluster_config import ClusterConfig
from slurmlet.controlplane.component_process import next_backoff
from slurmlet.controlplane.heartbeat import Heartbeat, Sign, give_up, read
from slurmlet.controlplane.run_files import make_dirs, read_components, run_files, start_ticks
from slurmlet.controlplane.supervisor import cap, rotate

STAYS = '#!/bin/sh\necho "$@"\nexec sleep 300\n'


def eventually(check: Callable[[], Any], limit_s: float = 15.0) -> Any:
    deadline_s = time.monotonic() + limit_s
    while not (seen := check()):
        assert time.monotonic() < deadline_s, "not in time"
        time.sleep(0.02)
    return seen


class Trial:
    """A cluster directory, stand-in programs and the supervisor over them."""

    def __init__(self, root: Path) -> None:
        self.files = ClusterFiles(root / "home" / "exp")
        make_dirs(self.files)
        pki.ensure(self.files.pki, pki.leaves("login1", [], "10.96.0.0/16"))
        ClusterConfig(
            "exp", "0a1b2c3d", "", "v1", "login1", (), "192.0.2.9", 1, 2, 3, "10.96.0.0/16", None
        ).save(self.files)
        self.binaries = private_dir(root / "bin")
        self.process: subprocess.Popen[bytes] | None = None
        # The hub is started as `<python> -m slurmlet.hub`: a package of that name that comes first on the path.
        hub = private_dir(root / "python" / "slurmlet") / "hub.py"
        hub.write_text("import time\nprint('hub', flush=True)\ntime.sleep(300)\n")
        self.python_path = root / "python"
        (root / "python" / "slurmlet" / "__init__.py").write_text(
            "import pkgutil\n__path__ = pkgutil.extend_path(__path__, __name__)\n"
        )
        for name in ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"):
            self.program(name, STAYS)

    def program(self, name: str, text: str) -> None:
        (self.binaries / name).write_text(text)
        (self.binaries / name).chmod(0o700)

    def start(self, *, beat_s: float = 10.0) -> None:
        program = (
            "from slurmlet.controlplane import heartbeat, supervisor\n"
            "supervisor._LATE_S = supervisor._LAST_WRITES_S = 0.5\n"
            f"heartbeat.INTERVAL_S = {beat_s}\nsupervisor.run_as_program()\n"
        )
        argv = [sys.executable, "-P", "-c", program, str(self.files.root), str(self.binaries)]
        log = (self.files.logs / "supervisor.log").open("ab")
        path = os.pathsep.join([str(self.python_path), *filter(None, sys.path)])
        self.process = subprocess.Popen(
            argv, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": path}, start_new_session=True
        )
        log.close()

    def state(self, name: str) -> dict[str, Any]:
        return read_components(run_files(self.files)).get(name, {})

    def pid(self, name: str) -> int:
        return int(eventually(lambda: self.state(name).get("pid")))

    def gone(self, *pids: int) -> bool:
        return all(start_ticks(pid) is None for pid in pids)

    def let_home_hang(self) -> int:
        """Until this descriptor is closed: the heartbeat is a pipe, and somebody reads it to whom nothing is said."""
        made, pipe = self.files.root / "hangs", run_files(self.files).heartbeat

        def writer() -> int | None:
            # A beat that was under way may have replaced the last one.
            if not pipe.is_fifo():
                os.mkfifo(made)
                made.replace(pipe)
            with contextlib.suppress(OSError):  # nobody reads it yet
                handle = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
                if stat.S_ISFIFO(os.fstat(handle).st_mode):
                    return handle
                os.close(handle)
            return None

        return int(eventually(writer))

    def said(self) -> str:
        return (self.files.logs / "supervisor.log").read_text()

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    made = Trial(tmp_path)
    yield made
    made.close()


def test_backoff_doubles_to_its_cap_and_forgets_after_health() -> None:
    seen, wait_s = [], 0.0
    for _ in range(9):
        wait_s = next_backoff(wait_s, ran_s=1.0)
        seen.append(wait_s)
    assert seen == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert next_backoff(30.0, ran_s=61.0) == 0.5


def test_restarts_what_dies_and_ends_all_on_term(trial: Trial) -> None:
    trial.start()
    assert trial.process is not None
    first, api, hub = trial.pid("etcd"), trial.pid("kube-apiserver"), trial.pid("hub")
    os.kill(first, signal.SIGKILL)
    second = eventually(lambda: trial.state("etcd").get("pid") not in (None, first) and trial.pid("etcd"))
    assert trial.state("etcd")["restarts"] == 1
    assert trial.state("kube-apiserver") == {**trial.state("kube-apiserver"), "pid": api, "restarts": 0}
    # Its clients are not started while the API server is not ready.
    assert trial.state("kube-scheduler")["pid"] is None
    trial.process.terminate()
    assert trial.process.wait(10) == 0
    assert trial.gone(second, api, hub)
    assert not run_files(trial.files).supervisor.exists()
    told = (trial.files.logs / "supervisor.log").read_text()
    assert told.index("stopped hub") < told.index("stopped kube-apiserver") < told.index("stopped etcd")


def test_killed_supervisor_takes_its_components_along(trial: Trial) -> None:
    trial.start()
    assert trial.process is not None
    pids = [trial.pid(name) for name in ("etcd", "kube-apiserver", "hub")]
    trial.process.kill()
    trial.process.wait()
    eventually(lambda: trial.gone(*pids), 5)


def test_hub_is_ended_for_good_on_request(trial: Trial) -> None:
    trial.start()
    assert trial.process is not None
    hub = trial.pid("hub")
    etcd = trial.pid("etcd")
    trial.process.send_signal(signal.SIGUSR1)
    eventually(lambda: trial.state("hub").get("held"))
    assert trial.gone(hub)
    time.sleep(0.8)  # longer than the first backoff
    assert trial.state("hub")["pid"] is None
    assert trial.state("etcd")["pid"] == etcd


def test_taken_port_is_replaced_and_its_users_are_told(trial: Trial) -> None:
    refuse = 'case "$*" in *127.0.0.1:2\\ *) echo "bind: address already in use" >&2; exit 1;; esac'
    trial.program("etcd", f"#!/bin/sh\n{refuse}\nexec sleep 300\n")
    assert json.loads(trial.files.config.read_text())["etcd_port"] == 2
    trial.start()
    port = eventually(lambda: (now := json.loads(trial.files.config.read_text())["etcd_port"]) != 2 and now)
    api_log = trial.files.logs / "kube-apiserver.log"
    eventually(lambda: f"--etcd-servers=https://127.0.0.1:{port} " in api_log.read_text())
    eventually(lambda: trial.state("etcd").get("pid"))
    assert "--etcd-servers=https://127.0.0.1:2 " in api_log.read_text().splitlines()[0]


def test_second_supervisor_leaves_at_once(trial: Trial) -> None:
    trial.start()
    trial.pid("etcd")
    argv = [sys.executable, "-P", "-m", "slurmlet.controlplane", str(trial.files.root), str(trial.binaries)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1
    assert "another supervisor" in done.stdout


def test_a_supervisor_on_another_host_is_respected_where_the_lock_is_not_seen(trial: Trial) -> None:
    Heartbeat(run_files(trial.files).heartbeat, "login2", 7).claim()
    trial.start()
    assert trial.process is not None
    assert trial.process.wait(20) == 1
    assert (
        "this cluster is running on login2, not on this host"
        in (trial.files.logs / "supervisor.log").read_text()
    )
    assert trial.state("etcd") == {}, "nothing was started"


def test_a_supervisor_whose_cluster_was_given_up_elsewhere_ends_its_components(trial: Trial) -> None:
    trial.start(beat_s=0.1)
    assert trial.process is not None
    etcd = trial.pid("etcd")
    give_up(run_files(trial.files).heartbeat, "login2")
    assert trial.process.wait(20) == 0
    assert trial.gone(etcd)
    assert "login2" in run_files(trial.files).heartbeat.read_text(), "what login2 wrote stays"


def test_a_home_that_hangs_does_not_keep_the_supervisor_from_ending_all(trial: Trial) -> None:
    trial.start(beat_s=0.1)
    assert trial.process is not None
    pids = [trial.pid(name) for name in ("etcd", "kube-apiserver", "hub")]
    pipe = trial.let_home_hang()
    trial.process.terminate()
    assert trial.process.wait(60) == 0
    assert trial.gone(*pids)
    os.close(pipe)


def test_a_component_that_dies_while_the_home_hangs_is_started_when_it_is_back(trial: Trial) -> None:
    trial.start(beat_s=0.1)
    assert trial.process is not None
    first, hub = trial.pid("etcd"), trial.pid("hub")
    pipe = trial.let_home_hang()
    os.kill(first, signal.SIGKILL)
    eventually(lambda: trial.gone(first))  # nobody but its parent can see to that
    trial.process.send_signal(signal.SIGUSR1)
    eventually(lambda: trial.gone(hub), 30)  # it goes round, and has seen by now that the home is late
    os.close(pipe)
    eventually(lambda: trial.state("etcd").get("pid") not in (None, first))
    eventually(lambda: "the home answers again" in trial.said())
    assert "the home has not answered for" in trial.said()
    assert eventually(lambda: heartbeat_of(trial))


def heartbeat_of(trial: Trial) -> Sign | None:
    return read(run_files(trial.files).heartbeat)


def test_components_do_not_inherit_blocked_signals(trial: Trial) -> None:
    trial.start()
    status = Path(f"/proc/{trial.pid('etcd')}/status").read_text()
    blocked = next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk"))
    assert int(blocked, 16) == 0


def test_logs_are_rotated_and_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "etcd.log"
    rotate(log)
    log.write_text("first run")
    rotate(log)
    assert not log.exists()
    assert (tmp_path / "etcd.log.1").read_text() == "first run"
    monkeypatch.setattr("slurmlet.controlplane.supervisor._LOG_CAP_BYTES", 10)
    with log.open("ab", buffering=0) as writer:
        writer.write(b"more than ten bytes")
        cap(log)
        writer.write(b"next")
    assert log.read_bytes() == b"next"


@pytest.mark.parametrize(("size", "left"), [(15, 15), (25, 0)])
def test_a_full_disk_when_a_log_is_capped_is_told_and_no_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    size: int,
    left: int,
) -> None:
    """What cannot be copied waits; twice too big it goes, for it may be what fills the disk."""
    log = tmp_path / "etcd.log"
    log.write_bytes(b"x" * size)

    def full(_source: Path, target: Path) -> None:
        target.write_bytes(b"a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("slurmlet.controlplane.supervisor._LOG_CAP_BYTES", 10)
    monkeypatch.setattr("shutil.copyfile", full)
    cap(log)
    assert log.stat().st_size == left
    assert not (tmp_path / "etcd.log.1").exists()
    assert "No space left on device" in capsys.readouterr().out


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_log_that_cannot_be_looked_at_is_told_and_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise OSError(code, "the home fails")

    monkeypatch.setattr(Path, "stat", failing)
    cap(tmp_path / "etcd.log")
    monkeypatch.undo()
    assert "the home fails" in capsys.readouterr().out
