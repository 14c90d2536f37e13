"""The machine's first boot: what a bootstrap Secret and metadata come to on a machine of the testbed."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from pathlib import Path

import pytest

from slurmlet.base.processes import Completed
from slurmlet.testbed.provisioning import cloud_init
from slurmlet.testbed.provisioning.cloud_init import CloudInitError

HEAD = "## template: jinja\n#cloud-config\n"


class TestMetadata:
    def test_a_value_takes_the_place_of_its_name(self) -> None:
        text = "{{ ds.meta_data.a }} {{ds.meta_data['b-c']}} {{ ds.meta_data.b_c }}"
        assert cloud_init.render(text, {"a": "1", "b-c": "2"}) == "1 2 2"

    def test_what_metadata_lacks_is_named(self) -> None:
        with pytest.raises(CloudInitError, match=r"ds\.meta_data\.key") as caught:
            cloud_init.render("{{ ds.meta_data.key }}", {"name": "w"})
        assert "name" in caught.value.hint

    def test_a_text_of_its_own_stays(self) -> None:
        assert cloud_init.render("a {{ '{#' }} b", {}) == "a {# b"

    @pytest.mark.parametrize("text", ["{{ ds.meta_data.a | upper }}", "{% if x %}", "{{ v1.region }}"])
    def test_other_jinja_is_refused(self, text: str) -> None:
        with pytest.raises(CloudInitError, match="does not understand"):
            cloud_init.render(text, {"a": "1"})

    def test_without_the_header_nothing_is_replaced(self) -> None:
        boot = cloud_init.read("#cloud-config\nruncmd: ['echo {{ x }}']\n", {})
        assert boot.commands == (("sh", "-c", "echo {{ x }}"),)

    def test_the_secret_is_a_map_of_strings(self) -> None:
        assert cloud_init.meta_data("a: 1\nb: x\n") == {"a": "1", "b": "x"}
        with pytest.raises(CloudInitError, match="not a mapping"):
            cloud_init.meta_data("- a\n")


class TestReading:
    def test_a_key_of_any_bytes_arrives(self) -> None:
        key = bytes(range(256)) * 4
        encoded = base64.b64encode(key).decode()
        text = HEAD + "write_files: [{path: /k, encoding: b64, content: '{{ ds.meta_data.key }}'}]\n"
        assert cloud_init.read(text, {"key": encoded}).files[0].content == key

    def test_compressed_content_is_unpacked(self) -> None:
        encoded = base64.b64encode(gzip.compress(b"hello")).decode()
        text = f"#cloud-config\nwrite_files: [{{path: /k, encoding: gz+b64, content: {encoded}}}]\n"
        assert cloud_init.read(text, {}).files[0].content == b"hello"

    def test_the_hostname_is_that_of_the_metadata_unless_the_user_data_says_another(self) -> None:
        assert cloud_init.read("#cloud-config\n{}\n", {"local-hostname": "w1"}).hostname == "w1"
        assert cloud_init.read("#cloud-config\nhostname: w2\n", {"local-hostname": "w1"}).hostname == "w2"

    def test_a_module_that_is_not_there_is_refused(self) -> None:
        with pytest.raises(CloudInitError, match="power_state"):
            cloud_init.read("#cloud-config\npower_state: {mode: reboot}\n", {})

    def test_a_script_is_refused(self) -> None:
        with pytest.raises(CloudInitError, match="#cloud-config"):
            cloud_init.read("#!/bin/sh\n", {})


class TestActing:
    def run_on(self, root: Path, text: str, code: int = 0) -> list[tuple[str, ...]]:
        ran: list[tuple[str, ...]] = []

        def run(argv: Sequence[str]) -> Completed:
            ran.append(tuple(argv))
            return Completed(tuple(argv), code, "", "no")

        cloud_init.act(cloud_init.read(text, {}), root, run, root / "log")
        return ran

    def test_files_have_mode_content_and_owner_before_commands_run(self, tmp_path: Path) -> None:
        text = (
            "#cloud-config\n"
            "write_files: [{path: /etc/slurm/k, permissions: '0600', owner: 'slurm:slurm', content: x}]\n"
            "runcmd: [[slurmd, -Z]]\n"
        )
        ran = self.run_on(tmp_path, text)
        assert (tmp_path / "etc/slurm/k").read_text() == "x"
        assert (tmp_path / "etc/slurm/k").stat().st_mode & 0o777 == 0o600
        assert ran == [("chown", "slurm:slurm", "/etc/slurm/k"), ("slurmd", "-Z")]

    def test_boot_commands_come_before_files_and_other_commands(self, tmp_path: Path) -> None:
        text = "#cloud-config\nruncmd: [[b]]\nbootcmd: [[a]]\n"
        assert self.run_on(tmp_path, text) == [("a",), ("b",)]

    def test_the_first_failing_command_ends_the_boot(self, tmp_path: Path) -> None:
        with pytest.raises(CloudInitError, match="command of the user data failed"):
            self.run_on(tmp_path, "#cloud-config\nruncmd: [[a], [b]]\n", code=1)
