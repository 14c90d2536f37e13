"""What `kubectl exec` and `kubectl logs` are told: the exit code, the options, the kubelet's refusals."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from slurmlet.hub.kubelet import kubelet_server
from slurmlet.hub.kubelet.exec import check_running, exec_status
from slurmlet.hub.kubelet.kubelet_server import KubeletServer
from slurmlet.hub.kubelet.pod_logs import _check_started, _options
from slurmlet.protocol.log_files import LogOptions
from tests.unit.reports import pod_report


def test_success_has_no_details() -> None:
    assert exec_status({"exit_code": 0}) == {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success",
    }


@pytest.mark.parametrize("code", [1, 126, 137, 255])
def test_an_exit_code_goes_where_kubectl_looks_for_it(code: int) -> None:
    status = exec_status({"exit_code": code})
    assert (status["status"], status["reason"]) == ("Failure", "NonZeroExitCode")
    assert status["details"] == {"causes": [{"reason": "ExitCode", "message": str(code)}]}
    assert str(code) in status["message"]


def test_a_failure_to_run_at_all_is_an_error_of_its_own() -> None:
    status = exec_status({"error": "no such container", "reason": "NotFound"})
    assert (status["status"], status["reason"], status["message"]) == (
        "Failure",
        "NotFound",
        "no such container",
    )
    assert exec_status({"error": "x"})["reason"] == "InternalError"
    assert "details" not in status


@pytest.mark.parametrize(
    ("query", "options"),
    [
        ({}, LogOptions()),
        (
            {"follow": "true", "previous": "true", "timestamps": "true"},
            LogOptions(follow=True, previous=True, timestamps=True),
        ),
        ({"follow": "false"}, LogOptions()),
        ({"sinceSeconds": "90"}, LogOptions(since_s=90.0)),
        ({"sinceTime": "2026-01-01T00:00:00Z"}, LogOptions(since_time="2026-01-01T00:00:00Z")),
        ({"tailLines": "0"}, LogOptions(tail_lines=0)),
        ({"tailLines": "20", "limitBytes": "100"}, LogOptions(tail_lines=20, limit_bytes=100)),
        ({"stream": "Stderr"}, LogOptions(log_stream="Stderr")),
    ],
)  # fmt: skip
def test_options_of_kubectl_logs(query: dict[str, str], options: LogOptions) -> None:
    assert _options(query) == options


@pytest.mark.parametrize("name", ["tailLines", "sinceSeconds", "limitBytes"])
@pytest.mark.parametrize("text", ["-1", "x", "", "1.5", "--5", "²", "1e3", " 1"])
def test_a_number_that_is_none_is_the_callers_mistake(name: str, text: str) -> None:
    with pytest.raises(web.HTTPBadRequest) as error:
        _options({name: text})
    assert name in str(error.value.text)


def worker(
    status: dict[str, Any] | None = None, report: dict[str, Any] | None = None, kind: str = "containers"
) -> Any:
    pod = {
        "metadata": {"name": "p"},
        "spec": {},
        "status": {"containerStatuses": [{"name": "c", **(status or {})}]},
    }
    told = None if report is None else pod_report(**{kind: {"c": report}})
    return SimpleNamespace(state=SimpleNamespace(pod=pod, report=told))


def waiting(reason: str) -> dict[str, Any]:
    return {"state": {"waiting": {"reason": reason}}, "lastState": {}}


LAST = {"exit_code": 1, "started_at": "x", "finished_at": "y"}
RUNNING = {"state": {"running": {}}, "lastState": {}}


@pytest.mark.parametrize(
    ("pod", "text"),
    [
        (
            worker(waiting("ContainerCreating")),
            'container "c" in pod "p" is waiting to start: ContainerCreating',
        ),
        (worker(waiting("Queued")), 'container "c" in pod "p" is waiting to start: Queued'),
        (
            worker(waiting("ErrImagePull")),
            'container "c" in pod "p" is waiting to start: image can\'t be pulled',
        ),
        (
            worker(waiting("ImagePullBackOff")),
            'container "c" in pod "p" is waiting to start: trying and failing to pull image',
        ),
        (
            worker(waiting("PodInitializing"), {"state": "waiting", "reason": "PodInitializing"}),
            'container "c" in pod "p" is waiting to start: PodInitializing',
        ),
    ],
)
def test_logs_of_a_container_that_has_not_begun(pod: Any, text: str) -> None:
    """The words of the kubelet's validateContainerLogStatus."""
    with pytest.raises(web.HTTPBadRequest) as error:
        _check_started(pod, "c", previous=False)
    assert error.value.text == text


@pytest.mark.parametrize(
    "pod",
    [
        worker(RUNNING),
        worker(RUNNING, {"state": "running"}),
        worker({"state": {"terminated": {}}, "lastState": {}}),
        # The runner knows more than the object, which is written a moment later.
        worker(waiting("ContainerCreating"), {"state": "running"}),
        worker(waiting("ContainerCreating"), {"state": "terminated"}),
        worker(waiting("CrashLoopBackOff"), {"state": "waiting", "last": LAST}),
        worker({"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": {}}}),
        worker(waiting("ContainerCreating"), {"state": "running"}, kind="init_containers"),
    ],
)
def test_logs_of_a_container_that_has(pod: Any) -> None:
    _check_started(pod, "c", previous=False)


@pytest.mark.parametrize(
    "pod", [worker(RUNNING), worker(RUNNING, {"state": "running", "last": None}), worker({})]
)
def test_there_is_no_previous_run(pod: Any) -> None:
    with pytest.raises(web.HTTPBadRequest) as error:
        _check_started(pod, "c", previous=True)
    assert error.value.text == 'previous terminated container "c" in pod "p" not found'


@pytest.mark.parametrize(
    "pod",
    [
        worker(RUNNING, {"state": "running", "last": LAST}),
        worker({"state": {"running": {}}, "lastState": {"terminated": {"exitCode": 1}}}),
    ],
)
def test_there_is_a_previous_run(pod: Any) -> None:
    assert _check_started(pod, "c", previous=True) is None


@pytest.mark.parametrize("began_before", [True, False])
def test_exec_waits_for_a_runner_that_is_about_to_find_a_new_hub(began_before: bool) -> None:
    """Of a pod that its object says has run; one that never did is answered at once."""
    state = SimpleNamespace(report=None, began_before=began_before)

    async def linked(_timeout_s: float) -> None:
        state.report = pod_report({"c": {"state": "running"}})

    asked: Any = SimpleNamespace(state=state, linked=linked)
    if began_before:
        asyncio.run(check_running(asked, "c"))
    with pytest.raises(web.HTTPNotFound):
        asyncio.run(check_running(asked, "another" if began_before else "c"))


def refreshed(refresh: Any) -> int:
    server = KubeletServer(None, None, None, refresh)  # type: ignore[arg-type]
    return asyncio.run(server._refresh(None)).status  # type: ignore[arg-type]


def test_a_refresh_is_answered_when_it_is_done() -> None:
    done: list[str] = []

    async def refresh() -> None:
        done.append("looked")

    assert refreshed(refresh) == 200
    assert done == ["looked"]


def test_a_refresh_is_not_waited_for_longer_than_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubelet_server, "_REFRESH_S", 0.01)

    async def refresh() -> None:
        await asyncio.Event().wait()

    assert refreshed(refresh) == 504
