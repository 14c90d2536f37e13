"""Conversations in datagrams: translation, times, bounds."""

from __future__ import annotations

import pytest

from slurmlet.podnet.addresses import number
from slurmlet.podnet.slow import flows as flows_module
from slurmlet.podnet.slow.flows import Flow, Flows, Via, key

POD, OTHER, SERVICE, SECOND = (number(ip) for ip in ("10.244.0.7", "10.244.0.8", "10.96.0.10", "10.96.0.11"))


class Time:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def flows(time: Time) -> Flows:
    return Flows(POD, clock=time)


def to_pod(flows: Flows, *what: object) -> Flow:
    flow = flows.to_pod(*what)  # type: ignore[arg-type]
    assert flow is not None
    return flow


def test_a_pod_by_its_own_address_is_not_translated(flows: Flows) -> None:
    flow = to_pod(flows, 40000, OTHER, 53, (OTHER, 53))
    assert (flow.forth, flow.back) == (None, None)
    assert flows.out[key(POD, OTHER, 40000, 53)] is flow
    assert flows.into[key(OTHER, POD, 53, 40000)] is flow


def test_a_service_is_translated_there_and_back(flows: Flows) -> None:
    flow = to_pod(flows, 40000, SERVICE, 53, (OTHER, 5353))
    assert flow.forth == (None, None, OTHER, 5353)
    assert flow.back == (SERVICE, 53, None, 40000)
    assert flows.into[key(OTHER, POD, 5353, 40000)] is flow


def test_two_services_with_one_backend_can_be_told_apart(flows: Flows) -> None:
    first = to_pod(flows, 40000, SERVICE, 53, (OTHER, 5353))
    second = to_pod(flows, 40000, SECOND, 53, (OTHER, 5353))
    direct = to_pod(flows, 40000, OTHER, 5353, (OTHER, 5353))
    assert len({first.into_key, second.into_key, direct.into_key}) == 3
    assert second.forth is not None
    assert second.forth[1] not in (None, 40000)
    assert second.back == (SECOND, 53, None, 40000)
    assert direct.back == (OTHER, 5353, None, 40000)


def test_a_service_of_the_pod_itself_is_its_own_client(flows: Flows) -> None:
    flow = flows.to_own(40000, SERVICE, 53, 5353)
    assert flow is not None
    assert flow.forth == (SERVICE, 40000, POD, 5353)
    answers = flows.out[key(POD, SERVICE, 5353, 40000)]
    assert answers.forth == (SERVICE, 53, POD, 40000)
    flows.close(flow)
    assert flows.out == {}


@pytest.mark.parametrize(
    ("replied", "talked_s", "over_after_s"),
    [(False, 0.0, 30.0), (False, 20.0, 30.0), (True, 0.0, 30.0), (True, 20.0, 120.0)],
)
def test_flows_end_when_conntracks_do(
    flows: Flows, time: Time, replied: bool, talked_s: float, over_after_s: float
) -> None:
    flow = to_pod(flows, 40000, OTHER, 53, (OTHER, 53))
    flow.replied = replied
    flows.sweep()
    time.now_s = talked_s
    flow.used = True
    flows.sweep()
    time.now_s = talked_s + over_after_s - 0.1
    flows.sweep()
    assert flows.out
    time.now_s = talked_s + over_after_s
    flows.sweep()
    assert (flows.out, flows.into) == ({}, {})


def test_either_half_keeps_the_other_alive(flows: Flows, time: Time) -> None:
    flow = flows.to_own(40000, SERVICE, 53, 5353)
    assert flow is not None
    assert flow.twin is not None
    for _ in range(10):
        time.now_s += 20.0
        flow.twin.used = True
        flows.sweep()
    assert len(flows.out) == 2


def test_the_number_of_flows_is_bounded(flows: Flows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows_module, "_MAX_FLOWS", 100)
    for port in range(1, 501):
        to_pod(flows, port, OTHER, 53, (OTHER, 53))
    assert (len(flows.out), len(flows.into)) == (100, 100)
    assert key(POD, OTHER, 500, 53) in flows.out


def test_closing_closes_the_relay(flows: Flows) -> None:
    class Relay:
        closed = 0

        def send(self, data: bytes) -> None:
            raise AssertionError

        def close(self) -> None:
            self.closed += 1

    flow = flows.to_host(40000, OTHER, 53, (OTHER, 53))
    relay = flow.relay = Relay()
    flows.close(flow)
    flows.close(flow)
    assert relay.closed == 1


def test_who_speaks_to_the_pod_is_answered_the_same_way(flows: Flows) -> None:
    flow = flows.from_far(SERVICE, 9, 53, Via(1, 2))
    assert flows.out[key(POD, SERVICE, 53, 9)] is flow
    assert flow.inbound
    assert flow.forth is None
