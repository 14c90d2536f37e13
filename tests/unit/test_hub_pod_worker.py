"""The worker of a pod, act by act: what it does with each fact, and that no crash makes a second job of a pod.

Every scenario runs on a site in memory and in virtual time (hub_site.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmlet.base.errors import SlurmError
from slurmlet.base.files import read_json, write_json
from slurmlet.slurm.fake import away
from tests.unit.fakes import FakeLink
from tests.unit.hub_site import POOL_NODE, Crash, Runner, Site

OWNER = [{"uid": "rs-1", "controller": True, "kind": "ReplicaSet", "name": "rs", "apiVersion": "apps/v1"}]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    made.start_hub()
    made.settle(1)
    yield made
    made.close()


def queued(site: Site, **more: Any) -> str:
    uid = site.create(**more)
    site.settle(1)
    assert len(site.live(uid)) == 1
    return uid


def running(site: Site, **more: Any) -> tuple[str, Runner]:
    uid = queued(site, **more)
    runner = site.start_job(uid)
    assert runner is not None
    site.settle(1)
    assert runner.has_pod
    runner.say("Running", "running")
    site.settle(1)
    assert site.phase(uid) == "Running"
    return uid, runner


def status(site: Site, uid: str) -> dict[str, Any]:
    pod = site.pod(uid)
    assert pod is not None
    found: dict[str, Any] = pod["status"]
    return found


def restart(site: Site, after_s: float = 0.0) -> None:
    site.kill_hub()
    site.settle(after_s)
    site.start_hub()


# From bound to running


def test_a_pod_is_submitted_queued_started_and_ends(site: Site) -> None:
    uid, runner = running(site)
    assert site.events.reasons == ["Submitted", "Queued"]
    pod = site.pod(uid)
    assert pod is not None
    assert pod["metadata"]["annotations"] == {"slurmlet.io/job-id": "101", "slurmlet.io/host": "c1"}
    runner.end(0)
    site.settle(2)
    assert site.phase(uid) == "Succeeded"
    assert len(site.slurm.submitted) == 1


def test_a_pod_that_fails_is_failed(site: Site) -> None:
    uid, runner = running(site)
    runner.end(3)
    site.settle(2)
    assert site.phase(uid) == "Failed"
    assert status(site, uid)["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 3


def test_slurm_away_delays_a_pod_and_says_so(site: Site) -> None:
    site.slurm.hooks["submit"] = away
    uid = site.create()
    site.settle(5)
    assert site.jobs(uid) == []
    assert "SubmissionFailed" in site.events.reasons
    del site.slurm.hooks["submit"]
    site.settle(20)
    assert len(site.live(uid)) == 1


def test_what_slurm_refuses_for_good_fails_the_pod_once(site: Site) -> None:
    def refuse() -> None:
        raise SlurmError("sbatch failed", said="Requested node configuration is not available")

    site.slurm.hooks["submit"] = refuse
    uid = site.create()
    site.settle(60)
    assert site.phase(uid) == "Failed"
    assert status(site, uid)["reason"] == "SlurmRefused"
    assert len(site.slurm.submitted) == 1
    site.delete(uid)
    site.settle(5)
    assert site.phase(uid) == "gone"


def test_an_annotation_that_would_break_the_job_refuses_the_pod(site: Site) -> None:
    uid = site.create()
    site.kill_hub()
    pod = site.pod(uid)
    assert pod is not None
    site.api.put({**pod, "metadata": {**pod["metadata"], "annotations": {"slurmlet.io/sbatch": "--wrap=id"}}})
    site.start_hub()
    site.settle(5)
    assert site.phase(uid) == "Failed"
    assert site.slurm.submitted == []


def test_a_partition_that_is_not_there_is_waited_for(site: Site) -> None:
    known, site.slurm.listed_partitions = site.slurm.listed_partitions, []
    uid = site.create()
    site.settle(5)
    assert site.jobs(uid) == []
    site.slurm.listed_partitions = known
    site.settle(5)
    assert len(site.live(uid)) == 1


def test_pods_of_an_owner_whose_pods_die_unborn_wait_longer(site: Site) -> None:
    def one() -> str:
        uid = site.create()
        site.kill_hub()
        pod = site.pod(uid)
        assert pod is not None
        site.api.put({**pod, "metadata": {**pod["metadata"], "ownerReferences": OWNER}})
        return uid

    first = one()
    site.start_hub()
    site.settle(2)
    site.slurm.start(site.jobs(first)[0].job_id)
    site.slurm.finish(site.jobs(first)[0].job_id, "FAILED", 127)
    site.settle(5)
    assert site.phase(first) == "Failed"
    # Only this hub remembers; it is slowed down, not stopped.
    hub = site.hub
    assert hub is not None
    second = site.create()
    pod = site.pod(second)
    assert pod is not None
    worker = hub.pods.named("ns", pod["metadata"]["name"])
    assert worker is not None


# Every crash point between intent, sbatch and note


def test_a_hub_that_dies_before_the_intent_submits_later(site: Site) -> None:
    site.kill_hub()
    uid = site.create()
    site.start_hub()
    site.settle(2)
    assert len(site.jobs(uid)) == 1


def test_a_hub_that_dies_before_sbatch_submits_once(site: Site) -> None:
    def die() -> None:
        raise Crash

    site.slurm.hooks["submit"] = die
    uid = site.create()
    site.settle(2)
    assert read_json(site.settings.files.pod(uid).job) is not None, "the intent is on disk"
    del site.slurm.hooks["submit"]
    restart(site)
    site.settle(5)
    assert len(site.jobs(uid)) == 1


def test_a_hub_that_dies_after_sbatch_finds_the_job(site: Site) -> None:
    def die() -> None:
        site.slurm.after_submit = lambda: None
        raise Crash

    site.slurm.after_submit = die
    uid = site.create()
    site.settle(2)
    assert "job_id" not in (read_json(site.settings.files.pod(uid).job) or {}), "nobody noted the job"
    restart(site)
    site.settle(5)
    assert len(site.jobs(uid)) == 1
    assert len(site.slurm.submitted) == 1


def test_an_answer_that_is_lost_does_not_make_a_second_job(site: Site) -> None:
    def lose() -> None:
        site.slurm.after_submit = lambda: None
        raise SlurmError("timed out", reason="SlurmUnavailable", transient=True)

    site.slurm.after_submit = lose
    uid = site.create()
    site.settle(10)
    assert len(site.jobs(uid)) == 1
    assert len(site.slurm.submitted) == 1


def test_a_job_that_was_found_is_not_waited_for_any_more(site: Site) -> None:
    def lose() -> None:
        site.slurm.after_submit = lambda: None
        raise SlurmError("timed out", reason="SlurmUnavailable", transient=True)

    site.slurm.after_submit = lose
    uid = site.create()
    site.settle(10)
    assert "SubmissionFailed" in site.events.reasons
    assert status(site, uid)["containerStatuses"][0]["state"]["waiting"]["reason"] == "ContainerCreating"


def test_nothing_is_submitted_before_slurm_was_listed_once(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.slurm.hooks["jobs"] = away
    uid = site.create()
    site.start_hub()
    site.settle(30)
    assert site.slurm.submitted == []
    del site.slurm.hooks["jobs"]
    site.settle(70)
    assert len(site.jobs(uid)) == 1
    site.close()


@pytest.mark.parametrize("after_s", [0, 30])
def test_a_new_hub_leaves_a_running_pod_as_it_is(site: Site, after_s: float) -> None:
    uid, runner = running(site)
    before = status(site, uid)
    restart(site, after_s)
    site.settle(2)
    assert status(site, uid) == before, "until the runner dials in, what was told holds"
    runner.dial()
    site.settle(2)
    assert status(site, uid) == before
    assert len(site.jobs(uid)) == 1
    runner.end(0)
    site.settle(2)
    assert site.phase(uid) == "Succeeded"


def test_a_pod_that_ended_while_no_hub_was_there_is_told_by_its_report(site: Site) -> None:
    uid, runner = running(site)
    site.kill_hub()
    runner.end(4)
    site.settle(5)
    site.start_hub()
    site.settle(5)
    assert site.phase(uid) == "Failed"
    assert status(site, uid)["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 4


def test_a_pod_whose_job_vanished_while_no_hub_was_there_is_failed_with_slurms_reason(site: Site) -> None:
    uid, runner = running(site)
    site.kill_hub()
    site.slurm.finish(runner.job_id, "NODE_FAIL")
    site.reap()
    site.start_hub()
    site.settle(5)
    assert site.phase(uid) == "Failed"
    assert status(site, uid)["reason"] == "NodeFailure"


def test_two_jobs_of_one_pod_are_run_by_the_one_that_holds_the_claim(site: Site) -> None:
    """Should it ever happen: a person requeued one, or a hub's disk lied."""
    uid = queued(site)
    second = site.loop.run_until_complete(site.slurm.submit(site.slurm.submitted[0]))
    assert len(site.live(uid)) == 2
    site.slurm.start(second)
    runner = site._begin(uid, second)
    assert runner is not None
    site.settle(3)
    runner.say("Running", "running")
    site.settle(3)
    assert site.phase(uid) == "Running"
    first = next(job for job in site.jobs(uid) if job.job_id != second)
    site.slurm.start(first.job_id)
    assert site._begin(uid, first.job_id) is None
    site.settle(3)
    assert site.phase(uid) == "Running"
    pod = site.pod(uid)
    assert pod is not None
    assert pod["metadata"]["annotations"]["slurmlet.io/job-id"] == second


