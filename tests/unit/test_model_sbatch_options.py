"""Annotations as sbatch options: every spelling that is accepted, everything hostile that is not."""

from __future__ import annotations

import shlex

import pytest

from slurmlet.base.errors import RefusedPod
from slurmlet.model import sbatch_options
from slurmlet.model.slurm_values import Option

OURS = "slurmlet.io/"
SLINKY = "slurmjob.slinky.slurm.net/"
LINE = f"{OURS}sbatch"


def words(options: list[Option]) -> list[str]:
    return [f"--{name}" if value is None else f"--{name}={value}" for name, value in options]


@pytest.mark.parametrize(
    ("annotations", "options"),
    [
        ({}, []),
        ({f"{OURS}time": "1-00:00:00"}, ["--time=1-00:00:00"]),
        ({f"{OURS}partition": "gpu,batch"}, ["--partition=gpu,batch"]),
        ({f"{OURS}account": "a"}, ["--account=a"]),
        ({f"{OURS}qos": "high"}, ["--qos=high"]),
        ({f"{OURS}constraint": "[ib&(a|b)]"}, ["--constraint=[ib&(a|b)]"]),
        ({f"{OURS}gres": "gpu:a100:2"}, ["--gres=gpu:a100:2"]),
        ({f"{OURS}licenses": "matlab:1"}, ["--licenses=matlab:1"]),
        ({f"{OURS}reservation": "r"}, ["--reservation=r"]),
        ({f"{OURS}nice": "100"}, ["--nice=100"]),
        ({f"{OURS}ntasks": "4"}, ["--ntasks=4"]),
        ({f"{OURS}exclusive": "true"}, ["--exclusive"]),
        ({f"{OURS}exclusive": ""}, ["--exclusive"]),
        ({f"{OURS}exclusive": "False"}, []),
        ({f"{OURS}exclusive": "user"}, ["--exclusive=user"]),
        ({f"{SLINKY}timelimit": "30"}, ["--time=30"]),
        ({f"{SLINKY}cpu-per-task": "2"}, ["--cpus-per-task=2"]),
        ({f"{SLINKY}mem-per-node": "2G"}, ["--mem=2G"]),
        ({f"{SLINKY}constraints": "ib"}, ["--constraint=ib"]),
        ({f"{SLINKY}wckey": "k"}, ["--wckey=k"]),
        ({f"{SLINKY}min-nodes": "2"}, ["--nodes=2"]),
        ({f"{SLINKY}max-nodes": "4"}, ["--nodes=1-4"]),
        ({f"{SLINKY}min-nodes": "2", f"{SLINKY}max-nodes": "4"}, ["--nodes=2-4"]),
        ({f"{SLINKY}exclusive": "true"}, ["--exclusive"]),
        ({"slurm-job.hpk.io/flags": "--nice=5"}, ["--nice=5"]),
        ({"slurm.hpk.io/flags": "-p short"}, ["--partition=short"]),
        # The line comes last: it wins over the single annotations.
        ({LINE: "-t 5", f"{OURS}time": "1"}, ["--time=1", "--time=5"]),
        ({"unrelated.example/time": "1", "time": "2"}, []),
    ],
)
def test_every_accepted_annotation(annotations: dict[str, str], options: list[str]) -> None:
    found, notes = sbatch_options.from_annotations(annotations)
    assert (words(found), notes) == (options, [])


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("", []),
        ("  \n ", []),
        ("--constraint=ib --nice=100", ["--constraint=ib", "--nice=100"]),
        ("--constraint ib\n--qos high", ["--constraint=ib", "--qos=high"]),
        ("--constraint='a b'", ["--constraint=a b"]),
        ('--constraint "a\\"b"', ['--constraint=a"b']),
        ("--nice", ["--nice"]),
        ("--exclusive=mcs --hold", ["--exclusive=mcs", "--hold"]),
        ("-C ib -c4 -t=5 -H", ["--constraint=ib", "--cpus-per-task=4", "--time=5", "--hold"]),
        ("-N 1-2 -w c1,c2", ["--nodes=1-2", "--nodelist=c1,c2"]),
        # A value is taken as it stands, also one that looks like an option: it stays inside its word.
        ("--account --wrap=x", ["--account=--wrap=x"]),
        ("--account=-o", ["--account=-o"]),
    ],
)
def test_a_line_of_options_is_read_as_a_shell_would(line: str, options: list[str]) -> None:
    assert words(sbatch_options.parse_line(LINE, line)) == options


