from __future__ import annotations

import base64
from typing import Any

import pytest

from slurmlet.base.errors import RefusedPod
from slurmlet.model import trust_bundles
from slurmlet.model.downward_api import Place
from slurmlet.model.pod_sources import MissingSource, Sources, Token, token_lifetime_s, volume_needs
from slurmlet.model.volume_plan import files_plan, mount_plans, mount_status, shows_pod, volume_plan

POD: dict[str, Any] = {
    "metadata": {"namespace": "ns", "name": "p", "uid": "pod1", "labels": {"a": "b"}},
    "spec": {"containers": []},
}
SOURCES = Sources(
    config_maps={"cm": {"k": b"v", "other": b"o"}},
    secrets={"s": {"word": b"\xff"}},
    tokens={Token("", 600): "jwt"},
)


def plan(volume: dict[str, Any], sources: Sources = SOURCES) -> dict[str, Any]:
    return volume_plan(POD, {"name": "x", **volume}, sources, Place(), {"img:1": "/store/img"})


def shown(volume: dict[str, Any], sources: Sources = SOURCES) -> dict[str, tuple[bytes, int]]:
    files = plan(volume, sources)["files"]
    return {path: (base64.b64decode(one["data"]), one["mode"]) for path, one in files.items()}


def test_files_with_items_and_modes() -> None:
    assert shown({"configMap": {"name": "cm"}}) == {"k": (b"v", 0o644), "other": (b"o", 0o644)}
    items = [{"key": "k", "path": "a/b", "mode": 0o400}, {"key": "other", "path": "c"}]
    assert shown({"configMap": {"name": "cm", "items": items, "defaultMode": 0o440}}) == {
        "a/b": (b"v", 0o400),
        "c": (b"o", 0o440),
    }
    assert shown({"secret": {"secretName": "s"}}) == {"word": (b"\xff", 0o644)}


def test_optional_is_empty_and_missing_names_the_volume() -> None:
    assert shown({"configMap": {"name": "none", "optional": True}}) == {}
    assert (
        shown({"secret": {"secretName": "s", "optional": True, "items": [{"key": "no", "path": "p"}]}}) == {}
    )
    for source, words in (
        ({"configMap": {"name": "none"}}, 'configmap "none" not found'),
        ({"secret": {"secretName": "none"}}, 'secret "none" not found'),
        (
            {"configMap": {"name": "cm", "items": [{"key": "no", "path": "p"}]}},
            "configmap references non-existent config key: no",
        ),
        (
            {"secret": {"secretName": "s", "items": [{"key": "no", "path": "p"}]}},
            "references non-existent secret key: no",
        ),
    ):
        with pytest.raises(MissingSource) as caught:
            plan(source)
        assert caught.value.event == f'MountVolume.SetUp failed for volume "x" : {words}'