# The link


def test_a_runner_that_hangs_up_and_dials_in_again_goes_on(site: Site) -> None:
    uid, runner = running(site)
    runner.hang_up()
    site.settle(3)
    assert site.phase(uid) == "Running"
    runner.dial()
    runner.end(0)
    site.settle(2)
    assert site.phase(uid) == "Succeeded"


def test_a_runner_that_dials_in_twice_is_heard_by_the_newer_link(site: Site) -> None:
    uid, runner = running(site)
    first, runner.link = runner.link, None
    runner.dial()
    site.settle(1)
    assert first is not None
    assert not first.alive
    hub = site.hub
    assert hub is not None
    hub.pods.link_ended(first)  # type: ignore[arg-type]
    site.settle(1)
    runner.end(0)
    site.settle(2)
    assert site.phase(uid) == "Succeeded"


def test_a_runner_that_is_killed_without_a_word_fails_the_pod_as_slurm_says(site: Site) -> None:
    uid, runner = running(site)
    site.slurm.finish(runner.job_id, "OUT_OF_MEMORY", signal=9)
    site.reap()
    site.settle(5)
    assert site.phase(uid) == "Failed"
    assert status(site, uid)["reason"] == "OutOfMemory"


def test_a_pod_that_slurm_signalled_waits_for_its_reason(site: Site) -> None:
    uid, runner = running(site)
    runner.say("Done", "terminated", 143, {"reason": "Terminated", "message": "signalled"})
    site.settle(5)
    assert site.phase(uid) == "Running", "Slurm has not said why yet"
    site.slurm.finish(runner.job_id, "TIMEOUT", signal=15)
    site.reap()
    site.settle(5)
    assert site.phase(uid) == "Failed"
    assert status(site, uid)["reason"] == "JobTimeout"


