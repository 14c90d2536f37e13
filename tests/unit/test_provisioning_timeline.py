"""The timeline of a provisioning site: from looks at it to spans, text and a picture."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

from slurmlet.testbed.provisioning import timeline
from slurmlet.testbed.provisioning.timeline import Sample, Span


def machine(name: str, *, deleting: bool = False, provisioned: bool = False) -> dict[str, Any]:
    metadata = {"name": name, **({"deletionTimestamp": "now"} if deleting else {})}
    return {
        "kind": "Machine",
        "metadata": metadata,
        "spec": {"infrastructureRef": {"name": name}},
        "status": {"initialization": {"infrastructureProvisioned": provisioned}},
    }


def test_a_look_tells_jobs_nodes_machines_and_replicas() -> None:
    objects = [
        machine("a"),
        machine("b"),
        machine("c", provisioned=True),
        machine("d", deleting=True),
        {"kind": "Secret", "metadata": {"name": "b-metadata"}},
        {"kind": "MachineDeployment", "metadata": {"name": "w"}, "spec": {"replicas": 4}},
    ]
    seen = timeline.sample(
        1.0, "7 PENDING\n8 RUNNING\n", "c idle\nd draining*\nshape-small-1 down*\ncloud-1 idle~\n", objects
    )
    assert seen.jobs == {"7": "PENDING", "8": "RUNNING"}
    assert seen.nodes == {"c": "idle", "d": "draining"}
    assert seen.machines == {"a": "machine", "b": "injected", "c": "provisioned", "d": "deleting"}
    assert seen.replicas == {"w": 4}
    assert seen.rows()["c"] == "idle"
    assert seen.rows()["d"] == "draining"
    assert Sample(0.0, {}, {"e": "down"}, {"e": "deleting"}, {}).rows() == {"e": "deleting"}


def test_states_in_words_of_the_picture() -> None:
    assert [timeline.node_state(word) for word in ("mixed", "allocated-", "idle*", "drained", "unknown")] == [
        "busy",
        "busy",
        "idle",
        "drained",
        "down",
    ]


def looks() -> list[Sample]:
    return [
        Sample(10.0, {"1": "PENDING"}, {}, {}, {"w": 0}),
        Sample(12.0, {"1": "PENDING"}, {}, {"m": "machine"}, {"w": 1}),
        Sample(15.0, {"1": "RUNNING"}, {"m": "busy"}, {"m": "provisioned"}, {"w": 1}),
        Sample(20.0, {}, {}, {}, {"w": 0}),
    ]


def test_spans_last_from_change_to_change() -> None:
    assert timeline.spans(looks())[:4] == [
        Span("job 1", "PENDING", 10.0, 15.0),
        Span("m", "machine", 12.0, 15.0),
        Span("job 1", "RUNNING", 15.0, 20.0),
        Span("m", "busy", 15.0, 20.0),
    ]


def test_phases_count_from_the_first_jobs_submission() -> None:
    assert timeline.phases(looks()) == [
        ("replicas raised", 2.0),
        ("Machine created", 2.0),
        ("metadata rendered", 5.0),
        ("slurmd registered", 5.0),
        ("job started", 5.0),
        ("machine provisioned", 5.0),
    ]
    assert timeline.phases([]) == []
    assert timeline.phases(looks(), 9.5)[0] == ("replicas raised", 2.5)


def test_text_counts_from_the_first_look() -> None:
    assert "5.0 s  job 1                        running for 5.0 s" in timeline.text(looks())
    assert timeline.text([]) == ""


def test_the_picture_is_svg_with_a_row_for_each_job_and_machine() -> None:
    root = ElementTree.fromstring(timeline.picture(looks(), "a < b"))
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "job 1", "m", "0 s"} <= set(words)
    titles = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "m: busy, 5.0 s" in titles
