"""A pod as an sbatch call: golden options, hostile paths, the key in the comment."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slurmlet.base.errors import RefusedPod
from slurmlet.model.ids import JobId
from slurmlet.model.pod_job import JobPlace, comment, job_name, job_request, uid_of
from slurmlet.model.pool import node_of
from slurmlet.model.slurm_values import Job
from slurmlet.slurm.command_options import sbatch_words

UID = "0b5e4c2a-7c1f-4d57-9d2c-3f2d5b6a7e01"


def place(home: str = "/home/user1") -> JobPlace:
    root = Path(home) / ".slurmlet/default"
    return JobPlace(
        "default",
        "deadbeef",
        "batch",
        root / "runner.pyz",
        root / "pods" / UID,
        root / "pods" / UID / "job.log",
    )


def pod(annotations: dict[str, str] | None = None, **resources: Any) -> dict[str, Any]:
    metadata = {"name": "web-0", "namespace": "shop", "uid": UID, "annotations": annotations}
    return {
        "metadata": metadata,
        "spec": {"containers": [{"name": "c", "image": "i", "resources": resources}]},
    }


def test_the_whole_call_for_a_plain_pod() -> None:
    request = job_request(pod(requests={"cpu": "1500m", "memory": "100M", "nvidia.com/gpu": "2"}), place())
    assert sbatch_words(request.spec) == [
        "--no-requeue",
        f"--output=/home/user1/.slurmlet/default/pods/{UID}/job.log",
        "--open-mode=append",
        f"--job-name=web-0.shop.default.deadbeef.{UID}",
        f"--comment=slurmlet:deadbeef:{UID} cluster=default pod=shop/web-0",
        "--export=ALL",
        f"--chdir=/home/user1/.slurmlet/default/pods/{UID}",
        "--partition=batch",
        "--nodes=1",
        "--ntasks=1",
        "--cpus-per-task=2",
        "--mem=96M",
        "--gres=gpu:2",
    ]
    assert request.spec.script == (
        "#!/bin/sh\n"
        f"unset SLURM_JWT\n"
        f"exec python3 -IS /home/user1/.slurmlet/default/runner.pyz /home/user1/.slurmlet/default/pods/{UID}\n"
    )
    assert request.notes == ()


@pytest.mark.parametrize(
    ("requests", "there", "not_there"),
    [
        ({}, "--cpus-per-task=1", "--mem"),
        ({"cpu": "100m"}, "--cpus-per-task=1", "--mem"),
        ({"cpu": "0"}, "--cpus-per-task=1", "--mem"),
        # --mem=0 would be all of the node's memory.
        ({"memory": "0"}, "--cpus-per-task=1", "--mem"),
        ({"memory": "1"}, "--mem=1M", "--gres"),
        ({"amd.com/gpu": "1"}, "--gres=gpu:1", "--mem"),
    ],
)
def test_small_requests(requests: dict[str, str], there: str, not_there: str) -> None:
    options = sbatch_words(job_request(pod(requests=requests), place()).spec)
    assert there in options
    assert not any(word.startswith(not_there) for word in options)


def test_annotations_come_last_so_that_they_win() -> None:
    annotations = {"slurmlet.io/partition": "short", "slurmlet.io/sbatch": "--cpus-per-task=4 --mem=2G"}
    request = job_request(pod(annotations, requests={"cpu": "1", "memory": "1Gi"}), place())
    options = sbatch_words(request.spec)
    assert options[-3:] == ["--partition=short", "--cpus-per-task=4", "--mem=2G"]
    assert request.spec.asked_partition == "short"
    assert options.index("--partition=batch") < options.index("--partition=short")


@pytest.mark.parametrize(
    ("line", "dropped", "kept"),
    [
        ("--mem-per-cpu=1G", "--mem=", "--cpus-per-task="),
        ("--mem-per-gpu=1G", "--mem=", "--cpus-per-task="),
        ("--cpus-per-gpu=4", "--cpus-per-task=", "--mem="),
        ("--tres-per-task=cpu=4", "--cpus-per-task=", "--mem="),
        ("--tres-per-task=gres/gpu:1,cpu:4", "--cpus-per-task=", "--mem="),
        ("--tres-per-task=gres/gpu:1", "--nothing", "--cpus-per-task="),
    ],
)
def test_what_sbatch_refuses_beside_an_option_of_the_users_is_left_out(
    line: str, dropped: str, kept: str
) -> None:
    """sbatch 24.11: "--mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive", and so on."""
    annotated = pod({"slurmlet.io/sbatch": line}, requests={"cpu": "2", "memory": "1Gi"})
    options = sbatch_words(job_request(annotated, place()).spec)
    assert options[-1] == line
    assert not any(word.startswith(dropped) for word in options)
    assert any(word.startswith(kept) for word in options)


def test_notes_name_typing_errors_but_not_the_hubs_own_annotations() -> None:
    annotations = {"slurmlet.io/tiem": "5", "slurmlet.io/job-id": "7", "slurmlet.io/host": "c1"}
    assert job_request(pod(annotations), place()).notes == ("slurmlet.io/tiem: no such annotation, ignored",)


def test_a_bad_annotation_refuses_the_pod() -> None:
    with pytest.raises(RefusedPod, match=r"slurmlet\.io/sbatch"):
        job_request(pod({"slurmlet.io/sbatch": "--wrap=id"}), place())


HOSTILE = [
    "a'; echo foo",
    "with space",
    "tab\there",
    "$(echo foo)",
    "`echo foo`",
    'q"q',
    "-rf",
    "new\nline",
    "100%j",
    "*",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_home_directories_reach_the_runner_unharmed(name: str, tmp_path: Path) -> None:
    """The script is run by a real shell, with a python3 that tells its arguments."""
    home, tools = tmp_path / name, tmp_path / "bin"
    home.mkdir()
    tools.mkdir()
    teller = tools / "python3"
    teller.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done\n')
    teller.chmod(0o700)
    where = place(str(home))
    script = job_request(pod(), where).spec.script
    path = f"{tools}:{os.environ['PATH']}"
    told = subprocess.run(
        ["sh", "-s"], input=script.encode(), env={"PATH": path}, capture_output=True, check=True
    )
    assert told.stdout == f"-IS\0{where.runner}\0{where.pod_dir}\0".encode()
    assert told.stderr == b""


@pytest.mark.parametrize("name", HOSTILE)
def test_every_option_is_one_word_that_begins_with_dashes(name: str) -> None:
    options = sbatch_words(job_request(pod(), place(f"/home/{name}")).spec)
    assert all(word.startswith("--") for word in options)
    assert f"--chdir=/home/{name}/.slurmlet/default/pods/{UID}" in options


def test_percent_signs_are_no_file_name_pattern() -> None:
    words = sbatch_words(job_request(pod(), place("/home/100%j")).spec)
    (output,) = (word for word in words if word.startswith("--output="))
    assert output == f"--output=/home/100%%j/.slurmlet/default/pods/{UID}/job.log"


@pytest.mark.parametrize(
    ("text", "uid"),
    [
        (comment("deadbeef", UID), UID),
        (comment("deadbeef", UID, "cluster=default pod=a/b"), UID),
        (f"slurmlet:deadbeef:{UID}\tx", UID),
        (comment("cafebabe", UID), None),
        (f"slurmlet:deadbeef:{UID}:x", None),
        (f"slurmlet:deadbeefx:{UID}", None),
        (f"x slurmlet:deadbeef:{UID}", None),
        (f"Slurmlet:deadbeef:{UID}", None),
        ("slurmlet:deadbeef", None),
        ("", None),
        ("   ", None),
        ("(null)", None),
    ],
)
def test_a_job_is_known_by_the_first_word_of_its_comment(text: str, uid: str | None) -> None:
    assert uid_of("deadbeef", job_with(comment=text)) == uid


def job_with(comment: str = "site policy", name: str = "") -> Job:
    return Job(JobId("1"), "RUNNING", "", "", "batch", comment, name)


@pytest.mark.parametrize(
    ("name", "uid"),
    [
        (job_name("web-0.shop.default", "deadbeef", UID), UID),
        (job_name("web-0.shop.default", "cafebabe", UID), None),
        (job_name("default", "deadbeef", "pool-0a1b2c"), None),
        (f"deadbeef.{UID}", None),
        ("web-0.shop.default.deadbeef.", None),
        ("", None),
    ],
)
def test_a_job_whose_comment_was_rewritten_is_known_by_its_name(name: str, uid: str | None) -> None:
    assert uid_of("deadbeef", job_with(name=name)) == uid


def test_a_node_whose_comment_was_rewritten_is_known_by_its_name() -> None:
    assert node_of("deadbeef", job_with(name=job_name("default", "deadbeef", "pool-0a1b2c"))) == "pool-0a1b2c"
    assert node_of("deadbeef", job_with(name=job_name("web-0.shop.default", "deadbeef", UID))) == ""
    assert node_of("cafebabe", job_with(name=job_name("default", "deadbeef", "pool-0a1b2c"))) == ""


def test_a_pod_that_does_not_say_starts_as_its_cluster_does() -> None:
    where = dataclasses.replace(place(), launch="auto")
    assert job_request(pod(), where).launch == "auto"
    assert job_request(pod({"slurmlet.io/launch": "batch"}), where).launch == "batch"
    assert job_request(pod(), place()).launch == "batch"