def test_a_signalled_pod_that_slurm_says_nothing_of_is_failed_all_the_same(site: Site) -> None:
    uid, runner = running(site)
    runner.say("Done", "terminated", 143, {"reason": "Terminated", "message": "signalled"})
    site.settle(60)
    assert site.phase(uid) == "Failed"


def test_a_runner_of_a_pod_that_is_gone_is_told_to_stop(site: Site) -> None:
    link = FakeLink("uid-of-nobody")
    assert site.hub is not None
    site.do(site.hub.pods.link_came(link))  # type: ignore[arg-type]
    assert link.heard("stop")
    site.do(site.hub.pods.link_said(link, {"type": "bye", "seq": 3, "report": {}}))  # type: ignore[arg-type]
    assert link.heard("ack") == [{"type": "ack", "seq": 3}]


def test_events_of_the_runner_are_told_as_the_pods(site: Site) -> None:
    _, runner = running(site)
    assert site.hub is not None
    message = {
        "type": "event",
        "kind": "Warning",
        "reason": "Unhealthy",
        "message": "probe",
        "container": "c",
    }
    site.do(site.hub.pods.link_said(runner.link, message))  # type: ignore[arg-type]
    assert ("Warning", "Unhealthy", "probe", "c") in site.events.told


def test_reports_are_acknowledged(site: Site) -> None:
    _, runner = running(site)
    assert runner.link is not None
    assert [message["seq"] for message in runner.link.heard("ack")] == [1]


