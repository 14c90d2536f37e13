"""The conformance suite's pure parts: its recipe, its images, reading its reports."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

from slurmlet.base.errors import UserError
from slurmlet.testbed import config_files, hosts, testbed_plan
from slurmlet.testbed.conformance import pod_spread, suite_build, suite_images, suite_results
from slurmlet.upstream import pins

RECIPE = (pins.recipes_dir() / suite_build.RECIPE / "go.mod").read_text()


def spec(text: str, state: str, *, kind: str = "It", message: str = "", seconds: float = 1) -> dict[str, Any]:
    """One entry of ginkgo's report, with the fields it really has."""
    failure = {"Message": message, "Location": {"FileName": "/x/test/e2e/node/pods.go", "LineNumber": 7}}
    return {
        "ContainerHierarchyTexts": ["[sig-node] Pods"] if text else None,
        "LeafNodeType": kind,
        "LeafNodeText": text,
        "State": state,
        "RunTime": int(seconds * 1e9),
        **({"Failure": failure} if message else {}),
    }


def report(*specs: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"SuiteDescription": "Kubernetes e2e suite", "SpecReports": list(specs)}]


class TestRecipe:
    def test_is_of_the_kubernetes_that_is_pinned(self) -> None:
        kubernetes = pins.load().program_of("kubectl")
        assert re.findall(r"^\s*k8s\.io/kubernetes (v\S+)", RECIPE, re.MULTILINE) == [kubernetes.version]
        replaced = set(re.findall(r"^\s*\S+ => k8s\.io/\S+ (v\S+)$", RECIPE, re.MULTILINE))
        assert replaced == {kubernetes.version.replace("v1.", "v0.", 1)}

    def test_names_every_package_that_is_built(self) -> None:
        block = re.findall(r"^tool \(\n(.*?)^\)", RECIPE, re.MULTILINE | re.DOTALL)[0]
        assert sorted(block.split()) == sorted(suite_build.PROGRAMS.values())

    def test_only_the_suite_is_a_test_binary(self) -> None:
        verbs = {
            name: suite_build.go_arguments(name, package, "-s", Path("/x"))[0]
            for name, package in suite_build.PROGRAMS.items()
        }
        assert verbs == {"agnhost": "build", "nnp": "build", "e2e.test": "test"}


class TestReports:
    def test_tell_passed_from_failed_and_where(self) -> None:
        found = suite_results.outcomes(
            report(spec("works", "passed", seconds=2.5), spec("breaks", "failed", message="timed\n  out"))
        )
        assert found[0] == suite_results.Outcome("[sig-node] Pods works", "passed", 2.5)
        assert (found[1].state, found[1].message, found[1].where) == ("failed", "timed out", "pods.go:7")

    @pytest.mark.parametrize("state", ["panicked", "timedout", "interrupted", "aborted"])
    def test_whatever_is_neither_passed_nor_skipped_failed(self, state: str) -> None:
        assert suite_results.outcomes(report(spec("x", state, message="why")))[0].state == "failed"

    def test_what_the_focus_left_out_is_no_outcome_and_what_skipped_itself_is(self) -> None:
        found = suite_results.outcomes(
            report(spec("unasked", "skipped"), spec("lacks", "skipped", message="no GPU"))
        )
        assert [(one.name, one.state) for one in found] == [("[sig-node] Pods lacks", "skipped")]

    def test_a_suite_that_could_not_begin_says_why(self) -> None:
        broken = report(spec("", "failed", kind="SynchronizedBeforeSuite", message="no nodes"))
        assert suite_results.suite_problem(broken) == "no nodes"
        assert suite_results.suite_problem(report(spec("works", "passed"))) == ""

    def test_a_spec_nobody_reported_is_unknown(self) -> None:
        found = suite_results.merged([suite_results.Outcome("a", "passed")], ["a", "b"])
        assert [one.state for one in found] == ["passed", "unknown"]
        assert suite_results.summary(found) == {"passed": 1, "failed": 0, "skipped": 0, "unknown": 1}


class TestSlices:
    def test_serial_specs_run_alone_and_last(self) -> None:
        assert suite_results.slices(["a", "b [Serial] b", "c", "d"], 2) == [
            ["a", "c"],
            ["d"],
            ["b [Serial] b"],
        ]

    def test_the_focus_picks_the_named_specs_only(self) -> None:
        names = ["[sig-storage] EmptyDir volumes should support (root,0644,tmpfs)", "a.b"]
        focus = re.compile(suite_results.focus(names))
        assert focus.search(f"Kubernetes e2e suite {names[0]}")
        assert not focus.search("[sig-storage] EmptyDir volumes should support (root,0666,tmpfs)")
        assert not focus.search("aXb")


class TestSpreading:
    def test_every_host_gets_one_cpu_and_nothing_else_changes(self) -> None:
        config = "SelectType=x\nNodeName=c[1-3] CPUs=16 RealMemory=6000\nPartitionName=batch Nodes=c[1-3]\n"
        assert pod_spread.one_cpu_each(config) == config.replace("CPUs=16", "CPUs=1")
        assert pod_spread.one_cpu_each(pod_spread.one_cpu_each(config)) == pod_spread.one_cpu_each(config)

    def test_matches_what_the_testbed_writes(self) -> None:
        config = config_files.slurm_conf(testbed_plan.Plan(nodes=3))
        assert "CPUs=1 " in pod_spread.one_cpu_each(config)

    def test_keeps_its_hands_off_everybodys_testbed(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="one of its own"):
            pod_spread.spread(hosts.Testbed(testbed_plan.Paths(tmp_path), testbed_plan.Plan()))


