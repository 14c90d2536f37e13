"""User-data of a worker: what cloud-init would read after its jinja, and what a shell would run."""

from __future__ import annotations

import base64
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from slurmlet.base.errors import UserError
from slurmlet.operators.provisioning.bootstrap.bootstrap_data import bootstrap_data, secrets_needed
from slurmlet.operators.provisioning.bootstrap.cloud_config_text import (
    cloud_config_text,
    without_jinja_comments,
)
from slurmlet.operators.provisioning.controller_lookup import ControllerFacts
from slurmlet.operators.provisioning.controller_spec import MetaDataNames, SecretKey

Obj = dict[str, Any]
WORKER, THESIS = "SlurmWorkerConfig", "VirtualKubeletConfig"
SHELL = shutil.which("sh") or "/bin/sh"


def rendered(text: str, **metadata: str) -> Obj:
    """As cloud-init does it, for the only expressions that we make ourselves."""
    header, kind, _ = text.split("\n", 2)
    assert (header, kind) == ("## template: jinja", "#cloud-config")
    for name, value in metadata.items():
        text = text.replace(f"{{{{ ds.meta_data.{name} }}}}", value)
    found: Obj = yaml.safe_load(text.replace("{{ '{#' }}", "{#"))
    return found


def files(document: Obj) -> dict[str, Obj]:
    return {one["path"]: one for one in document["write_files"]}


def join(document: Obj) -> str:
    return str(files(document)["/usr/local/sbin/slurmlet-join"]["content"])


texts = st.one_of(
    st.text(st.characters(blacklist_categories=["Cs"])),
    st.builds(
        lambda before, after: f"{before}{{{{ x['y'] }}}}{after}",
        st.text("ab '\"\\\t\n:#-{}[]|>%", max_size=12),
        st.text("ab '\"\\ \t\n:#-", max_size=12),
    ),
)
nodes = st.recursive(
    st.one_of(texts, st.booleans(), st.integers()),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.dictionaries(st.sampled_from("ghij"), inner, min_size=1, max_size=3),
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from("abcdef"), nodes))
def test_every_text_comes_out_of_yaml_as_it_went_in(document: Obj) -> None:
    text = cloud_config_text(document)
    assert (yaml.safe_load(text) or {}) == {name: value for name, value in document.items() if value}


@given(st.text("ab '\"\\\n:#-", max_size=12))
def test_an_expression_of_jinja_is_in_the_text_to_the_letter(around: str) -> None:
    assert "{{ ds.meta_data['a-b'] }}" in cloud_config_text({"a": f"{around}{{{{ ds.meta_data['a-b'] }}}}"})


def test_a_carriage_return_beside_jinja_is_refused_by_its_name() -> None:
    with pytest.raises(UserError, match=r"U\+000D"):
        cloud_config_text({"a": "{{ x }}\r\n"})


def test_a_shells_length_of_a_list_is_no_comment_of_jinja() -> None:
    assert without_jinja_comments("echo ${#a}") == "echo ${{ '{#' }}a}"
    assert without_jinja_comments("{% raw %}${#a}{% endraw %}") == "{% raw %}${#a}{% endraw %}"


def test_a_worker_takes_controller_and_key_from_its_metadata() -> None:
    text = bootstrap_data(WORKER, {"slurmd": {"features": ["gpu", "nvme"], "conf": "Gres=gpu:4"}}, "m-7", {})
    key = base64.b64encode(bytes(range(256))).decode()
    document = rendered(text, slurm_conf_server="192.0.2.1:6817", slurm_key_base64=key)
    written = files(document)["/etc/slurm/slurm.key"]
    assert (written["content"], written["encoding"], written["permissions"]) == (key, "b64", "0600")
    script = join(document)
    assert "conf_server=192.0.2.1:6817\n" in script.replace("'", "")
    assert "-N m-7 --conf 'Feature=gpu,nvme Gres=gpu:4'" in script
    assert document["runcmd"][-1].startswith("/usr/local/sbin/slurmlet-join && ")
    assert document["runcmd"][-1].endswith("> /run/cluster-api/bootstrap-success.complete")
    # Every user of the machine could read the key there.
    hidden = "chmod 0600 /run/cloud-init/instance-data.json || true"
    assert document["bootcmd"] == [hidden]
    assert hidden in document["runcmd"]


