"""The pins: one file says which versions, and every recipe agrees with it."""

from __future__ import annotations

import re

import pytest

from slurmlet.base.errors import UserError
from slurmlet.upstream import pins
from slurmlet.upstream.go_build import ldflags, version_tuple, wanted_go

PINS = pins.load()


@pytest.mark.parametrize("program", PINS.programs, ids=lambda program: program.name)
class TestRecipes:
    def test_requires_the_pinned_version(self, program: pins.Program) -> None:
        text = (pins.recipes_dir() / program.name / "go.mod").read_text()
        required = re.findall(rf"^\s*(?:require )?{re.escape(program.module)} (v\S+)", text, re.MULTILINE)
        assert required == [program.version]

    def test_every_package_is_a_tool_of_the_recipe(self, program: pins.Program) -> None:
        text = (pins.recipes_dir() / program.name / "go.mod").read_text()
        block = "".join(re.findall(r"^tool (?:\(\n(.*?)^\)|(\S+)$)", text, re.MULTILINE | re.DOTALL)[0])
        assert sorted(block.split()) == sorted(program.binaries.values())

    def test_its_go_sum_pins_the_module(self, program: pins.Program) -> None:
        text = (pins.recipes_dir() / program.name / "go.sum").read_text()
        assert f"{program.module} {program.version} h1:" in text

    def test_the_toolchain_wheel_is_new_enough(self, program: pins.Program) -> None:
        wanted = wanted_go(pins.recipes_dir() / program.name)
        assert version_tuple(PINS.go.version) >= version_tuple(wanted)

    def test_release_addresses_expand_and_are_encrypted(self, program: pins.Program) -> None:
        for name in program.binaries:
            for template in (program.url, program.checksums):
                url = program.expand(template, name)
                assert url.startswith("https://")
                assert "{" not in url


def test_kubernetes_staging_modules_follow_its_version() -> None:
    kubernetes = PINS.program_of("kubectl")
    text = (pins.recipes_dir() / "kubernetes" / "go.mod").read_text()
    replaced = set(re.findall(r"^\s*\S+ => k8s\.io/\S+ (v\S+)$", text, re.MULTILINE))
    assert replaced == {kubernetes.version.replace("v1.", "v0.", 1)}


def test_the_build_stamps_the_version_that_kubectl_shows() -> None:
    kubernetes = PINS.program_of("kubectl")
    assert f"version.gitVersion={kubernetes.version}" in ldflags(kubernetes)


def test_names_are_checked_ordered_and_unique() -> None:
    assert PINS.check(["etcd", "kubectl", "etcd"]) == ("kubectl", "etcd")
    assert PINS.check(None) == PINS.names()
    with pytest.raises(UserError, match="kubeadm"):
        PINS.check(["kubeadm"])


def test_a_changed_flag_is_a_different_set_and_a_changed_address_is_not() -> None:
    first = PINS.programs[0]
    changed = {**first.__dict__, "ldflags": (*first.ldflags, "-X a=b")}
    moved = {**first.__dict__, "url": "https://elsewhere.example/{name}"}
    assert pins.Program(**changed).digest() != first.digest()
    assert pins.Program(**moved).digest() == first.digest()