class TestImages:
    def test_names_come_from_the_suite_and_what_nobody_can_make_is_left_out(self) -> None:
        listed = (
            "registry.k8s.io/e2e-test-images/agnhost:2.63.0\nregistry.k8s.io/pause:3.10.2\n"
            "registry.k8s.io/e2e-test-images/volume/nfs:1.6.0\ninvalid.registry.k8s.io/invalid/alpine:3.1\n"
            "gcr.io/k8s-authenticated-test/agnhost:2.6\n"
        )
        assert suite_images.wanted(listed) == {
            "registry.k8s.io/e2e-test-images/agnhost:2.63.0": "agnhost",
            "registry.k8s.io/pause:3.10.2": "pause",
        }

    @pytest.mark.parametrize("name", suite_images.RECIPES)
    def test_an_archive_holds_the_program_and_starts_it(self, name: str, tmp_path: Path) -> None:
        config, layer = opened(name, tmp_path)
        start = [*(config.get("Entrypoint") or []), *(config.get("Cmd") or [])]
        found = {member.name: member for member in layer.getmembers()}
        assert start
        assert any(
            place in found for place in (start[0].lstrip("/"), f"bin/{start[0]}", f"usr/local/bin/{start[0]}")
        )
        shell = "bash" if suite_images.RECIPES[name].nettools else "busybox"
        assert (found["bin/sh"].linkname, found["usr/local/bin/sh"].linkname) == (shell, "/bin/bash")
        assert found["bin/ls"].linkname == "busybox"
        assert found["tmp"].mode == 0o1777
        assert len(found) == len(layer.getmembers())

    def test_only_those_that_ask_the_network_have_tools_for_it(self, tmp_path: Path) -> None:
        names = {name: opened(name, tmp_path)[1].getnames() for name in suite_images.RECIPES}
        assert [name for name, found in names.items() if "usr/bin/dig" in found] == [
            "agnhost",
            "glibc-dns-testing",
        ]

    def test_programs_and_libraries_are_taken_out_of_an_image_and_links_with_them(
        self, tmp_path: Path
    ) -> None:
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as tar:
            for name in (
                "usr/bin/dig",
                "usr/bin/nc.openbsd",
                "usr/lib/x-linux-gnu/liba.so.1.2",
                "usr/share/x",
            ):
                info = tarfile.TarInfo(name)
                info.size = 4
                tar.addfile(info, io.BytesIO(b"data"))
            for name, target in (("usr/bin/nc", "nc.openbsd"), ("usr/lib/x-linux-gnu/liba.so.1", "liba.so.1.2"),
                                 ("usr/lib/x-linux-gnu/libb.so", "nowhere")):  # fmt: skip
                link = tarfile.TarInfo(name)
                link.type, link.linkname = tarfile.SYMTYPE, target
                tar.addfile(link)
        with tarfile.open(tmp_path / "a.tar", "w") as tar:
            info = tarfile.TarInfo("layer.tar")
            info.size = len(layer.getvalue())
            tar.addfile(info, io.BytesIO(layer.getvalue()))
        lib = "usr/lib/x-linux-gnu"
        wanted = {"usr/bin/dig", "usr/bin/nc", f"{lib}/liba.so.1.2", f"{lib}/liba.so.1"}
        assert suite_images.files_of(tmp_path / "a.tar") == dict.fromkeys(wanted, b"data")

    def test_nonewprivs_is_setuid_and_nonroot_has_a_user(self, tmp_path: Path) -> None:
        assert opened("nonewprivs", tmp_path)[1].getmember("usr/local/bin/nnp").mode == 0o6755
        assert opened("nonroot", tmp_path)[0]["User"] == "1234"


def opened(name: str, folder: Path) -> tuple[dict[str, Any], tarfile.TarFile]:
    """(config, layer) of an image, made with a busybox that only lists its applets."""
    busybox = folder / "busybox"
    busybox.write_text("#!/bin/sh\nprintf 'busybox\\nsh\\nls\\nhttpd\\n'\n")
    busybox.chmod(0o755)
    for program in (*suite_build.PROGRAMS, *suite_build.FILES):
        (folder / program).write_bytes(b"program")
    tools = suite_images.Tools(busybox, {"bin/bash": b"shell"}, {"usr/bin/dig": b"dig"})
    made = tarfile.open(fileobj=io.BytesIO(suite_images.archive(name, suite_build.Built(folder), tools)))  # noqa: SIM115
    manifest = json.loads(made.extractfile("manifest.json").read())[0]  # type: ignore[union-attr]
    config = json.loads(made.extractfile(manifest["Config"]).read())  # type: ignore[union-attr]
    layer = tarfile.open(fileobj=io.BytesIO(made.extractfile("layer.tar").read()))  # type: ignore[union-attr]  # noqa: SIM115
    return config["config"], layer
