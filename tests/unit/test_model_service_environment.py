"""Service variables, as the kubelet makes them."""

from __future__ import annotations

from typing import Any

import pytest

from slurmlet.model.container_environment import container_environment, file_mark
from slurmlet.model.downward_api import Place
from slurmlet.model.pod_sources import Sources
from slurmlet.model.service_environment import api_service, service_of, service_variables


def service(name: str, address: str, *ports: dict[str, Any]) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "ns"},
        "spec": {"clusterIP": address, "ports": list(ports)},
    }


def test_all_variables_of_a_service() -> None:
    found = service_of(
        service(
            "my-db",
            "10.0.0.7",
            {"name": "sql-x", "port": 5432},
            {"name": "up", "port": 53, "protocol": "UDP"},
        )
    )
    assert found is not None
    assert service_variables([found]) == {
        "MY_DB_SERVICE_HOST": "10.0.0.7", "MY_DB_SERVICE_PORT": "5432",
        "MY_DB_SERVICE_PORT_SQL_X": "5432", "MY_DB_SERVICE_PORT_UP": "53",
        "MY_DB_PORT": "tcp://10.0.0.7:5432",
        "MY_DB_PORT_5432_TCP": "tcp://10.0.0.7:5432", "MY_DB_PORT_5432_TCP_PROTO": "tcp",
        "MY_DB_PORT_5432_TCP_PORT": "5432", "MY_DB_PORT_5432_TCP_ADDR": "10.0.0.7",
        "MY_DB_PORT_53_UDP": "udp://10.0.0.7:53", "MY_DB_PORT_53_UDP_PROTO": "udp",
        "MY_DB_PORT_53_UDP_PORT": "53", "MY_DB_PORT_53_UDP_ADDR": "10.0.0.7",
    }  # fmt: skip


def test_an_unnamed_port_and_an_ipv6_address() -> None:
    found = service_of(service("web", "fd00::7", {"port": 80}))
    assert found is not None
    variables = service_variables([found])
    assert variables["WEB_PORT_80_TCP"] == "tcp://[fd00::7]:80"
    assert [name for name in variables if name.startswith("WEB_SERVICE_PORT")] == ["WEB_SERVICE_PORT"]


@pytest.mark.parametrize(
    "obj",
    [
        service("headless", "None", {"port": 1}),
        service("external", ""),
        {"metadata": {"name": "new", "namespace": "ns"}, "spec": {"ports": [{"port": 1}]}},
    ],
)
def test_a_service_without_an_address_gives_none(obj: dict[str, Any]) -> None:
    assert service_of(obj) is None


def test_the_api_server_is_where_it_really_is() -> None:
    variables = service_variables([api_service("192.0.2.1", 6443)])
    assert (variables["KUBERNETES_SERVICE_HOST"], variables["KUBERNETES_SERVICE_PORT_HTTPS"]) == (
        "192.0.2.1",
        "6443",
    )


def test_a_value_from_a_file_leaves_a_mark_and_a_note() -> None:
    reference = {"volumeName": "v", "path": "a/b.env", "key": "K", "optional": True}
    env = [
        {"name": "A", "value": "before"},
        {"name": "A", "valueFrom": {"fileKeyRef": reference}},
        {"name": "B", "value": "<$(A)>"},
        {"name": "C", "valueFrom": {"fileKeyRef": {"volumeName": "v", "path": "p", "key": "L"}}},
    ]
    files: list[dict[str, Any]] = []
    found = container_environment({}, {"name": "c", "env": env}, Sources(), Place(), {}, files)
    assert found == {"A": file_mark(0), "B": f"<{file_mark(0)}>", "C": file_mark(1)}
    noted = {
        "name": "A",
        "volume": "v",
        "path": "a/b.env",
        "key": "K",
        "optional": True,
        "otherwise": "before",
        "image": None,
    }
    assert files[0] == noted
    assert (files[1]["optional"], files[1]["otherwise"]) == (False, None)