# The end


def test_a_queued_pod_that_is_deleted_takes_its_job_along(site: Site) -> None:
    uid = queued(site)
    site.settle(3)
    site.delete(uid)
    site.settle(5)
    assert site.phase(uid) == "gone"
    assert site.live(uid) == []
    assert not site.settings.files.pod(uid).root.exists()


def test_a_running_pod_that_is_deleted_gets_its_grace(site: Site) -> None:
    uid, runner = running(site)
    site.delete(uid, grace_s=5)
    site.settle(1)
    assert runner.stopping
    assert runner.link is not None
    assert runner.link.heard("stop")[0]["grace_s"] == 5
    runner.end(143)
    site.settle(3)
    assert site.phase(uid) == "gone"
    assert site.slurm.cancelled == []


def test_a_runner_that_does_not_stop_is_cancelled(site: Site) -> None:
    uid, runner = running(site)
    site.delete(uid, grace_s=5)
    site.settle(9)
    assert site.slurm.cancelled == []
    site.settle(5)
    assert runner.job_id in site.slurm.cancelled
    site.reap()
    site.settle(3)
    assert site.phase(uid) == "gone"


def test_a_shorter_grace_is_told_again(site: Site) -> None:
    uid, runner = running(site)
    site.delete(uid, grace_s=30)
    site.settle(1)
    site.delete(uid, grace_s=2)
    site.settle(1)
    assert runner.link is not None
    assert [message["grace_s"] for message in runner.link.heard("stop")] == [30, 2]


def test_a_pod_deleted_while_its_runner_is_away_is_cancelled(site: Site) -> None:
    uid, runner = running(site)
    runner.hang_up()
    site.delete(uid)
    site.settle(10)
    assert site.phase(uid) == "gone"
    assert runner.job_id in site.slurm.cancelled


def test_a_pod_deleted_by_force_leaves_neither_job_nor_files(site: Site) -> None:
    uid, runner = running(site)
    site.delete(uid, grace_s=0)
    site.settle(1)
    assert runner.stopping
    site.settle(10)
    assert runner.job_id in site.slurm.cancelled, "it did not stop by itself"
    site.reap()
    site.settle(5)
    assert site.live(uid) == []
    assert not site.settings.files.pod(uid).root.exists()


def test_a_pod_that_went_while_no_hub_was_there_leaves_neither_job_nor_files(site: Site) -> None:
    uid, _ = running(site)
    site.kill_hub()
    site.delete(uid, grace_s=0)
    site.start_hub()
    site.settle(70)
    site.reap()
    site.settle(70)
    assert site.live(uid) == []
    assert not site.settings.files.pod(uid).root.exists()


def test_a_pod_with_an_intent_of_unknown_outcome_goes_when_slurm_knows_no_job(site: Site) -> None:
    site.slurm.hooks["submit"] = away
    uid = site.create()
    site.settle(1)
    assert site.settings.files.pod(uid).job.exists()
    site.delete(uid)
    site.settle(10)
    assert site.phase(uid) == "gone"


def test_a_pod_with_an_intent_whose_job_exists_goes_with_it(site: Site) -> None:
    def lose() -> None:
        raise SlurmError("timed out", reason="SlurmUnavailable", transient=True)

    site.slurm.after_submit = lose
    uid = site.create()
    site.settle(0.1)
    site.delete(uid)
    site.settle(15)
    assert site.phase(uid) == "gone"
    assert site.live(uid) == []


def test_a_job_that_lingers_after_its_pod_is_cancelled(site: Site) -> None:
    uid, runner = running(site)
    runner.say("Done", "terminated", 0)
    site.settle(2)
    assert site.phase(uid) == "Succeeded"
    assert site.slurm.cancelled == []
    site.settle(40)
    assert runner.job_id in site.slurm.cancelled


