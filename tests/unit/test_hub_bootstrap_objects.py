"""Objects that the hub makes in every cluster, against an API server that is just starting or has them already."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmlet.hub import bootstrap_objects
from slurmlet.hub.allocations import offered_objects
from slurmlet.hub.network import dns_rbac
from slurmlet.kube.client import ApiError
from tests.unit.hub_making import make_settings
from tests.unit.virtual_time import run_virtually

OURS = {"app.kubernetes.io/managed-by": "slurmlet"}


class Api:
    """Keeps what is created, by path and name. Refuses the first requests, as a server that is just starting does."""

    def __init__(self, refuses: int = 0, status: int = 403) -> None:
        self.objects: dict[str, Any] = {}
        self.patched: list[str] = []
        self._refuses, self._status = refuses, status
        self.answers: dict[str, list[Any]] = {}

    async def create(self, path: str, wanted: Any) -> Any:
        if self._refuses:
            self._refuses -= 1
            raise ApiError(self._status, "Refused", "not yet")
        if path in self.answers:
            return self.answers[path].pop(0)
        name = f"{path}/{wanted['metadata']['name']}"
        if name in self.objects:
            raise ApiError(409, "AlreadyExists", f"{name} exists")
        self.objects[name] = wanted
        return wanted

    async def get(self, path: str) -> Any:
        return self.objects[path]

    async def patch(self, path: str, wanted: Any) -> Any:
        self.patched.append(path)
        return wanted


def offer(api: Api, *, with_gangs: bool = True) -> None:
    run_virtually(offered_objects.offer(api, with_gangs=with_gangs))  # type: ignore[arg-type]


def test_runtime_classes_are_offered_and_with_gangs_their_policies() -> None:
    few, all_ = Api(), Api()
    offer(few, with_gangs=False)
    offer(all_)
    assert few.objects.keys() < all_.objects.keys()
    assert {name.split("/")[-2] for name in few.objects} == {"runtimeclasses"}
    kinds = {name.split("/")[-2] for name in all_.objects}
    assert kinds == {"runtimeclasses", "mutatingadmissionpolicies", "mutatingadmissionpolicybindings"}
    assert all(one["metadata"]["labels"] == OURS for one in all_.objects.values())


def test_a_server_that_is_just_starting_is_asked_until_it_takes_all() -> None:
    api, patient = Api(), Api(refuses=7)
    offer(api)
    offer(patient)
    assert patient.objects == api.objects


def test_what_is_there_is_brought_up_to_date_and_what_others_made_is_left_alone() -> None:
    api = Api()
    offer(api)
    theirs = sorted(api.objects)[0]
    api.objects[theirs] = {"metadata": {"name": theirs.rpartition("/")[2], "labels": None}}
    offer(api)
    assert sorted(api.patched) == sorted(api.objects)[1:]


def test_coredns_gets_its_rights_once_and_later_the_newer_ones() -> None:
    api: Any = Api()
    run_virtually(dns_rbac.grant(api))
    assert api.patched == []
    run_virtually(dns_rbac.grant(api))
    assert {path.split("/")[-2] for path in api.patched} == {"clusterroles", "clusterrolebindings"}
    rules = dns_rbac.objects()["clusterroles"]["rules"]
    assert {verb for rule in rules for verb in rule["verbs"]} == {"list", "watch"}
    with pytest.raises(ApiError):
        run_virtually(dns_rbac.grant(Api(refuses=1)))  # type: ignore[arg-type]


def test_the_token_of_a_cluster_in_a_job_appears_last(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    settings.files.pki.mkdir(parents=True)
    settings.pki("ca.crt").write_text("the authority")
    (settings.files.nodes / "c1").mkdir(parents=True)
    settings.files.token.parent.mkdir()
    api: Any = Api(refuses=3)
    reviews = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    token = "/api/v1/namespaces/kube-system/serviceaccounts/slurmlet-admin/token"
    # The server hears of its own new binding a moment later.
    api.answers = {
        reviews: [{"status": {"allowed": False}}, {"status": {"allowed": True}}],
        token: [{"status": {"token": "t0ken"}}],
    }
    waited: list[set[str]] = []

    async def until_ready(names: set[str]) -> None:
        assert not settings.files.token.exists()
        waited.append(names)

    nodes: Any = SimpleNamespace(until_ready=until_ready)
    run_virtually(bootstrap_objects.provide(settings, api, nodes))
    assert waited == [{"c1"}]
    assert settings.files.token.read_text() == "t0ken"
    assert settings.files.token.stat().st_mode & 0o777 == 0o600
    created = api.objects["/api/v1/namespaces/default/configmaps/kube-root-ca.crt"]
    assert created["data"] == {"ca.crt": "the authority"}
    assert api.answers[reviews] == []
