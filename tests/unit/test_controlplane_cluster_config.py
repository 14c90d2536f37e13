from __future__ import annotations

import json
import re
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from slurmlet.base.errors import UserError
from slurmlet.base.files import private_dir
from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane import cluster_config as configs
from slurmlet.controlplane.address_ranges import Ranges


def decide(
    files: ClusterFiles, partitions: Sequence[str] = (), launch: str | None = None
) -> configs.ClusterConfig:
    return configs.decide(
        files,
        kubernetes="v1.36.3",
        host="login1",
        addresses=["192.0.2.9"],
        api_address="192.0.2.9",
        partitions=partitions,
        ranges=Ranges("10.244.0.0/16", "10.96.0.0/16"),
        launch=launch,
    )


@pytest.fixture
def files(tmp_path: Path) -> ClusterFiles:
    return ClusterFiles(private_dir(tmp_path / "exp"))


def test_file_holds_what_the_hub_reads(files: ClusterFiles) -> None:
    config = decide(files, ["batch", "short"])
    config.save(files)
    raw = json.loads(files.config.read_text())
    wanted = {
        "name",
        "id",
        "created_at",
        "kubernetes",
        "api_address",
        "api_port",
        "service_range",
        "pod_range",
        "partitions",
    }
    assert wanted <= set(raw)
    assert re.fullmatch(r"[0-9a-f]{8}", raw["id"])
    assert raw["partitions"] == ["batch", "short"]
    assert files.config.stat().st_mode & 0o777 == 0o600
    assert configs.load(files) == config


def test_next_start_keeps_identity_port_and_partitions(files: ClusterFiles) -> None:
    first = decide(files, ["batch"])
    first.save(files)
    again = decide(files)
    assert (again.id, again.created_at, again.api_port) == (first.id, first.created_at, first.api_port)
    assert again.partitions == ("batch",)
    assert decide(files, ["short"]).partitions == ("short",)


def test_next_start_leaves_a_taken_port_alone(files: ClusterFiles) -> None:
    first = decide(files)
    first.save(files)
    assert first.partitions is None
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", first.api_port))
        holder.listen()
        assert decide(files).api_port != first.api_port


def test_missing_cluster_says_how_to_make_it(files: ClusterFiles) -> None:
    with pytest.raises(UserError) as caught:
        configs.load_existing(files)
    assert "slurmlet up -c exp" in caught.value.hint


def test_encryption_is_chosen_once(files: ClusterFiles) -> None:
    assert configs.encryption(None, None) is False
    plain, sealed = (
        configs.from_json({**decide(files).__dict__, "encrypt": is_on}) for is_on in (False, True)
    )
    for config in (plain, sealed):
        assert configs.encryption(config, None) is config.encrypt
        assert configs.encryption(config, config.encrypt) is config.encrypt
        with pytest.raises(UserError, match="encrypt") as caught:
            configs.encryption(config, not config.encrypt)
        assert "--purge" in caught.value.hint


def test_how_pods_start_is_kept_until_somebody_says_otherwise(files: ClusterFiles) -> None:
    assert decide(files).launch == "batch"
    decide(files, launch="auto").save(files)
    assert decide(files).launch == "auto"
    assert decide(files, launch="immediate").launch == "immediate"
