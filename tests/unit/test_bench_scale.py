"""What the scale bench makes of its measurements."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from slurmlet.base.errors import UserError
from slurmlet.base.line_chart import chart
from slurmlet.bench.scale import Batch, HubSample, HubWatch, Scale, ScaleBench, hub_usage


def test_rates_count_until_all_are_gone() -> None:
    samples = [HubSample(0.0, 50 << 20, 1.0), HubSample(9.0, 70 << 20, 3.5)]
    told = Scale(
        [Batch(10, 0.1, 0.5, 1.0), Batch(10, 0.1, 0.5, 1.0)],
        [Batch(10, 1, 2, 4), Batch(10, 1, 3, 6)],
        samples,
        1,
        2,
    )
    found = told.as_json()
    assert (found["sbatch"]["per_s"], found["pods"]["per_s"], found["ratio"]) == (10.0, 2.0, 0.2)
    assert (found["hub"]["peak_memory_bytes"], found["hub"]["cpu_s"]) == (70 << 20, 2.5)
    assert found["pods"]["batches"][1] == {
        "count": 10,
        "accepted_s": 1,
        "started_s": 3,
        "gone_s": 6,
        "per_s": 1.667,
    }


def test_the_hub_is_watched_from_outside() -> None:
    with HubWatch(os.getpid()) as watch:
        pass
    assert watch.samples
    memory_bytes, cpu_s = hub_usage(os.getpid())
    assert 5 << 20 < watch.samples[0].memory_bytes < 2 << 30
    assert memory_bytes > 0
    assert cpu_s > 0


def test_odd_process_names_do_not_shift_the_fields(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (a) b (c) S 1 0 0 0 0 0 0 0 0 0 150 50 9 9 0\n")
    (tmp_path / "7" / "statm").write_text("100 25 5 0 0 0 0\n")
    ticks = os.sysconf("SC_CLK_TCK")
    assert hub_usage(7, tmp_path) == (25 * os.sysconf("SC_PAGE_SIZE"), 200 / ticks)


def test_the_picture_is_well_formed_and_holds_every_point() -> None:
    text = chart("a < b & c", ("memory", [(0.0, 1.0), (5.0, 2.0), (10.0, 3.0)]), ("cpu", []))
    root = ElementTree.fromstring(text)
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len((line.get("points") or "").split()) for line in lines] == [3, 0]
    assert "a < b & c" in "".join(root.itertext())


def test_no_cluster_is_said_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMLET_HOME", str(tmp_path))
    with pytest.raises(UserError, match="does not exist"):
        ScaleBench("nobody", "busybox:1")