@pytest.mark.parametrize(
    "text", ["$(reboot)", "`reboot`", "; reboot", "a'b", "x|y", "a > /etc/passwd", "%j", "ü"]
)
def test_shell_words_are_plain_text_in_one_option(text: str) -> None:
    """There is no shell behind it, so nothing is expanded and nothing needs refusing."""
    assert sbatch_options.from_annotations({f"{OURS}account": text}) == ([("account", text)], [])
    assert sbatch_options.parse_line(LINE, f"--account={shlex.quote(text)}") == [("account", text)]


@pytest.mark.parametrize(
    "line",
    [
        "--wrap=x", "--wrap x", "--wra=x", "--w x", "-J x --output=/etc/passwd", "--output=/etc/passwd", "-o x", "-ox",
        "--outpu=/x", "--error=/x", "-e/x", "--input=x", "--export=NONE", "--export-file=/x", "--get-user-env",
        "--array=1-9", "-a 1-9", "--requeue", "--no-requeue", "--comment=slurmlet:0:0", "--job-name=x", "-J x",
        "--chdir=/", "-D /", "--uid=0", "--gid=0", "--clusters=all", "-M all", "--parsable", "--wait", "-W",
        "--test-only", "--signal=KILL@60", "--propagate=ALL", "--container=x", "--oci=x", "--burst-buffer-file=x",
        "--open-mode=truncate", "--kill-on-invalid-dep=yes", "--nodefile=/x", "-F /x", "--ignore-pbs", "--usage",
        "--het-group=1", ":", "--", "-", "script.sh", "--constraint ib script.sh", "/etc/passwd", "=x", "--=x",
        "--TIME=1", "--time-mi=1", "--ti=1", "-Hs", "-\x00",
    ],
)  # fmt: skip
def test_what_would_change_how_the_job_runs_is_refused(line: str) -> None:
    with pytest.raises(RefusedPod) as refused:
        sbatch_options.parse_line(LINE, line)
    assert LINE in refused.value.message


CONTROL = ["a\nb", "a\rb", "a\0b", "\x1b[31m", "a\tb", "\x7f"]
KEYS = [f"{OURS}time", f"{SLINKY}qos", LINE]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in (*KEYS, f"{OURS}exclusive", f"{SLINKY}min-nodes") for value in CONTROL),
        *((key, "") for key in KEYS),
    ],
)
def test_empty_values_and_control_characters_are_refused(key: str, value: str) -> None:
    text = f"--account='{value}'" if key == LINE else value
    with pytest.raises(RefusedPod) as refused:
        sbatch_options.from_annotations({key: text})
    assert key in refused.value.message


@pytest.mark.parametrize(
    "line", ["--time", "--constraint=ib --qos", "--hold=yes", "--account='x", "-t", "--time="]
)
def test_an_incomplete_line_is_refused(line: str) -> None:
    with pytest.raises(RefusedPod):
        sbatch_options.parse_line(LINE, line)


def test_annotations_of_others_without_effect_are_told() -> None:
    options, notes = sbatch_options.from_annotations(
        {"slurm-job.hpk.io/mpi-flags": "-np 4", f"{SLINKY}user-id": "0", f"{SLINKY}job-name": "x"}
    )
    assert options == []
    assert [note.split(":")[0] for note in notes] == [
        "slurm-job.hpk.io/mpi-flags", f"{SLINKY}user-id", f"{SLINKY}job-name",
    ]  # fmt: skip


def test_unknown_annotations_under_our_prefix_are_found() -> None:
    annotations = {
        f"{OURS}tiem": "1",
        f"{OURS}time": "1",
        f"{OURS}job-id": "7",
        "example.com/x": "",
        LINE: "",
    }
    known = frozenset({f"{OURS}job-id"})
    assert sbatch_options.unknown_annotations(annotations, known) == [f"{OURS}tiem"]
