"""The OCI configuration a container gets."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from slurmlet.linux import syscalls
from slurmlet.runner.containers import devices, oci_bundle
from slurmlet.runner.containers.container_user import User
from slurmlet.runner.containers.oci_bundle import Facts
from slurmlet.runner.host.sandbox import SINGLE, SUBUID, Mapping
from slurmlet.runner.volumes.pod_volumes import Mount

ONE = Mapping(SINGLE, 1, 1)
MANY = Mapping(SUBUID, 65537, 65537)


def plan(**changes: Any) -> dict[str, Any]:
    return {"argv": ["sh", "-c", "x"], "env": [["A", "$(id) `x`\n"]], "cwd": "/w", **changes}


def facts(uid: int = 0, gid: int = 0, mapping: Mapping = ONE, **more: Any) -> Facts:
    return Facts("/root", User(uid, gid, (33,), "/home/x"), mapping, "pod1", more.pop("mounts", []), **more)


def kinds(config: dict[str, Any]) -> list[str]:
    return sorted(each["type"] for each in config["linux"]["namespaces"])


def test_words_and_environment_are_data() -> None:
    process = oci_bundle.make(plan(), facts())["process"]
    assert process["args"] == ["sh", "-c", "x"]
    assert "A=$(id) `x`\n" in process["env"]
    assert "HOME=/home/x" in process["env"]
    assert process["cwd"] == "/w"


def test_one_uid_root_stays_in_the_sandboxs_user_namespace() -> None:
    config = oci_bundle.make(plan(), facts())
    assert kinds(config) == ["ipc", "mount", "pid", "uts"]
    assert "uidMappings" not in config["linux"]
    assert "additionalGids" not in config["process"]["user"]


def test_one_uid_anybody_else_gets_a_namespace_that_calls_them_so() -> None:
    config = oci_bundle.make(plan(), facts(1000, 50))
    assert kinds(config) == ["ipc", "mount", "pid", "user", "uts"]
    assert config["linux"]["uidMappings"] == [{"containerID": 1000, "hostID": 0, "size": 1}]
    assert config["linux"]["gidMappings"] == [{"containerID": 50, "hostID": 0, "size": 1}]


def test_many_uids_need_neither_namespace_nor_pretence() -> None:
    config = oci_bundle.make(plan(), facts(1000, 50, MANY))
    assert kinds(config) == ["ipc", "mount", "pid", "uts"]
    assert "seccomp" not in config["linux"]
    assert config["process"]["user"] == {"uid": 1000, "gid": 50, "umask": 0o022, "additionalGids": [33]}


def test_privileges_are_faked_with_one_uid() -> None:
    rules = oci_bundle.make(plan(), facts())["linux"]["seccomp"]["syscalls"]
    assert {rule["errnoRet"] for rule in rules} == {0}
    assert {"chown", "fchownat", "setgroups", "setuid", "setresgid"} <= set(rules[0]["names"])
    # mknod of a FIFO or a plain file must still happen.
    assert all(rule["args"] for rule in rules if rule["names"][0].startswith("mknod"))


def test_nothing_asks_for_cgroups() -> None:
    config = oci_bundle.make(plan(), facts())
    assert "resources" not in config["linux"]
    assert "cgroupsPath" not in config["linux"]
    assert all(mount["type"] != "cgroup" for mount in config["mounts"])


def test_capabilities() -> None:
    default = oci_bundle.capabilities(plan())
    assert "CAP_CHOWN" in default
    assert "CAP_SYS_ADMIN" not in default
    assert oci_bundle.capabilities(plan(drop_caps=["ALL"])) == []
    assert oci_bundle.capabilities(plan(drop_caps=["ALL"], add_caps=["NET_BIND_SERVICE"])) == [
        "CAP_NET_BIND_SERVICE"
    ]
    assert "CAP_KILL" not in oci_bundle.capabilities(plan(drop_caps=["CAP_KILL"]))
    assert "CAP_SYS_PTRACE" in oci_bundle.capabilities(plan(add_caps=["SYS_PTRACE"]))
    assert "CAP_SYS_ADMIN" in oci_bundle.capabilities(plan(privileged=True))


def test_a_privileged_container_is_neither_masked_nor_confined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "usable", lambda: ["/dev/fuse"])
    config = oci_bundle.make(plan(privileged=True, seccomp="RuntimeDefault"), facts(mapping=MANY))
    assert not {"maskedPaths", "readonlyPaths", "seccomp"} & set(config["linux"])
    assert {
        "destination": "/dev/fuse",
        "type": "bind",
        "source": "/dev/fuse",
        "options": ["bind", "rw"],
    } in config["mounts"]
    sysfs = next(one for one in config["mounts"] if one["destination"] == "/sys")
    assert "ro" not in sysfs["options"]
    plain = oci_bundle.make(plan(seccomp="RuntimeDefault"), facts(mapping=MANY))
    assert plain["linux"]["maskedPaths"]
    assert plain["linux"]["seccomp"]
    assert not [one for one in plain["mounts"] if one["destination"] == "/dev/fuse"]


@pytest.mark.parametrize(("last", "missing"), [(37, "CAP_PERFMON"), (38, "CAP_BPF"), (40, "CAP_NOTHING")])
def test_no_capability_is_asked_for_that_the_kernel_does_not_know(
    monkeypatch: pytest.MonkeyPatch, last: int, missing: str
) -> None:
    monkeypatch.setattr(syscalls, "last_capability", lambda: last)
    found = oci_bundle.capabilities(plan(privileged=True))
    assert len(found) == last + 1
    assert missing not in found


def test_only_devices_that_may_be_opened_are_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "plain").write_text("")
    (tmp_path / "net" / "link").symlink_to("/dev/null")
    assert devices.usable(str(tmp_path)) == []
    found = devices.usable("/dev")
    assert "/dev/null" not in found, "every container has that one of its own"
    assert all(
        stat.S_ISCHR(mode) or stat.S_ISBLK(mode) for mode in (os.lstat(path).st_mode for path in found)
    )
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert devices.usable("/dev") == []


def test_mounts_and_shared_pids() -> None:
    mounts = [Mount("/src", "/dst", True)]
    config = oci_bundle.make(plan(read_only_root=True), facts(mounts=mounts, pid_namespace="/ns"))
    bound = config["mounts"][-1]
    assert (bound["destination"], bound["source"]) == ("/dst", "/src")
    assert "ro" in bound["options"]
    assert config["root"]["readonly"] is True
    assert {"type": "pid", "path": "/ns"} in config["linux"]["namespaces"]


def test_a_terminal_has_a_type() -> None:
    assert "TERM=xterm" in oci_bundle.process(plan(), facts(), ["sh"], True)["env"]
    assert not [
        each for each in oci_bundle.process(plan(), facts(), ["sh"], False)["env"] if each.startswith("TERM=")
    ]
    given = plan(env=[["TERM", "vt100"]])
    assert "TERM=vt100" in oci_bundle.process(given, facts(), ["sh"], True)["env"]
