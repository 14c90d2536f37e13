"""slurmrestd's answers, as they were recorded from real ones (tests/unit/slurmrestd), and what is made of trouble.

The server here is a small one on loopback that says what it is told; the real one has tests/e2e/test_slurm_contract.py.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slurmlet.base.errors import SlurmError, UserError
from slurmlet.model.ids import JobId
from slurmlet.model.slurm_values import Grant, JobSpec
from slurmlet.slurm import connection, rest_submission, rest_token, rest_values
from slurmlet.slurm.connection import Connection
from slurmlet.slurm.rest import RestSlurm
from slurmlet.slurm.rest_token import Token
from tests.unit.loopback import make_keys

RECORDED = {
    path.stem.rpartition(".")[2]: json.loads(path.read_text())
    for path in sorted(Path(__file__).with_name("slurmrestd").glob("v0.0.*.json"))
}
NOW_S = 1_894_809_490.0  # later than every recording
SPEC = JobSpec("n", "#!/bin/sh\n", comment="c", partition="batch", tasks=1, memory_mb=32, time_limit_min=5)
Answer = tuple[int, Any]


def body(parser: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = RECORDED[parser]["answers"][name]["body"]
    return found


def ids(parser: str) -> dict[str, str]:
    found: dict[str, str] = RECORDED[parser]["ids"]
    return found


# What was recorded


@pytest.mark.parametrize("parser", RECORDED)
def test_jobs_of_every_recorded_parser(parser: str) -> None:
    listed = rest_values.jobs(body(parser, "jobs"), "user1", 1001, NOW_S)
    found = {job.job_id: job for job in listed}
    job = {name: found[JobId(number)] for name, number in ids(parser).items()}
    assert (job["gpu"].state, job["gpu"].name, job["gpu"].comment) == ("RUNNING", "gpu job", "a|b 'c'")
    assert (job["gpu"].limit_s, job["gpu"].nodes, job["gpu"].reason) == (600.0, "c3", "")
    assert job["gpu"].ends_at_s == (job["gpu"].starts_at_s or 0) + 600
    assert (job["held"].state, job["held"].reason, job["held"].partition) == (
        "PENDING",
        "JobHeldUser",
        "short",
    )
    assert (job["held"].starts_at_s, job["held"].nodes) == (None, "")
    assert (job["two"].node_count, job["two"].limit_s, job["two"].left_s) == (2, None, None)
    assert job["two"].ends_at_s is None
    assert job["failed"].state == job["killed"].state == "FAILED"
    assert job["cancelled"].state == "CANCELLED"
    assert job["array"].state == "PENDING", "what waits of an array has the array's own id"
    assert all(one.submitted_at_s for one in listed)
    assert rest_values.jobs(body(parser, "jobs"), "user2", 1002, NOW_S) == [], "slurmctld lists everybody's"


@pytest.mark.parametrize("parser", RECORDED)
def test_grants_nodes_and_partitions_of_every_recorded_parser(parser: str) -> None:
    assert rest_values.grants(body(parser, "gpu")) == {"c3": Grant(2, 32, (("gpu", 1),))}
    assert rest_values.grants(body(parser, "two")) == {"c1": Grant(1, 32), "c2": Grant(1, 32)}
    nodes = rest_values.nodes(body(parser, "nodes"))
    assert [(node.name, node.cpus, node.memory_mb, node.usable) for node in nodes] == [
        ("c1", 16, 6000, True), ("c2", 16, 6000, True), ("c3", 16, 6000, True),
    ]  # fmt: skip
    assert nodes[2].gres == {"gpu:2"}
    batch, short = rest_values.partitions(body(parser, "partitions"), nodes, "batch")
    assert (batch.name, batch.default, batch.time_limit, batch.gpus) == ("batch", True, "infinite", 2)
    assert (short.name, short.default, short.time_limit, short.cpus) == ("short", False, "10:00", 48)


@pytest.mark.parametrize("parser", RECORDED)
def test_ends_of_every_recorded_parser(parser: str) -> None:
    (ended,) = rest_values.accounted(body(parser, "account")).values()
    assert (ended.job_id, ended.state) == (ids(parser)["cancelled"], "CANCELLED")
    assert ended.started_at_s is not None
    by_id = {str(raw["job_id"]): rest_values.remembered(raw) for raw in body(parser, "jobs")["jobs"]}
    failed, killed = by_id[ids(parser)["failed"]], by_id[ids(parser)["killed"]]
    assert (failed.exit_code, failed.signal, failed.state) == (3, 0, "FAILED")
    assert (killed.exit_code, killed.signal, killed.state) == (0, 9, "FAILED")
    assert rest_values.release(body(parser, "jobs")) in RECORDED[parser]["recorded"]


def test_a_flag_tells_more_than_the_state_beside_it() -> None:
    assert rest_values.job_state("PENDING") == "PENDING"
    assert rest_values.job_state(["RUNNING"]) == "RUNNING"
    assert rest_values.job_state(["CANCELLED", "COMPLETING"]) == "COMPLETING"
    assert rest_values.job_state(["RUNNING", "CONFIGURING"]) == "CONFIGURING"
    assert rest_values.job_state([]) == "UNKNOWN"


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ({"set": True, "infinite": False, "number": 5}, 5.0), ({"set": False, "infinite": False, "number": 0}, None),
        ({"set": True, "infinite": True, "number": 0}, None), (7, 7.0), (4294967295, None), (4294967294, None),
        (None, None), ("x", None),
    ],
)  # fmt: skip
def test_numbers_of_all_versions(raw: Any, value: float | None) -> None:
    assert rest_values.number(raw) == value


@pytest.mark.parametrize(
    ("raw", "word", "usable"),
    [
        (["IDLE"], "idle", True), (["IDLE", "DRAIN"], "drained", False), (["MIXED", "DRAIN"], "draining", False),
        (["DOWN", "NOT_RESPONDING"], "down", False), (["IDLE", "POWERED_DOWN"], "powered_down", True),
        (["MIXED", "PLANNED"], "mixed", True), (["IDLE", "PLANNED"], "planned", True),
        (["IDLE", "COMPLETING"], "completing", True),
        (["IDLE", "MAINTENANCE"], "maint", False), ([], "unknown", False),
    ],
)  # fmt: skip
def test_nodes_are_named_as_sinfo_names_them(raw: list[str], word: str, usable: bool) -> None:
    (node,) = rest_values.nodes({"nodes": [{"name": "c1", "state": raw}]})
    assert (node.state, node.usable) == (word, usable)


def test_v45_tells_the_default_partition() -> None:
    """Made after the source of 26.05 (data_parser v0.0.45, PARTITION_FLAGS); no such slurmrestd was asked."""
    raws = [{"name": "a", "partition": {"state": ["UP"]}}, {"name": "b", "flags": ["DEFAULT"]}]
    assert [one.default for one in rest_values.partitions({"partitions": raws}, [])] == [False, True]
    assert [one.default for one in rest_values.partitions({"partitions": raws[:1]}, [])] == [True], (
        "the only one"
    )


def test_of_a_requeued_job_the_last_record_counts() -> None:
    def record(submission: int, state: str) -> dict[str, Any]:
        return {
            "job_id": 7,
            "state": {"current": [state]},
            "time": {"submission": submission},
            "exit_code": {},
        }

    found = rest_values.accounted({"jobs": [record(20, "COMPLETED"), record(10, "NODE_FAIL")]})
    assert found[JobId("7")].state == "COMPLETED"


# What is asked for


def test_a_job_as_new_parsers_want_it() -> None:
    asked = rest_submission.body(SPEC, 42, {"PATH": "/bin"})
    assert set(asked) == {"job"}, "a script beside the job is deprecated from 25.05 on"
    job = asked["job"]
    assert (job["script"], job["environment"]) == ("#!/bin/sh\n", ["PATH=/bin"])
    assert job["memory_per_node"] == {"set": True, "infinite": False, "number": 32}
    assert job["time_limit"]["number"] == 5


def test_a_job_as_22_05_wants_it() -> None:
    spec = JobSpec("n", "s", nodes=2, gres=(("gpu", 1),), memory_mb=32, environment={"A": "b"})
    asked = rest_submission.body(spec, 38, {"PATH": "/bin"})
    assert asked["script"] == "s"
    job = asked["job"]
    assert (job["nodes"], job["gres"], job["memory_per_node"]) == ("2", "gpu:1", 32)
    assert job["environment"] == {"PATH": "/bin", "A": "b"}


def with_options(*options: tuple[str, str | None], parser: int = 42) -> dict[str, Any]:
    found: dict[str, Any] = rest_submission.body(
        JobSpec("n", "s", partition="a", options=options), parser, {}
    )["job"]
    return found


def test_options_are_translated_and_win() -> None:
    job = with_options(
        ("partition", "b"), ("time", "1-12:30"), ("mem", "4G"), ("gres", "gpu:a100:2,shard:1"), ("nice", None),
        ("exclusive", None), ("nodelist", "c1,c2"), ("hold", None), ("constraint", "ib&ssd"),
    )  # fmt: skip
    assert (job["partition"], job["time_limit"]["number"], job["memory_per_node"]["number"]) == (
        "b",
        2190,
        4096,
    )
    assert (job["tres_per_node"], job["nice"], job["shared"]) == (
        "gres/gpu:a100:2,gres/shard:1",
        100,
        ["none"],
    )
    assert (job["required_nodes"], job["hold"], job["constraints"]) == (["c1", "c2"], True, "ib&ssd")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("bb", "x", "--bb"), ("begin", "now+1hour", "--begin"), ("mem", "lots", "--mem=lots"),
        ("time", "soon", "--time=soon"), ("ntasks", "many", "--ntasks=many"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_for_this_way_is_refused_by_name(name: str, value: str, words: str) -> None:
    with pytest.raises(SlurmError, match=words) as refused:
        with_options((name, value))
    assert (refused.value.transient, refused.value.reason) == (False, "SlurmRefused")


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("30", 30), ("0:30", 1), ("1:30:00", 90), ("2-0", 2880), ("1-1:1", 1501), ("1-01:01:01", 1502), ("infinite", None),
        ("UNLIMITED", None),
    ],
)  # fmt: skip
def test_times_as_sbatch_reads_them(text: str, minutes: int | None) -> None:
    assert rest_submission.minutes("time", text) == minutes


@pytest.mark.parametrize(
    ("text", "mb"), [("512", 512), ("4G", 4096), ("1T", 1048576), ("100K", 1), ("2048k", 2)]
)
def test_amounts_of_memory(text: str, mb: int) -> None:
    assert rest_submission.memory_mb("mem", text) == mb


# On the way


class Restd:
    """A slurmrestd that knows v0.0.42 and says what it is told."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer | Callable[[web.Request], Answer]] = {
            "/openapi/v3": (
                200,
                '{"paths": {"\\/slurm\\/v0.0.42\\/jobs\\/": {}, "/slurm/v0.0.99/jobs/": {}}}',
            )
        }
        self.asked: list[str] = []
        self.bodies: list[Any] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append(f"{request.method} {request.path_qs}")
        if request.can_read_body:
            self.bodies.append(await request.json())
        found = self.answers.get(request.path, (404, "Unable find requested URL."))
        status, said = found(request) if callable(found) else found
        text = said if isinstance(said, str) else json.dumps(said)
        return web.Response(status=status, text=text)


