"""Paths of the API: a name out of a manifest must stay one name."""

from __future__ import annotations

import pytest

from slurmlet.kube.client import ApiError, checked_path


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/nodes",
        "/api/v1/namespaces/a/pods/b-1.c/status",
        "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/batch",
    ],
)
def test_plain_paths_pass(path: str) -> None:
    assert checked_path(path) == path


@pytest.mark.parametrize(
    "name", ["../../other/secrets/x", "..", ".", "", "x/..", "x?watch=1", "x#", "%2e%2e", "x%2f..", "..\\x"]
)
def test_names_that_lead_elsewhere_are_not_found(name: str) -> None:
    with pytest.raises(ApiError) as raised:
        checked_path(f"/api/v1/namespaces/mine/secrets/{name}")
    assert raised.value.status == 404
    assert not raised.value.transient