def test_a_pod_past_its_deadline_is_stopped_and_then_cancelled(site: Site) -> None:
    uid, runner = running(site, activeDeadlineSeconds=30)
    pod = site.pod(uid)
    assert pod is not None
    from datetime import UTC, datetime

    from slurmlet.base.clock import rfc3339
    from tests.unit.virtual_time import EPOCH_S

    started = rfc3339(datetime.fromtimestamp(EPOCH_S + site.loop.time(), UTC))
    site.api.put({**pod, "status": {**pod["status"], "startTime": started}})
    site.settle(29)
    assert not runner.stopping
    site.settle(3)
    assert runner.stopping
    assert "DeadlineExceeded" in site.events.reasons
    site.settle(15)
    assert runner.job_id in site.slurm.cancelled, "its runner did not end it"
    site.reap()
    site.settle(5)
    assert site.phase(uid) == "Failed"
    assert status(site, uid)["reason"] == "DeadlineExceeded"


# What goes wrong around it


def test_an_api_server_that_is_away_is_waited_for(site: Site) -> None:
    uid = queued(site)
    runner = site.start_job(uid)
    assert runner is not None
    site.settle(1)
    site.api.away = True
    runner.say("Running", "running")
    site.settle(10)
    assert site.phase(uid) == "Pending"
    site.api.away = False
    site.settle(5)
    assert site.phase(uid) == "Running"