def served(
    restd: Restd,
    scenario: Callable[[RestSlurm], Awaitable[None]],
    tls: ssl.SSLContext | None = None,
    **settings: Any,
) -> None:
    async def run() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", restd.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        port = runner.addresses[0][1]
        scheme = "https" if tls else "http"
        try:
            async with RestSlurm(Connection("rest", url=f"{scheme}://127.0.0.1:{port}", **settings)) as slurm:
                await asyncio.wait_for(scenario(slurm), 5)
        finally:
            await runner.cleanup()

    asyncio.run(run())


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("SLURM_JWT=first\n")
    path.chmod(0o600)
    return path


def test_the_newest_parser_that_both_know_is_spoken(token: Path) -> None:
    restd = Restd()
    restd.answers["/slurm/v0.0.42/jobs/"] = (200, {"jobs": []})

    async def scenario(slurm: RestSlurm) -> None:
        assert await slurm.jobs() == []
        assert await slurm.jobs() == []

    served(restd, scenario, token_file=token)
    assert restd.asked == ["GET /openapi/v3", *["GET /slurm/v0.0.42/jobs/"] * 2]


def test_an_answer_with_errors_is_an_error_whatever_its_status(token: Path) -> None:
    """An operator once deleted pods because of a 200 like this one."""
    restd = Restd()
    said = {
        "jobs": [],
        "errors": [{"error_number": 1800, "error": "Unable to contact slurm controller (connect failure)"}],
    }
    restd.answers["/slurm/v0.0.42/jobs/"] = (200, said)

    async def scenario(slurm: RestSlurm) -> None:
        with pytest.raises(SlurmError, match="Unable to contact") as error:
            await slurm.jobs()
        assert (error.value.transient, error.value.reason) == (True, "SlurmUnavailable")

    served(restd, scenario, token_file=token)


