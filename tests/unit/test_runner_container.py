"""Parts of a container's life in the runner that need no container: files of variables, memory, last words, limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmlet.runner.containers import container_user, env_files, oom, seccomp_profiles, termination_message
from slurmlet.runner.containers.oom import KillCounter
from slurmlet.runner.host.sandbox import SINGLE, SUBUID, Mapping
from slurmlet.runner.pod import storage_limits

FILE = """
# a comment
  INDENTED='one'
EMPTY= 'not this'
POEM='two
lines # kept' # dropped
EQUALS='a=b'
"""


@pytest.mark.parametrize(
    ("key", "value"),
    [("INDENTED", "one"), ("EMPTY", ""), ("POEM", "two\nlines # kept"), ("EQUALS", "a=b"), ("NOBODY", "")],
)
def test_env_files(key: str, value: str) -> None:
    assert env_files.parse(FILE, key) == value
    assert env_files.parse(FILE.replace("\n", "\r\n").replace("two\r", "two"), key) == value


@pytest.mark.parametrize("text", ["plain", "A=bare", "A ='x'", "='x'", "A='open", "A='x'y", 'A="x"', "A="])
def test_env_files_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"environment variable format (starting )?at line 1"):
        env_files.parse(text, "A")


def from_file(name: str, key: str, **more: Any) -> dict[str, Any]:
    entry = {"name": name, "volume": "v", "path": "f.env", "key": key, "optional": False, "otherwise": None}
    return {**entry, "image": None, **more}


def test_marks_are_replaced_everywhere(tmp_path: Path) -> None:
    (tmp_path / "f.env").write_text("A='1'\n")
    plan = {
        "env_files": [
            from_file("A", "A"),
            from_file("GONE", "NO", optional=True),
            from_file("IMAGES", "NO", optional=True, image="its own"),
            from_file("EARLIER", "NO", optional=True, otherwise="was \ufdd00\ufdd1"),
        ],
        "env": [
            ["A", "\ufdd00\ufdd1"],
            ["GONE", "\ufdd01\ufdd1"],
            ["IMAGES", "\ufdd02\ufdd1"],
            ["EARLIER", "\ufdd03\ufdd1"],
            ["B", "<\ufdd00\ufdd1 \ufdd01\ufdd1 \ufdd03\ufdd1>"],
        ],
        "argv": ["echo", "\ufdd00\ufdd1"],
        "mounts": [{"volume": "w", "path": "/w", "sub_path": "d/\ufdd00\ufdd1"}],
    }
    made = env_files.resolve(plan, {"v": str(tmp_path)}.__getitem__)
    assert made["env"] == [
        ["A", "1"],
        ["IMAGES", "its own"],
        ["EARLIER", "was 1"],
        ["B", "<1 $(GONE) was 1>"],
    ]
    assert made["argv"] == ["echo", "1"]
    assert made["mounts"][0]["sub_path"] == "d/1"


@pytest.mark.parametrize(
    ("path", "words"), [("f.env", 'key "NO" not found in file'), ("none.env", "couldn't parse env file")]
)
def test_a_missing_value_is_told(tmp_path: Path, path: str, words: str) -> None:
    (tmp_path / "f.env").write_text("A='1'\n")
    with pytest.raises(env_files.BadEnvFile, match=words):
        env_files.resolve(
            {"env_files": [from_file("X", "NO", path=path)], "env": [], "argv": []}, lambda _: str(tmp_path)
        )


def test_an_env_file_cannot_be_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("A='1'\n")
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume" / "f.env").symlink_to("../secret")
    with pytest.raises(env_files.BadEnvFile):
        env_files.resolve(
            {"env_files": [from_file("X", "A")], "env": [], "argv": []}, lambda _: str(tmp_path / "volume")
        )


def make_proc(tmp_path: Path, cgroup: str, mountinfo: str) -> str:
    own = tmp_path / "proc" / "self"
    own.mkdir(parents=True)
    (own / "cgroup").write_text(cgroup)
    (own / "mountinfo").write_text(mountinfo)
    return str(tmp_path / "proc")


def test_kills_are_counted_in_the_jobs_own_cgroup_of_version_2(tmp_path: Path) -> None:
    job = tmp_path / "cgroup" / "slurm" / "job_1"
    (job / "step_batch" / "task_0").mkdir(parents=True)
    events = job / "step_batch" / "memory.events"
    events.write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    line = f"30 25 0:26 / {tmp_path}/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
    counter = KillCounter(make_proc(tmp_path, "0::/slurm/job_1/step_batch/task_0\n", line))
    assert counter.path == str(events)
    assert counter.count() == 2
    events.write_text("low 0\noom 3\noom_kill 3\n")
    assert counter.count() == 3


def test_kills_are_counted_in_the_jobs_own_cgroup_of_version_1(tmp_path: Path) -> None:
    (tmp_path / "memory" / "job_1").mkdir(parents=True)
    control = tmp_path / "memory" / "job_1" / "memory.oom_control"
    control.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    lines = (
        f"30 25 0:26 / {tmp_path}/cpu rw - cgroup cgroup rw,cpu\n"
        f"31 25 0:27 /slurm {tmp_path}/memory rw - cgroup cgroup rw,memory\n"
    )
    proc = make_proc(tmp_path, "4:memory:/slurm/job_1\n3:cpu:/slurm/job_1\n0::/\n", lines)
    assert KillCounter(proc).path == str(control)
    assert KillCounter(proc).count() == 1


def test_without_a_cgroup_to_see_the_node_is_asked(tmp_path: Path) -> None:
    assert KillCounter(make_proc(tmp_path, "0::/\n", "")).path == "/proc/vmstat"
    score = oom.score_above_own()
    assert score is not None
    assert score > int(Path("/proc/self/oom_score_adj").read_text())


def rule_for(profile: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    assert profile is not None
    return [rule for rule in profile["syscalls"] if name in rule["names"]]


def test_seccomp_profiles() -> None:
    assert seccomp_profiles.profile(fake=False, restrict=False) is None
    strict = seccomp_profiles.profile(fake=False, restrict=True)
    assert [rule["errnoRet"] for rule in rule_for(strict, "mount")] == [1]
    assert [rule["errnoRet"] for rule in rule_for(strict, "clone3")] == [38]
    assert len(rule_for(strict, "clone")) == 7
    assert rule_for(strict, "chown") == []
    admin = seccomp_profiles.profile(fake=True, restrict=True, caps=["CAP_SYS_ADMIN"])
    assert rule_for(admin, "mount") == rule_for(admin, "clone3") == rule_for(admin, "bpf") == []
    assert [rule["errnoRet"] for rule in rule_for(admin, "keyctl")] == [1]
    # Beside what is forbidden, what is faked for one uid stays faked.
    assert [rule["errnoRet"] for rule in rule_for(admin, "chown")] == [0]
    # libseccomp refuses a rule that tests one argument twice.
    assert all(
        len({arg["index"] for arg in rule.get("args", [])}) == len(rule.get("args", []))
        for rule in admin["syscalls"]
    )  # type: ignore[index]


def test_groups_of_the_image_and_ids_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "passwd").write_text("app:x:1000:1000::/home/app:/bin/sh\n")
    (tmp_path / "etc" / "group").write_text("app:x:1000:\nwheel:x:50:other,app\n")
    wanted = {"uid": 1000, "gid": None, "groups": [4000], "name": ""}
    assert container_user.resolve(str(tmp_path), wanted).groups == (4000, 50)
    strict = container_user.resolve(str(tmp_path), {**wanted, "strict": True})
    assert strict.groups == (4000,)
    container_user.check_mapped(strict, Mapping(SUBUID, 65537, 65537))
    container_user.check_mapped(strict._replace(uid=10**9), Mapping(SINGLE, 1, 1))
    for changed, field in (({"uid": 65537}, "runAsUser"), ({"groups": (1, 70000)}, "supplementalGroups")):
        with pytest.raises(container_user.Unmapped, match=rf"securityContext\.{field}: \d+ is beyond"):
            container_user.check_mapped(strict._replace(**changed), Mapping(SUBUID, 65537, 65537))


def test_storage_over_its_limits() -> None:
    limits = {"pod": [100, "100"], "containers": {"a": [40, "40"]}}
    assert storage_limits.too_much(limits, {"a": 40, "b": 50}, 10) == ""
    assert (
        storage_limits.too_much(limits, {"a": 41}, 0)
        == 'Container a exceeded its local ephemeral storage limit "40". '
    )
    told = "Pod ephemeral local storage usage exceeds the total limit of containers 100. "
    assert storage_limits.too_much(limits, {"a": 41, "b": 50}, 10) == told
    assert storage_limits.too_much({"pod": None, "containers": {}}, {"a": 10**9}, 10**9) == ""


def test_the_end_of_a_long_message_is_what_counts(tmp_path: Path) -> None:
    message = tmp_path / "message"
    message.write_text("x" * 5000 + "end")
    plan = {"termination_message_path": "/dev/termination-log"}
    text = termination_message.termination_message(plan, str(message), "", 1)
    assert (len(text), text[-4:]) == (4096, "xend")
    assert termination_message.termination_message(plan, str(tmp_path / "none"), "", 1) == ""
    assert termination_message.termination_message(plan, str(tmp_path), "", 1).startswith(
        "Error on reading termination log"
    )