def test_a_fault_of_the_hubs_own_with_one_pod_stops_neither_hub_nor_other_pods(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid, runner = running(site)
    pod = site.pod(uid)
    assert pod is not None
    patch_latest = site.api.patch_latest

    async def faulty(path: str, change: Any, kind: str) -> Any:
        if path.endswith(f"/{pod['metadata']['name']}/status"):
            raise RuntimeError("nobody thought of this")
        return await patch_latest(path, change, kind)

    monkeypatch.setattr(site.api, "patch_latest", faulty)
    other = queued(site)
    runner.end(0)
    site.settle(3)
    assert site.phase(uid) == "Running"
    site.delete(other)
    site.settle(5)
    assert site.phase(other) == "gone"
    monkeypatch.undo()
    site.settle(60)
    assert site.phase(uid) == "Succeeded"


def test_a_limit_on_jobs_is_told_once_and_waited_out(site: Site) -> None:
    def limit() -> None:
        said = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
        if len([job for job in site.slurm.queue if job.state in ("PENDING", "RUNNING")]) >= 2:
            raise SlurmError("sbatch failed", said=said, reason="SlurmLimited", transient=True)

    site.slurm.hooks["submit"] = limit
    uids = [site.create() for _ in range(6)]
    site.settle(60)
    assert sum(len(site.live(uid)) for uid in uids) == 2
    for _ in range(12):
        for uid in uids:
            for job in site.live(uid):
                if job.state == "PENDING":
                    runner = site.start_job(uid)
                    assert runner is not None
                    site.settle(1)
                    runner.say("Running", "running")
                    runner.end(0)
        site.settle(60)
    assert [site.phase(uid) for uid in uids] == ["Succeeded"] * 6
    assert all(len(site.jobs(uid)) <= 1 for uid in uids)
    assert len(site.slurm.submitted) < 30, "nobody storms a Slurm that is full"


# On a node of an allocation


@pytest.fixture
def pool(site: Site) -> Site:
    site.start_agent()
    site.settle(1)
    return site


def on_agent(site: Site) -> tuple[str, Runner]:
    uid = site.create(node=POOL_NODE)
    site.settle(1)
    runner = site.runners[uid]
    site.settle(1)
    assert runner.has_pod
    runner.say("Running", "running")
    site.settle(1)
    assert site.phase(uid) == "Running"
    return uid, runner


def test_an_agent_starts_the_pod_without_a_job_of_its_own(pool: Site) -> None:
    uid, runner = on_agent(pool)
    runner.end(0)
    pool.settle(2)
    assert pool.phase(uid) == "Succeeded"
    assert pool.slurm.submitted == []
    pool.delete(uid)
    pool.settle(5)
    assert pool.phase(uid) == "gone"


def test_how_a_pod_of_an_agent_ended_is_forgotten_with_the_pod(pool: Site) -> None:
    uid, runner = on_agent(pool)
    runner.end(0)
    pool.settle(2)
    assert pool.hub is not None
    agent = pool.hub.agents.get(POOL_NODE)
    assert agent is not None
    assert list(agent.ended) == list(agent.ended_s) == [uid]
    pool.delete(uid)
    pool.settle(5)
    assert (agent.ended, agent.ended_s) == ({}, {})


def test_an_agent_that_lost_the_word_is_told_again(pool: Site) -> None:
    assert pool.agent is not None
    told, pool.agent.on_told = pool.agent.on_told, lambda _message: None
    uid = pool.create(node=POOL_NODE)
    pool.settle(2)
    assert uid not in pool.runners
    pool.agent.on_told = told
    pool.agent_hangs_up()
    pool.start_agent()
    pool.settle(20)
    assert uid in pool.runners


def test_a_pod_of_an_agent_that_is_killed_is_failed(pool: Site) -> None:
    uid, runner = on_agent(pool)
    runner.done = True
    runner.hang_up()
    pool.runner_left(runner, 137)
    pool.settle(3)
    assert pool.phase(uid) == "Failed"
    assert status(pool, uid)["reason"] == "RunnerLost"


def test_a_new_hub_hears_of_an_agents_pods_from_the_agent(pool: Site) -> None:
    uid, runner = on_agent(pool)
    pool.kill_hub()
    pool.start_hub()
    pool.settle(3)
    assert pool.phase(uid) == "Running"
    pool.start_agent()
    runner.dial()
    pool.settle(2)
    runner.end(0)
    pool.settle(3)
    assert pool.phase(uid) == "Succeeded"


def test_a_pod_of_an_agent_that_does_not_stop_is_killed(pool: Site) -> None:
    uid, _ = on_agent(pool)
    pool.delete(uid, grace_s=2)
    pool.settle(12)
    assert pool.agent is not None
    assert [message["uid"] for message in pool.agent.heard("kill-pod")][:1] == [uid]
    assert pool.phase(uid) == "gone"


def test_an_agent_that_started_anew_without_the_pod_has_lost_it(pool: Site) -> None:
    uid, runner = on_agent(pool)
    pool.agent_hangs_up()
    runner.hang_up()
    pool.runners.clear()
    pool.start_agent()
    pool.settle(5)
    pool.hub.pods.news_of(uid)  # type: ignore[union-attr, arg-type]
    pool.settle(5)
    assert pool.phase(uid) == "Failed"
    assert status(pool, uid)["reason"] == "RunnerLost"


def test_a_pod_of_an_agent_that_went_while_no_hub_was_there_is_killed_and_then_swept(pool: Site) -> None:
    uid, runner = on_agent(pool)
    pool.kill_hub()
    pool.delete(uid, grace_s=0)
    pool.start_hub()
    pool.settle(5)
    assert runner.files.root.exists(), "its runner may still dial in, with the key that lies there"
    pool.start_agent()
    pool.settle(130)
    assert uid not in pool.runners
    assert not runner.files.root.exists()


def test_a_pod_that_was_disowned_gets_another_job(site: Site) -> None:
    uid = queued(site)
    job_id = site.jobs(uid)[0].job_id
    site.slurm.finish(job_id, "FAILED", 1)
    assert site.hub is not None
    site.do(site.hub.pods.disown(uid, job_id))  # type: ignore[arg-type]
    site.settle(5)
    assert len(site.live(uid)) == 1
    note = read_json(site.settings.files.pod(uid).job)
    assert note is not None
    assert note["not"] == [job_id]


def test_a_report_on_disk_of_a_pod_that_runs_does_not_take_it_back(site: Site) -> None:
    uid, runner = running(site)
    before = status(site, uid)
    write_json(site.settings.files.pod(uid).report, {"phase": "Starting", "containers": {}})
    restart(site)
    site.settle(3)
    assert status(site, uid) == before
    runner.dial()
    runner.end(0)
    site.settle(3)
    assert site.phase(uid) == "Succeeded"