@pytest.mark.parametrize(
    ("answer", "reason", "transient"),
    [
        ((500, RECORDED["42"]["answers"]["refused"]["body"]), "SlurmRefused", False),
        (
            (200, {"errors": [{"error": "Job violates accounting/QOS policy (job submit limit)"}]}),
            "SlurmLimited",
            True,
        ),
        ((429, "slow down"), "SlurmBusy", True),
        ((503, "<html>proxy</html>"), "SlurmUnavailable", True),
        ((200, "cut sho"), "SlurmUnavailable", True),
        ((502, {"errors": []}), "SlurmUnavailable", True),
        ((500, {"errors": [{"error": "Unspecified error"}]}), "SlurmUnavailable", True),
        ((200, {"errors": []}), "SlurmUnavailable", True),
    ],
)
def test_what_a_submission_comes_to(token: Path, answer: Answer, reason: str, transient: bool) -> None:
    restd = Restd()
    restd.answers["/slurm/v0.0.42/job/submit"] = answer

    async def scenario(slurm: RestSlurm) -> None:
        with pytest.raises(SlurmError) as error:
            await slurm.submit(SPEC)
        assert (error.value.reason, error.value.transient) == (reason, transient)

    served(restd, scenario, token_file=token)


def test_the_token_never_reaches_the_job(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JWT", "secret")
    restd = Restd()
    restd.answers["/slurm/v0.0.42/job/submit"] = (200, {"job_id": 7, "errors": []})

    async def scenario(slurm: RestSlurm) -> None:
        assert await slurm.submit(SPEC) == "7"

    served(restd, scenario, token_file=token)
    assert "secret" not in json.dumps(restd.bodies)
    assert any(one.startswith("PATH=") for one in restd.bodies[0]["job"]["environment"])


def test_the_token_is_read_again_for_each_request(token: Path) -> None:
    restd, seen = Restd(), []

    def listed(request: web.Request) -> Answer:
        seen.append(request.headers["X-SLURM-USER-TOKEN"])
        return 200, {"jobs": []}

    restd.answers["/slurm/v0.0.42/jobs/"] = listed

    async def scenario(slurm: RestSlurm) -> None:
        await slurm.jobs()
        token.write_text("second")
        await slurm.jobs()

    served(restd, scenario, token_file=token)
    assert seen == ["first", "second"]


@pytest.mark.parametrize("renewed", ["", "fresh"])
def test_a_refused_token_is_renewed_once_then_told(
    token: Path, monkeypatch: pytest.MonkeyPatch, renewed: str
) -> None:
    monkeypatch.setattr(rest_token, "_made", lambda: renewed)
    restd, seen = Restd(), []

    def listed(request: web.Request) -> Answer:
        seen.append(request.headers["X-SLURM-USER-TOKEN"])
        return (200, {"jobs": []}) if seen[-1] == "fresh" else (401, "Authentication failure")

    restd.answers["/slurm/v0.0.42/jobs/"] = listed

    async def scenario(slurm: RestSlurm) -> None:
        if renewed:
            assert await slurm.jobs() == []
            return
        with pytest.raises(SlurmError, match="does not let") as error:
            await slurm.jobs()
        assert (error.value.transient, error.value.reason) == (True, "SlurmUnauthorized")

    served(restd, scenario, token_file=token)
    assert seen == ["first", renewed or "first"]


def jwt(begin_s: float, end_s: float) -> str:
    told = base64.urlsafe_b64encode(json.dumps({"iat": begin_s, "exp": end_s}).encode()).decode().rstrip("=")
    return f"head.{told}.signature"


def test_a_token_is_renewed_at_half_of_its_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, path, made = [1000.0], tmp_path / "token", []
    monkeypatch.setattr(rest_token, "_made", lambda: made.append(1) or "own")  # type: ignore[func-returns-value]
    path.write_text(old := jwt(1000, 2800))
    path.chmod(0o600)

    async def scenario() -> None:
        held = Token(path, lambda: now_s[0])
        assert await held.current() == old
        now_s[0] = 1901.0
        assert await held.current() == "own"
        assert await held.current() == "own"
        assert len(made) == 1
        path.write_text(fresh := jwt(2800, 4600))
        now_s[0] += 1000
        assert await held.current() == fresh, (
            "whoever keeps the file has the last word once ours is half gone"
        )
        assert len(made) == 1

    asyncio.run(scenario())


def test_a_server_that_cannot_prove_itself_is_not_spoken_to(tmp_path: Path, token: Path) -> None:
    make_keys(tmp_path / "pki")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pki/hub-server.crt", tmp_path / "pki/hub-server.key")
    restd = Restd()

    async def scenario(slurm: RestSlurm) -> None:
        with pytest.raises(SlurmError, match="does not answer") as error:
            await slurm.jobs()
        assert error.value.transient

    served(restd, scenario, tls=context, token_file=token)
    assert restd.asked == []


def test_nobody_listens(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with RestSlurm(Connection("rest", socket=tmp_path / "none.sock")) as slurm:
            with pytest.raises(SlurmError) as error:
                await slurm.jobs()
            assert (error.value.transient, error.value.reason) == (True, "SlurmUnavailable")

    asyncio.run(scenario())


def test_jobs_that_are_gone_are_cancelled_without_a_word(token: Path) -> None:
    restd = Restd()
    for number in (2017, 2021):
        restd.answers[f"/slurm/v0.0.42/job/{number}"] = (
            500,
            {"errors": [{"error_number": number, "error": "gone"}]},
        )
    restd.answers["/slurm/v0.0.42/job/9"] = (
        500,
        {"errors": [{"error_number": 2008, "error": "Access denied"}]},
    )

    async def scenario(slurm: RestSlurm) -> None:
        await slurm.cancel([JobId("2017"), JobId("2021")])
        with pytest.raises(SlurmError) as error:
            await slurm.cancel([JobId("9")])
        assert error.value.transient

    served(restd, scenario, token_file=token)


def test_a_database_that_is_away_hides_nothing_that_slurmctld_knows(token: Path) -> None:
    restd, known = Restd(), ids("42")["failed"]
    restd.answers["/slurmdb/v0.0.42/jobs/"] = (500, {"errors": [{"error": "Unable to connect to database"}]})
    raw = next(one for one in body("42", "jobs")["jobs"] if str(one["job_id"]) == known)
    restd.answers[f"/slurm/v0.0.42/job/{known}"] = (200, {"jobs": [raw], "errors": []})
    unknown = RECORDED["42"]["answers"]["unknown"]
    restd.answers["/slurm/v0.0.42/job/4000000"] = (unknown["status"], unknown["body"])

    async def scenario(slurm: RestSlurm) -> None:
        assert (await slurm.ended([JobId(known)]))[JobId(known)].exit_code == 3
        with pytest.raises(SlurmError) as error:
            await slurm.ended([JobId(known), JobId("4000000")])
        assert error.value.transient, "it is not missing while one of the two is away"

    served(restd, scenario, token_file=token)


def test_slurmctld_knows_an_end_before_accounting_does(token: Path) -> None:
    restd, known = Restd(), ids("42")["failed"]
    lagging = {"job_id": int(known), "state": {"current": ["RUNNING"]}, "exit_code": {}, "time": {}}
    restd.answers["/slurmdb/v0.0.42/jobs/"] = (200, {"jobs": [lagging], "errors": []})
    raw = next(one for one in body("42", "jobs")["jobs"] if str(one["job_id"]) == known)
    restd.answers[f"/slurm/v0.0.42/job/{known}"] = (200, {"jobs": [raw], "errors": []})

    async def scenario(slurm: RestSlurm) -> None:
        ended = (await slurm.ended([JobId(known)]))[JobId(known)]
        assert (ended.state, ended.exit_code) == ("FAILED", 3)

    served(restd, scenario, token_file=token)


@pytest.mark.parametrize(
    "answer",
    [
        (404, "Unable find requested URL."),
        (500, {"errors": [{"error": "Slurm accounting storage is disabled"}]}),
    ],
)
def test_a_site_without_accounting_knows_what_slurmctld_remembers(token: Path, answer: Answer) -> None:
    restd, known = Restd(), ids("42")["failed"]
    restd.answers["/slurmdb/v0.0.42/jobs/"] = restd.answers["/slurmdb/v0.0.42/tres/"] = answer
    restd.answers["/slurm/v0.0.42/partitions/"] = (200, body("42", "partitions"))
    unknown = RECORDED["42"]["answers"]["unknown"]
    restd.answers["/slurm/v0.0.42/job/4000000"] = (unknown["status"], unknown["body"])
    raw = next(one for one in body("42", "jobs")["jobs"] if str(one["job_id"]) == known)
    restd.answers[f"/slurm/v0.0.42/job/{known}"] = (200, {"jobs": [raw], "errors": []})

    async def scenario(slurm: RestSlurm) -> None:
        assert not (await slurm.capabilities()).accounting
        assert list(await slurm.ended([JobId(known), JobId("4000000")])) == [known]

    served(restd, scenario, token_file=token)


def test_what_slurmrestd_cannot_explain_passes(token: Path) -> None:
    """22.05 says this of partitions while slurmctld is away."""
    restd = Restd()
    restd.answers["/slurm/v0.0.42/partitions/"] = (
        500,
        {"errors": [{"error": "Unspecified error", "error_number": -1}]},
    )

    async def scenario(slurm: RestSlurm) -> None:
        with pytest.raises(SlurmError) as error:
            await slurm.capabilities()
        assert (error.value.transient, error.value.reason) == (True, "SlurmUnavailable")

    served(restd, scenario, token_file=token)


# Settings


@pytest.mark.parametrize(
    ("text", "place", "kind"),
    [
        ("commands", "", "commands"),
        ("rest:https://slurm.example.org:6820", "https://slurm.example.org:6820", "rest"),
        ("rest:unix:/run/restd.sock,default_partition=batch", "/run/restd.sock", "rest"),
        ("rest:http://localhost:6820", "http://localhost:6820", "rest"),
        ("rest:http://127.0.0.1:6820", "http://127.0.0.1:6820", "rest"),
        ("rest:http://[::1]:6820", "http://[::1]:6820", "rest"),
        ("rest:http://login:6820,insecure,user=ada", "http://login:6820", "rest"),
    ],
)
def test_ways_to_slurm(text: str, place: str, kind: str) -> None:
    found = connection.parse(text)
    assert (found.kind, found.place) == (kind, place)
    assert connection.from_json(found.as_json()) == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rest",
        "rest:slurm:6820",
        "ssh:x",
        "commands:x",
        "rest:http://x,password=y",
        "commands,insecure",
        "rest:http://x,insecure=no",
    ],
)
def test_what_is_no_way_to_slurm(text: str) -> None:
    with pytest.raises(UserError, match="--slurm"):
        connection.parse(text)


