"""What an administrator's tool reads of Slurm: lines of squeue and scontrol, answers of slurmrestd."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from slurmlet.base.errors import SlurmError
from slurmlet.base.processes import Completed
from slurmlet.model.job_states import Stage
from slurmlet.slurm import admin_commands, admin_output, admin_rest_values
from slurmlet.slurm.admin_commands import CommandAdmin
from slurmlet.slurm.admin_output import (
    array_tasks,
    megabytes,
    node_states,
    parse_queue,
    parse_workers,
    per_node,
)
from slurmlet.slurm.admin_rest import RestAdmin
from slurmlet.slurm.command_output import SEPARATOR
from slurmlet.slurm.connection import Connection
from tests.unit.test_slurm_rest import RECORDED, body, ids

FIELDS = admin_output.QUEUE_FORMAT.replace(f":{SEPARATOR}", "").split(",")
ASKED = {
    "JobID": "12", "ArrayJobID": "12", "ArrayTaskID": "N/A", "UserName": "user1", "State": "PENDING",
    "Reason": "Resources", "Partition": "batch,gpu", "NumNodes": "2", "MaxNodes": "4", "NumCPUs": "8", "MinCPUs": "1",
    "MinMemory": "4G", "tres-alloc": "cpu=8,mem=8G,node=2,billing=8,gres/gpu=4,gres/gpu:a100=4",
    "tres-per-node": "gres/gpu:a100:2", "Feature": "ib&ssd", "OverSubscribe": "OK", "ReqSwitch": "1", "ReqNodes": "",
    "ExcNodes": "", "Reservation": "(null)", "Dependency": "(null)", "PriorityLong": "4294901755",
    "TimeLimit": "1-00:00:00", "SubmitTime": "1794821133", "EligibleTime": "1794821133", "StartTime": "N/A",
    "Account": "lab", "QOS": "normal", "NodeList": "",
}  # fmt: skip
NODE = (
    "NodeName=w1 Arch=x86_64 CoresPerSocket=1 CPUAlloc=4 CPUEfctv=15 CPUTot=16 CPULoad=0.50 AvailableFeatures=ib,ssd "
    "ActiveFeatures=ib Gres=gpu:a100:2(S:0) NodeAddr=10.0.0.7 NodeHostName=w1 Version=24.11.5 OS=Linux 6.1 #1 SMP "
    "RealMemory=6000 AllocMem=64 Sockets=16 Boards=1 State=MIXED+DRAIN+DYNAMIC_NORM* ThreadsPerCore=1 Weight=1 "
    "Owner=N/A Partitions=batch,gpu BootTime=1794821100 SlurmdStartTime=1794821133 LastBusyTime=1794821162 "
    "CfgTRES=cpu=16,mem=6000M AllocTRES=cpu=4 Reason=slurmlet-provision: it's [a@b] to go [root@1794821162] "
    "Comment=a State=DOWN here Extra=x InstanceId=i-1 Topology=tree:leaf1"
)


def line(**fields: str) -> str:
    values = {**ASKED, **{name.replace("_", "-"): value for name, value in fields.items()}}
    return "".join(f"{values[name]}{SEPARATOR}" for name in FIELDS)


def test_a_waiting_job_tells_what_it_asks_for_in_all_and_on_each_node() -> None:
    (job,) = parse_queue(line())
    assert (job.job_id, job.user, job.stage, job.reason) == ("12", "user1", Stage.QUEUED, "Resources")
    assert (job.nodes_min, job.nodes_max, job.cpus, job.memory_mb, job.memory_mb_per_node) == (
        2,
        4,
        8,
        8192,
        4096,
    )
    assert (job.gres, job.gres_per_node) == ((("gpu:a100", 4),), (("gpu:a100", 2),))
    assert (job.partitions, job.features, job.switches) == (("batch", "gpu"), "ib&ssd", 1)
    assert (job.exclusive, job.held, job.dependency, job.reservation) == (False, False, "", "")
    assert (job.limit_s, job.submitted_at_s, job.started_at_s) == (86400.0, 1794821133.0, None)
    assert (job.array_id, job.tasks_pending, job.nodes) == ("", 1, ())


def test_memory_per_cpu_is_not_taken_for_memory_of_a_node() -> None:
    (job,) = parse_queue(line(MinMemory="1G"))
    assert (job.memory_mb, job.memory_mb_per_node) == (8192, 0)


@pytest.mark.parametrize(
    ("fields", "held"),
    [
        ({"PriorityLong": "0", "Reason": "JobHeldUser"}, True),
        ({"PriorityLong": "0", "Reason": "JobHeldAdmin"}, True),
        ({"PriorityLong": "0", "Reason": "Dependency", "Dependency": "afterok:3(unfulfilled)"}, False),
        ({"PriorityLong": "0", "State": "RUNNING", "Reason": "None"}, False),
        ({"PriorityLong": "5"}, False),
    ],
)
def test_held_jobs_are_told_from_others_without_priority(fields: dict[str, str], held: bool) -> None:
    assert parse_queue(line(**fields))[0].held is held


def test_a_running_job_names_its_nodes() -> None:
    (job,) = parse_queue(line(State="RUNNING", Reason="None", NodeList="w[1-2]", StartTime="1794821140"))
    assert (job.nodes, job.started_at_s, job.reason) == (("w1", "w2"), 1794821140.0, "")


def test_lines_that_are_no_jobs_cost_nothing() -> None:
    assert parse_queue("") == []
    assert len(parse_queue(f"slurm_load_jobs error\n{line()}\nhalf a line{SEPARATOR}")) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("N/A", (1, None)),
        ("7", (1, None)),
        ("1-10", (10, None)),
        ("1-9:2%2", (5, 2)),
        ("1,3,5-6%10", (4, 10)),
    ],
)
def test_tasks_of_an_array(text: str, expected: tuple[int, int | None]) -> None:
    assert array_tasks(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4000", 4000),
        ("8G", 8192),
        ("0.50T", 524288),
        ("512K", 0),
        ("2048K", 2),
        ("0", 0),
        ("", 0),
        ("N/A", 0),
    ],
)
def test_amounts_of_memory(text: str, expected: int) -> None:
    assert megabytes(text) == expected


@pytest.mark.parametrize("text", ["gres:gpu:2", "gres/gpu:2", "gres/gpu=2", "gpu:2"])
def test_spellings_of_devices_on_each_node(text: str) -> None:
    assert per_node(text) == (("gpu", 2),)
    assert per_node("gres/shard") == (("shard", 1),)
    assert per_node("N/A") == ()


def test_a_node_tells_state_reason_and_what_it_has() -> None:
    (node,) = parse_workers(NODE)
    assert (node.state, node.flags) == ("MIXED", {"DRAIN", "DYNAMIC_NORM", "NOT_RESPONDING"})
    assert (node.reason, node.drained_by_us) == ("slurmlet-provision: it's [a@b] to go", True)
    assert (node.busy, node.drained, node.usable, node.dynamic, node.responding) == (
        True,
        False,
        False,
        True,
        False,
    )
    assert (node.cpus, node.cpus_allocated, node.memory_mb, node.memory_allocated_mb) == (15, 4, 6000, 64)
    assert (node.features, node.partitions) == ({"ib"}, {"batch", "gpu"})
    assert (node.gres, node.address, node.instance_id) == ((("gpu:a100", 2),), "10.0.0.7", "i-1")
    assert (node.booted_at_s, node.slurmd_started_at_s, node.topology) == (
        1794821100.0,
        1794821133.0,
        "tree:leaf1",
    )
    assert node.comment.startswith("a"), "what somebody wrote there does not change the state"


@pytest.mark.parametrize(
    ("text", "state", "flags"),
    [
        ("IDLE", "IDLE", set()),
        ("IDLE~", "IDLE", {"POWERED_DOWN"}),
        ("IDLE+CLOUD+POWERED_DOWN", "IDLE", {"CLOUD", "POWERED_DOWN"}),
        ("DOWN*+DRAIN", "DOWN", {"NOT_RESPONDING", "DRAIN"}),
        ("ALLOCATED+MAINT", "ALLOCATED", {"MAINTENANCE"}),
        ("", "UNKNOWN", set()),
    ],
)
def test_states_of_nodes(text: str, state: str, flags: set[str]) -> None:
    assert node_states(text.split("+")) == (state, flags)


@pytest.mark.parametrize("parser", RECORDED)
def test_answers_of_every_recorded_slurmrestd(parser: str) -> None:
    jobs = {job.job_id: job for job in admin_rest_values.queue(body(parser, "jobs"))}
    known = ids(parser)
    assert not {known["failed"], known["cancelled"]} & set(jobs), "what has ended is no demand"
    gpu, array = jobs[known["gpu"]], jobs[known["array"]]
    assert (gpu.stage, gpu.nodes, gpu.cpus, gpu.memory_mb) == (Stage.RUNNING, ("c3",), 2, 32)
    assert (array.tasks_pending, array.tasks_at_once, array.array_id) == (2, 1, known["array"])
    assert jobs[known["held"]].reason == "JobHeldUser"
    nodes = {node.name: node for node in admin_rest_values.workers(body(parser, "nodes"))}
    assert (nodes["c1"].state, nodes["c1"].cpus, nodes["c1"].cpus_allocated) == ("MIXED", 16, 2)
    assert nodes["c1"].partitions == {"batch", "short"}


def test_limits_of_partitions_as_scontrol_and_slurmrestd_write_them() -> None:
    text = (
        "PartitionName=batch AllowGroups=ALL MaxNodes=UNLIMITED MinNodes=0\n"
        "PartitionName=short AllowGroups=ALL MaxNodes=2 MaxTime=00:10:00 MinNodes=0\n"
    )
    assert admin_output.parse_partition_limits(text) == {"short": 2}
    named = [{"name": "short", "maximums": {"nodes": {"set": True, "infinite": False, "number": 2}}}]
    assert admin_rest_values.partition_limits({"partitions": named}) == {"short": 2}
    assert admin_rest_values.partition_limits(
        {"partitions": [{"name": "short", "maximum_nodes_per_job": 2}]}
    ) == {"short": 2}
    for parser in RECORDED:
        assert admin_rest_values.partition_limits(body(parser, "partitions")) == {}


def test_values_of_slurmrestd_that_only_administrators_look_at() -> None:
    def some(number: int) -> dict[str, Any]:
        return {"set": True, "infinite": False, "number": number}

    raw = {
        "job_id": 7, "user_name": "user2", "job_state": ["PENDING"], "state_reason": "Resources", "partition": "a,b",
        "node_count": some(2), "max_nodes": some(3), "tres_req_str": "cpu=4,mem=2G,node=2,gres/gpu=2",
        "tres_per_node": "gres/gpu:1", "memory_per_node": some(1024), "minimum_cpus_per_node": some(2),
        "shared": ["none"], "features": "x", "dependency": "", "hold": False, "priority": some(9),
        "required_switches": 1, "required_nodes": "", "excluded_nodes": "w9", "resv_name": "r", "account": "lab",
    }  # fmt: skip
    (job,) = admin_rest_values.queue({"jobs": [raw]})
    assert (job.nodes_min, job.nodes_max, job.cpus, job.memory_mb) == (2, 3, 4, 2048)
    assert (job.memory_mb_per_node, job.cpus_per_node, job.gres, job.gres_per_node) == (
        1024, 2, (("gpu", 2),), (("gpu", 1),),
    )  # fmt: skip
    assert (job.exclusive, job.switches, job.excluded_nodes, job.reservation) == (True, 1, "w9", "r")
    raw["hold"] = True
    assert admin_rest_values.queue({"jobs": [raw]})[0].held
    node = {"name": "w1", "state": ["IDLE", "DRAIN", "DYNAMIC_NORM"], "cpus": 4, "reason": "by a person"}
    (worker,) = admin_rest_values.workers({"nodes": [node]})
    assert (worker.drained, worker.drained_by_us, worker.dynamic) == (True, False, True)


# What becomes of refusals


def by_commands(monkeypatch: pytest.MonkeyPatch, code: int, said: str) -> CommandAdmin:
    def run(argv: Any, **_: Any) -> Completed:
        if tuple(argv[:3]) == ("scontrol", "--oneliner", "show"):
            return Completed(tuple(argv), 0, "NodeName=w1 State=IDLE+DYNAMIC_NORM", "")
        return Completed(tuple(argv), code, "", said)

    monkeypatch.setattr(admin_commands, "run", run)
    return CommandAdmin({})


@pytest.mark.parametrize(
    ("said", "reason", "transient"),
    [
        ("Requested nodes are busy", "NodeBusy", True),
        ("Invalid node state specified", "SlurmRefused", False),
        ("Unable to contact slurm controller (connect failure)", "SlurmUnavailable", True),
    ],
)
def test_why_a_record_is_not_deleted(
    monkeypatch: pytest.MonkeyPatch, said: str, reason: str, transient: bool
) -> None:
    admin = by_commands(monkeypatch, 1, f"scontrol: error: {said}")
    with pytest.raises(SlurmError) as caught:
        asyncio.run(admin.delete("w1"))
    assert (caught.value.reason, caught.value.transient) == (reason, transient)


def test_a_controller_without_nodes_has_none_and_one_that_is_away_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert asyncio.run(by_commands(monkeypatch, 1, "No nodes in the system").workers()) == []
    with pytest.raises(SlurmError):
        asyncio.run(by_commands(monkeypatch, 1, "Unable to contact slurm controller").workers())


async def with_slurmrestd(
    answer: Callable[[web.Request], tuple[int, Any]],
    work: Callable[[RestAdmin], Awaitable[None]],
    parser: int = 42,
) -> list[str]:
    asked: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        if request.path.startswith("/openapi"):
            return web.Response(text=f"/slurm/v0.0.{parser}/jobs/")
        sent = await request.text()
        asked.append(f"{request.method} {request.path} {sent}".strip())
        status, told = answer(request)
        return web.json_response(told, status=status)

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    admin = RestAdmin(Connection(kind="rest", url=f"http://127.0.0.1:{port}", user="root"))
    try:
        await work(admin)
    finally:
        await admin.close()
        await runner.cleanup()
    return asked


LISTED = {"name": "w1", "state": ["IDLE", "DYNAMIC_NORM"]}


def test_a_record_that_slurmrestd_does_not_list_is_deleted_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JWT", "token")
    asked = asyncio.run(
        with_slurmrestd(lambda _: (200, {"nodes": [LISTED], "errors": []}), lambda admin: admin.delete("w2"))
    )
    assert asked == ["GET /slurm/v0.0.42/nodes/"]


def test_changes_of_a_node_through_slurmrestd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JWT", "token")

    async def work(admin: RestAdmin) -> None:
        await admin.drain("w1", "why")
        await admin.resume("w1")
        await admin.set_address("w1", "10.0.0.1")
        await admin.delete("w1")

    asked = asyncio.run(with_slurmrestd(lambda _: (200, {"nodes": [LISTED], "errors": []}), work))
    assert asked == [
        'POST /slurm/v0.0.42/node/w1 {"state": ["DRAIN"], "reason": "why"}',
        'POST /slurm/v0.0.42/node/w1 {"state": ["UNDRAIN"], "reason": ""}',
        'POST /slurm/v0.0.42/node/w1 {"address": ["10.0.0.1"]}',
        "GET /slurm/v0.0.42/nodes/",
        "DELETE /slurm/v0.0.42/node/w1",
    ]


@pytest.mark.parametrize(
    ("number", "said", "told"),
    [
        (2018, "Invalid node name specified", None),
        (2016, "Requested nodes are busy", ("NodeBusy", True)),
        (2028, "Invalid node state specified", ("SlurmRefused", False)),
    ],
)
def test_why_a_record_is_not_deleted_through_slurmrestd(
    monkeypatch: pytest.MonkeyPatch, number: int, said: str, told: tuple[str, bool] | None
) -> None:
    monkeypatch.setenv("SLURM_JWT", "token")
    found: list[tuple[str, bool]] = []

    async def work(admin: RestAdmin) -> None:
        try:
            await admin.delete("w1")
        except SlurmError as error:
            found.append((error.reason, error.transient))

    errors = [{"error_number": number, "error": said}]

    def answer(request: web.Request) -> tuple[int, Any]:
        return (500, {"errors": errors}) if request.method == "DELETE" else (200, {"nodes": [LISTED]})

    asyncio.run(with_slurmrestd(answer, work))
    assert found == ([told] if told else [])


def test_the_oldest_slurmrestd_says_that_it_cannot_change_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JWT", "token")

    async def work(admin: RestAdmin) -> None:
        with pytest.raises(SlurmError, match="cannot change nodes"):
            await admin.drain("w1", "why")

    assert asyncio.run(with_slurmrestd(lambda _: (200, {}), work, parser=38)) == []


def test_changes_of_a_node_are_single_words_of_scontrol(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def run(argv: Any, **_: Any) -> Completed:
        asked.append(tuple(argv))
        return Completed(tuple(argv), 0, "", "")

    monkeypatch.setattr(admin_commands, "run", run)

    async def work() -> None:
        admin = CommandAdmin({})
        await admin.drain("w1", "it's $(here); a\nb")
        await admin.resume("w1")
        await admin.set_address("w1", "10.0.0.1")
        await admin.power_up("w1")
        await admin.power_down("w1")
        await admin.delete("w1")
        assert await admin.queue() == []
        await admin.close()

    asyncio.run(work())
    update = ("scontrol", "update", "nodename=w1")
    assert asked[:-1] == [
        (*update, "state=drain", "reason=it's $(here); a\nb"),
        (*update, "state=undrain", "reason="),
        (*update, "nodeaddr=10.0.0.1"),
        (*update, "state=power_up"),
        (*update, "state=power_down"),
        ("scontrol", "--oneliner", "show", "node", "w1"),
        ("scontrol", "delete", "nodename=w1"),
    ]
    assert asked[-1][:4] == ("squeue", "--noheader", "--all", "-O")


def test_a_node_of_the_configuration_is_kept_from_a_slurm_that_would_delete_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """22.05 and 23.02 do."""
    asked: list[tuple[str, ...]] = []

    def run(argv: Any, **_: Any) -> Completed:
        asked.append(tuple(argv))
        return Completed(tuple(argv), 0, "NodeName=c1 State=IDLE", "")

    monkeypatch.setattr(admin_commands, "run", run)
    with pytest.raises(SlurmError, match="not dynamic") as caught:
        asyncio.run(CommandAdmin({}).delete("c1"))
    assert not caught.value.transient
    assert not [argv for argv in asked if "delete" in argv]


def test_a_node_that_is_not_there_need_not_be_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(argv: Any, **_: Any) -> Completed:
        return Completed(tuple(argv), 1, "Node w9 not found", "")

    monkeypatch.setattr(admin_commands, "run", run)
    asyncio.run(CommandAdmin({}).delete("w9"))
