"""What a testbed is made of, and the text of its configuration."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurmlet.base.errors import UserError
from slurmlet.testbed.config_files import files, slurm_conf, slurmdbd_conf
from slurmlet.testbed.testbed_plan import NAME_VARIABLE, USERS, Paths, Plan, address_of, user_environment


def directives(text: str) -> list[dict[str, str]]:
    """Each line of a slurm.conf as a dictionary of its keys."""
    return [dict(word.split("=", 1) for word in line.split()) for line in text.splitlines()]


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"nodes": 65}, {"slurm": "19.05"}])
def test_impossible_plans_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError):
        Plan(**wrong)  # type: ignore[arg-type]


def test_a_plan_survives_its_record() -> None:
    plan = Plan(nodes=5, slurm="22.05", accounting=False, rest=False)
    assert Plan(**plan.as_json()) == plan


def test_every_host_has_an_address_of_its_own() -> None:
    hosts = Plan(nodes=64).hosts
    addresses = [address_of(host) for host in hosts]
    assert len(set(addresses)) == 65
    assert all(0 < int(address.rpartition(".")[2]) < 255 for address in addresses)


def test_the_environment_carries_nothing_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    assert "SECRET_TOKEN" not in user_environment("user1")
    assert user_environment("user1")["PATH"].startswith("/opt/slurmlet/venv/bin:/opt/slurmlet/upstream:")


@pytest.mark.parametrize("name", ["../escape", "run-", "other", "run-a/b", "run-" + "x" * 30])
def test_names_that_could_lead_elsewhere_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(NAME_VARIABLE, name)
    with pytest.raises(UserError, match="not valid"):
        Paths.default()


def test_testbeds_of_two_names_share_only_what_is_cached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURMLET_CACHE", str(tmp_path))
    monkeypatch.delenv(NAME_VARIABLE, raising=False)
    one = Paths.default()
    monkeypatch.setenv(NAME_VARIABLE, "run-two")
    two = Paths.default()
    assert one.root(Plan()) == two.root(Plan())
    assert {one.run, one.lock, one.home, one.hosts}.isdisjoint({two.run, two.lock, two.home, two.hosts})


class TestSlurmConf:
    def test_partitions(self) -> None:
        lines = [line for line in directives(slurm_conf(Plan(nodes=4))) if "PartitionName" in line]
        assert [(p["PartitionName"], p["MaxTime"], p["Nodes"]) for p in lines] == [
            ("batch", "INFINITE", "c[1-4]"),
            ("short", "10:00", "c[1-4]"),
        ]
        assert [p.get("Default") for p in lines] == ["YES", None]

    def test_the_last_host_has_gpus(self) -> None:
        lines = [line for line in directives(slurm_conf(Plan(nodes=3))) if "NodeName" in line]
        assert [(line["NodeName"], line.get("Gres")) for line in lines] == [
            ("c1", None),
            ("c2", None),
            ("c3", "gpu:2"),
        ]
        assert "NodeName=c3 Name=gpu File=/dev/nvidia[0-1]" in files(Plan(nodes=3))["slurm/gres.conf"]

    def test_more_processors_than_the_machine_has(self) -> None:
        merged = {k: v for line in directives(slurm_conf(Plan())) for k, v in line.items()}
        assert (merged["CPUs"], merged["SlurmdParameters"]) == ("16", "config_overrides")

    def test_accounting_only_when_asked_for(self) -> None:
        assert "AccountingStorageType=accounting_storage/slurmdbd" in slurm_conf(Plan())
        assert "AccountingStorage" not in slurm_conf(Plan(accounting=False))

    def test_cgroups_are_switched_off_the_way_each_version_knows(self) -> None:
        assert files(Plan())["slurm/cgroup.conf"] == "CgroupPlugin=disabled\n"
        assert files(Plan(slurm="22.05"))["slurm/cgroup.conf"] == "CgroupPlugin=cgroup/v1\n"


def test_the_database_listens_on_no_network() -> None:
    assert "\nskip-networking\n" in files(Plan())["mysql/testbed.cnf"]
    assert not any(name.startswith("mysql/") for name in files(Plan(accounting=False)))


def test_no_password_is_written_anywhere() -> None:
    everything = "\n".join([*files(Plan()).values(), slurmdbd_conf()])
    assert not re.search(r"(?i)pass(word|=)|identified by", everything)


def test_hosts_file_names_every_host_once() -> None:
    lines = [line.split() for line in files(Plan(nodes=2))["hosts"].splitlines()]
    assert [line[1] for line in lines if line[0].startswith("10.")] == ["login", "c1", "c2"]


def test_only_one_user_has_subordinate_ids() -> None:
    owners = {line.split(":")[0] for line in files(Plan())["subuid"].splitlines()}
    assert owners < set(USERS)
    assert files(Plan())["subuid"] == files(Plan())["subgid"]