PROJECTED = {
    "projected": {
        "sources": [
            {"serviceAccountToken": {"path": "token", "expirationSeconds": 600}},
            {"configMap": {"name": "cm", "items": [{"key": "k", "path": "k"}]}},
            {"downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
        ]
    }
}


def test_projected_parts_lie_together_and_a_token_can_be_kept() -> None:
    assert shown(PROJECTED) == {"token": (b"jwt", 0o644), "k": (b"v", 0o644), "labels": (b'a="b"', 0o644)}
    later = Sources(config_maps=SOURCES.config_maps)
    kept = files_plan(POD, {"name": "x", **PROJECTED}, later, Place())["files"]["token"]
    assert kept == {"mode": 0o644, "keep": True, "token": True}
    assert shows_pod(PROJECTED)
    assert not shows_pod({"configMap": {"name": "cm"}})


def test_what_volumes_need() -> None:
    found = volume_needs({"spec": {"volumes": [{"name": "x", **PROJECTED}, {"secret": {"secretName": "s"}}]}})
    assert found.objects == {("configmaps", "cm"), ("secrets", "s")}
    assert found.tokens == {Token("", 600)}


def test_other_kinds() -> None:
    assert plan({"emptyDir": {}}) == {"kind": "empty", "medium": "", "size_bytes": None, "limit": ""}
    limited = plan({"emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}})
    assert limited == {"kind": "empty", "medium": "Memory", "size_bytes": 1 << 20, "limit": "1Mi"}
    assert plan({"emptyDir": {"sizeLimit": "0"}})["size_bytes"] is None
    assert plan({}) == plan({"emptyDir": {}})
    assert plan({"hostPath": {"path": "/a"}}) == {"kind": "host", "path": "/a", "type": ""}
    assert plan({"image": {"reference": "img:1"}}) == {
        "kind": "image",
        "image": "img:1",
        "image_dir": "/store/img",
    }


def mounts(mount: dict[str, Any], **environment: str) -> dict[str, Any]:
    container = {"name": "main", "volumeMounts": [{"name": "x", "mountPath": "/x", **mount}]}
    return next(iter(mount_plans(container, environment)))


def test_sub_paths_with_variables() -> None:
    assert mounts({"subPath": "$(A)"}, A="no")["sub_path"] == "$(A)"
    assert mounts({"subPathExpr": "$(A)/$$(A)/x"}, A="one")["sub_path"] == "one/$(A)/x"
    for template, words in (
        ("$(NONE)/$(EMPTY)", "missing value for EMPTY, NONE"),
        ("$(ROOT)", "must not be an absolute path"),
        ("a/$(UP)", "must not contain"),
    ):
        with pytest.raises(RefusedPod, match=words) as caught:
            mounts({"subPathExpr": template}, ROOT="/etc", UP="..", EMPTY="")
        assert caught.value.reason == "CreateContainerConfigError"


def test_read_only_mounts_and_how_they_are_shown() -> None:
    assert mounts({})["recursive_read_only"] == ""
    assert mounts({"readOnly": True, "recursiveReadOnly": "Disabled"})["recursive_read_only"] == ""
    assert (
        mounts({"readOnly": True, "recursiveReadOnly": "IfPossible"})["recursive_read_only"] == "IfPossible"
    )
    base = {"name": "x", "mountPath": "/x"}
    assert mount_status({**base, "readOnly": False}) == base
    assert mount_status({**base, "readOnly": True}) == {
        **base,
        "readOnly": True,
        "recursiveReadOnly": "Disabled",
    }
    enabled = {**base, "readOnly": True, "recursiveReadOnly": "Enabled"}
    assert mount_status(enabled) == enabled


@pytest.mark.parametrize(("expiry_s", "latest_s"), [(600, 480), (3607, 2885.6), (7 * 86400, 86400)])
def test_tokens_are_replaced_at_four_fifths_of_their_life(expiry_s: int, latest_s: float) -> None:
    assert token_lifetime_s(expiry_s, 0) == pytest.approx(latest_s)
    assert token_lifetime_s(expiry_s, 1) == pytest.approx(latest_s - 10)


def pem(content: bytes) -> str:
    return f"-----BEGIN CERTIFICATE-----\n{base64.b64encode(content).decode()}\n-----END CERTIFICATE-----\n"


def bundle(name: str, text: str, signer: str = "", **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": labels}, "spec": {"trustBundle": text, "signerName": signer}}


BUNDLES = [
    bundle("one", "comment\n" + pem(b"A" * 60) + pem(b"B")),
    bundle("two", pem(b"B") + pem(b"C"), "example.com/s", tier="prod"),
    bundle("three", pem(b"D"), "example.com/s", tier="test"),
]


def test_trust_bundles_by_name_and_by_signer() -> None:
    by_name = trust_bundles.anchors({"name": "one"}, BUNDLES).decode()
    assert by_name.count("BEGIN") == 2
    assert "comment" not in by_name
    assert all(len(line) <= 64 for line in by_name.splitlines())

    def chosen(**source: Any) -> int:
        return trust_bundles.anchors(
            {"signerName": "example.com/s", "optional": True, **source}, BUNDLES
        ).count(b"BEGIN")

    assert chosen(labelSelector={}) == 3
    assert chosen() == 0, "no selector matches nothing"
    assert chosen(labelSelector={"matchLabels": {"tier": "prod"}}) == 2
    for operator, values, count in (
        ("In", ["test"], 1),
        ("NotIn", ["test"], 2),
        ("Exists", [], 3),
        ("DoesNotExist", [], 0),
    ):
        expression = {"key": "tier", "operator": operator, "values": values}
        assert chosen(labelSelector={"matchExpressions": [expression]}) == count, operator


def test_a_missing_trust_bundle() -> None:
    with pytest.raises(MissingSource, match='"none" not found'):
        trust_bundles.anchors({"name": "none"}, BUNDLES)
    with pytest.raises(MissingSource, match="matched zero ClusterTrustBundles"):
        trust_bundles.anchors({"signerName": "x/y", "labelSelector": {}}, BUNDLES)
    assert trust_bundles.anchors({"name": "none", "optional": True}, BUNDLES) == b""