@pytest.mark.parametrize(
    "host", ["login:6820", "192.0.2.7", "localhost.example.org", "127.0.0.1.example.org"]
)
def test_a_token_crosses_no_network_in_clear_text_unless_somebody_says_so(host: str) -> None:
    with pytest.raises(UserError, match="not encrypted") as error:
        connection.parse(f"rest:http://{host}")
    assert ",insecure" in error.value.hint
    assert connection.parse(f"rest:http://{host},insecure").insecure


def test_a_cluster_that_was_made_before_that_rule_sends_no_token(token: Path) -> None:
    """Its URL stands in cluster.json."""
    old = connection.from_json({"kind": "rest", "url": "http://192.0.2.7:6820", "token_file": str(token)})

    async def scenario() -> None:
        async with RestSlurm(old) as slurm:
            with pytest.raises(SlurmError, match="not encrypted") as error:
                await slurm.jobs()
        assert (error.value.reason, error.value.transient) == ("SlurmUnauthorized", True)

    asyncio.run(scenario())


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o666])
def test_a_token_file_that_is_open_to_others_is_refused(token: Path, mode: int) -> None:
    token.chmod(mode)
    restd = Restd()

    async def scenario(slurm: RestSlurm) -> None:
        with pytest.raises(
            SlurmError, match=re.escape(f"{token} is open to others (mode {mode:04o})")
        ) as error:
            await slurm.jobs()
        assert f"chmod 600 {token}" in error.value.hint
        assert restd.asked == []
        token.chmod(0o600)
        await slurm.jobs()

    restd.answers["/slurm/v0.0.42/jobs/"] = (200, {"jobs": []})
    served(restd, scenario, token_file=token)
    token.chmod(mode)
    with pytest.raises(UserError, match="open to others") as refused:
        connection.parse(f"rest:https://slurm.example.org:6820,token_file={token}")
    assert f"chmod 600 {token}" in refused.value.hint


def test_a_token_file_of_another_user_is_refused(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    with pytest.raises(UserError, match="belongs to another user"):
        connection.parse(f"rest:https://slurm.example.org:6820,token_file={token}")
    restd = Restd()

    async def scenario(slurm: RestSlurm) -> None:
        with pytest.raises(SlurmError, match="belongs to another user"):
            await slurm.jobs()

    served(restd, scenario, token_file=token)
    assert restd.asked == []