def test_other_names_of_the_metadata_are_followed() -> None:
    names = MetaDataNames(conf_server="slurm-server", key="slurm-key")
    text = bootstrap_data(WORKER, {}, "m", {}, None, names)
    assert "{{ ds.meta_data.slurm_server }}" in text
    assert "{{ ds.meta_data.slurm_key }}" in text


def test_without_metadata_address_and_key_are_written_in() -> None:
    text = bootstrap_data(WORKER, {"slurmCluster": "hpc"}, "m", {}, ControllerFacts("slurm", 6817, b"\0k"))
    assert "ds.meta_data" not in text
    document = rendered(text)
    assert base64.b64decode(files(document)["/etc/slurm/slurm.key"]["content"]) == b"\0k"
    assert "conf_server=slurm:6817\n" in join(document)
    assert "bootcmd" not in document


def test_a_key_from_a_secret_and_none_at_all() -> None:
    ref = {"name": "s", "key": "k"}
    spec: Obj = {"slurmd": {"key": {"secret": ref}}}
    assert secrets_needed(WORKER, spec) == [SecretKey("s", "k")]
    document = rendered(bootstrap_data(WORKER, spec, "m", {SecretKey("s", "k"): b"\xff"}))
    assert base64.b64decode(files(document)["/etc/slurm/slurm.key"]["content"]) == b"\xff"
    document = rendered(bootstrap_data(WORKER, {"slurmd": {"key": {"none": {}}}}, "m", {}))
    assert "/etc/slurm/slurm.key" not in files(document)
    assert "slurm.key" not in join(document)


@given(st.binary(min_size=1), st.sampled_from([None, "base64", "gzip", "gzip+base64"]))
def test_files_from_secrets_are_never_templates(content: bytes, encoding: str | None) -> None:
    held = base64.b64encode(content) if encoding and "base64" in encoding else content
    file = {"path": "/x", "contentFrom": {"secret": {"name": "s", "key": "k"}}, "permissions": "0640"}
    spec: Obj = {"files": [{**file, "encoding": encoding} if encoding else file]}
    written = files(rendered(bootstrap_data(THESIS, spec, "m", {SecretKey("s", "k"): held})))["/x"]
    assert base64.b64decode(written["content"]) == content
    assert ("gz" in written["encoding"]) == ("gz" in (encoding or ""))
    assert written["permissions"] == "0640"


def test_users_have_cloud_inits_names_of_their_fields() -> None:
    user = {
        "name": "u", "homeDir": "/h", "primaryGroup": "g", "lockPassword": False, "inactive": True,
        "sudo": "ALL=(ALL) NOPASSWD:ALL", "sshAuthorizedKeys": ["ssh-ed25519 A"],
        "passwdFrom": {"secret": {"name": "s", "key": "k"}},
    }  # fmt: skip
    document = rendered(bootstrap_data(WORKER, {"users": [user]}, "m", {SecretKey("s", "k"): b"$6$x\n"}))
    assert document["users"] == [
        {
            "name": "u", "homedir": "/h", "primary_group": "g", "lock_passwd": False, "inactive": "0",
            "sudo": "ALL=(ALL) NOPASSWD:ALL", "ssh_authorized_keys": ["ssh-ed25519 A"], "passwd": "$6$x",
        }
    ]  # fmt: skip


def test_the_thesis_worker_keeps_its_files_users_and_commands_in_their_order() -> None:
    spec: Obj = {
        "virtualKubelet": {"url": "http://172.22.0.1/virtual-kubelet", "args": ["--provider mock"]},
        "files": [{"path": "/tmp/setup.sh", "content": "#!/bin/sh\n", "permissions": "0744"}],
        "users": [{"name": "hpcuser"}],
        "commands": ["/tmp/setup.sh {{ ds.meta_data.slurm_controller_address }}", "slurmd -Z"],
    }
    document = rendered(bootstrap_data(THESIS, spec, "m", {}), slurm_controller_address="192.0.2.1")
    assert document["runcmd"][:3] == [
        "/usr/local/sbin/slurmlet-virtual-kubelet",
        "/tmp/setup.sh 192.0.2.1",
        "slurmd -Z",
    ]
    script = files(document)["/usr/local/sbin/slurmlet-virtual-kubelet"]["content"]
    assert "ExecStart=/usr/local/bin/virtual-kubelet --provider mock\n" in script
    text = str(document)
    assert "PRIVATE KEY" not in text
    assert "kubeconfig" not in text.replace("It has no kubeconfig", "")


@pytest.mark.parametrize("field", ["conf", "nodeName", "confServer"])
def test_a_word_that_a_shell_would_take_apart_is_refused(field: str) -> None:
    with pytest.raises(UserError, match="slurmd's argument"):
        bootstrap_data(WORKER, {"slurmd": {field: "x'; reboot; '"}}, "m", {})


def run_join(tmp_path: Path, text: str, conf_server: str) -> subprocess.CompletedProcess[str]:
    """The script as a machine without systemd runs it, with a slurmd that says how it was called."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, body in {"slurmd": 'printf "%s\\n" "$@"', "chown": ":", "chmod": ":", "getent": ":"}.items():
        (commands / name).write_text(f"#!/bin/sh\n{body}\n")
        (commands / name).chmod(0o755)
    (tmp_path / "slurm.key").write_text("k")
    script = join(rendered(text, slurm_conf_server=conf_server))
    script = script.replace("/etc/slurm/slurm.key", str(tmp_path / "slurm.key"))
    script = script.replace("/run/systemd/system", str(tmp_path / "no-systemd"))
    (tmp_path / "join").write_text(script)
    return subprocess.run(
        [SHELL, str(tmp_path / "join")],
        env={"PATH": f"{commands}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


def test_the_script_starts_slurmd_with_the_words_as_they_are(tmp_path: Path) -> None:
    spec: Obj = {"slurmd": {"conf": "Gres=gpu:4 Weight=2", "nodeNamePrefix": "bm-", "extraArguments": ["-v"]}}
    ran = run_join(tmp_path, bootstrap_data(WORKER, spec, "m-0", {}), "192.0.2.1:6817")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines() == [
        "-Z", "--conf-server", "192.0.2.1:6817", "-N", "bm-m-0", "--conf", "Gres=gpu:4 Weight=2", "-v",
    ]  # fmt: skip


def test_metadata_that_were_not_injected_are_told_before_anything_is_installed(tmp_path: Path) -> None:
    text = bootstrap_data(WORKER, {"slurmd": {"installCommands": ["exit 99"]}}, "m", {})
    ran = run_join(tmp_path, text, "CI_MISSING_JINJA_VAR/slurm_conf_server")
    assert ran.returncode == 1
    assert "did the Injection Webhook see them?" in ran.stderr


@pytest.mark.parametrize("held", [b"{{ 1 }}", b"{% raw", b"$6${# #}", b"a\nruncmd: [id]", b"", b"\xff"])
def test_a_secret_of_somebody_else_becomes_no_template_of_a_workers_user_data(held: bytes) -> None:
    ref = {"secret": {"name": "s", "key": "k"}}
    for spec in (
        {"users": [{"name": "u", "passwdFrom": ref}]},
        {"files": [{"path": "/x", "contentFrom": ref, "encoding": "base64"}]},
    ):
        if held or "users" in spec:
            with pytest.raises(UserError, match=r"holds no password hash|does not hold base64"):
                bootstrap_data(WORKER, spec, "m", {SecretKey("s", "k"): held})
