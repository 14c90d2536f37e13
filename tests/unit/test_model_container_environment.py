"""Variables and command lines by the kubelet's rules; what is missing and what is odd."""

from __future__ import annotations

from typing import Any

import pytest

from slurmlet.base.errors import RefusedPod
from slurmlet.model.container_environment import command_line, container_environment, expand
from slurmlet.model.downward_api import Place
from slurmlet.model.pod_sources import (
    MissingSource,
    Needs,
    Sources,
    Token,
    config_map_data,
    needs,
    secret_data,
)

PLACE = Place(host_ip="10.0.0.5", host="c1", node_cpus=16, node_memory_bytes=6000 << 20)


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("plain", "plain"), ("$(A)", "a"), ("x$(A)y$(B)", "xayb"), ("$(A)$(A)", "aa"), ("$$(A)", "$(A)"),
        ("$$$(A)", "$a"), ("$$$$(A)", "$$(A)"), ("$$", "$"), ("$", "$"), ("$A ${A}", "$A ${A}"),
        ("$(NONE)", "$(NONE)"), ("$(A", "$(A"), ("$()", "$()"), ("$(A)B)", "aB)"), ("$($(A))", "$($(A))"),
        ("$(with space)", "$(with space)"), ("100%", "100%"), ("", ""), ("$(NESTED)", "$(A)"),
    ],
)  # fmt: skip
def test_expansion_as_in_kubernetes(text: str, expanded: str) -> None:
    """Cases of third_party/forked/golang/expansion: what is unknown stays, what is expanded is not looked at again."""
    assert expand(text, {"A": "a", "B": "b", "NESTED": "$(A)"}) == expanded


def pod(**metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "p", "namespace": "ns", "uid": "u", **metadata},
        "spec": {"nodeName": "batch"},
    }


def environment(
    sources: Sources | None = None, services: dict[str, str] | None = None, **container: Any
) -> dict[str, str]:
    return container_environment(
        pod(), {"name": "c", **container}, sources or Sources(), PLACE, services or {}
    )


SOURCES = Sources(
    config_maps={"cm": {"A": b"from map", "B": b"b"}, "empty": {}},
    secrets={"sec": {"A": b"from secret"}, "raw": {"bin": b"\xff\xfe"}},
)


def test_a_reference_sees_only_what_stands_before_it() -> None:
    env = [
        {"name": "EARLY", "value": "$(LATE)"},
        {"name": "LATE", "value": "late"},
        {"name": "AFTER", "value": "$(LATE)"},
    ]
    assert environment(env=env) == {"EARLY": "$(LATE)", "LATE": "late", "AFTER": "late"}


def test_services_are_seen_and_can_be_replaced() -> None:
    env = [
        {"name": "URL", "value": "http://$(HOST)"},
        {"name": "HOST", "value": "mine"},
        {"name": "NOW", "value": "$(HOST)"},
    ]
    found = environment(services={"HOST": "10.0.0.1", "PORT": "1"}, env=env)
    assert found == {"HOST": "mine", "PORT": "1", "URL": "http://10.0.0.1", "NOW": "mine"}


def test_env_wins_over_env_from_and_the_later_source_over_the_earlier() -> None:
    env_from = [{"configMapRef": {"name": "cm"}}, {"secretRef": {"name": "sec"}}]
    found = environment(SOURCES, envFrom=env_from, env=[{"name": "B", "value": "own $(A)"}])
    assert found["A"] == "from secret"
    assert found["B"] == "own from secret"


def test_env_from_with_a_prefix() -> None:
    found = environment(SOURCES, envFrom=[{"prefix": "P_", "configMapRef": {"name": "cm"}}])
    assert found == {"P_A": "from map", "P_B": "b"}


def test_values_from_maps_secrets_and_fields() -> None:
    env = [
        {"name": "M", "valueFrom": {"configMapKeyRef": {"name": "cm", "key": "B"}}},
        {"name": "S", "valueFrom": {"secretKeyRef": {"name": "sec", "key": "A"}}},
        {"name": "N", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
        {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
        {"name": "SEEN", "value": "$(M)/$(S)"},
        {"name": "EMPTY"},
    ]
    assert environment(SOURCES, env=env) == {
        "M": "b", "S": "from secret", "N": "p", "IP": "10.0.0.5", "CPU": "16", "SEEN": "b/from secret", "EMPTY": "",
    }  # fmt: skip


def test_bytes_that_are_no_text_are_refused() -> None:
    env = [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "raw", "key": "bin"}}}]
    with pytest.raises(RefusedPod, match="variable 'X' is not UTF-8 text"):
        environment(SOURCES, env=env)


@pytest.mark.parametrize(
    ("container", "message"),
    [
        ({"envFrom": [{"configMapRef": {"name": "gone"}}]}, 'configmap "gone" not found'),
        ({"envFrom": [{"secretRef": {"name": "gone"}}]}, 'secret "gone" not found'),
        (
            {"env": [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "gone", "key": "k"}}}]},
            'secret "gone" not found',
        ),
        (
            {"env": [{"name": "X", "valueFrom": {"configMapKeyRef": {"name": "cm", "key": "k"}}}]},
            "couldn't find key k in ConfigMap cm",
        ),
        (
            {"env": [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "sec", "key": "k"}}}]},
            "couldn't find key k in Secret sec",
        ),
    ],
)
def test_what_is_missing_is_waited_for(container: dict[str, Any], message: str) -> None:
    with pytest.raises(MissingSource) as missing:
        environment(SOURCES, **container)
    assert missing.value.message == message
    assert (missing.value.reason, missing.value.transient) == ("CreateContainerConfigError", True)


def test_what_is_missing_and_optional_is_left_out() -> None:
    env_from = [
        {"configMapRef": {"name": "gone", "optional": True}},
        {"secretRef": {"name": "gone", "optional": True}},
    ]
    env = [
        {"name": "X", "valueFrom": {"secretKeyRef": {"name": "gone", "key": "k", "optional": True}}},
        {"name": "Y", "valueFrom": {"configMapKeyRef": {"name": "cm", "key": "k", "optional": True}}},
        {"name": "Z", "value": "$(X)"},
    ]
    assert environment(SOURCES, envFrom=env_from, env=env) == {"Z": "$(X)"}


@pytest.mark.parametrize(
    "variable",
    [
        {"name": "X", "value": "a\0b"},
        {"name": "X=Y", "value": "a"},
        {"name": "F", "valueFrom": {"somethingNew": {"key": "k"}}},
    ],
)
def test_a_variable_no_process_can_have_is_refused(variable: dict[str, Any]) -> None:
    with pytest.raises(RefusedPod, match="container c"):
        environment(env=[variable])


IMAGE = {"Entrypoint": ["/entry"], "Cmd": ["default"]}


@pytest.mark.parametrize(
    ("container", "argv"),
    [
        ({}, ["/entry", "default"]),
        ({"args": ["x"]}, ["/entry", "x"]),
        ({"command": ["/own"]}, ["/own"]),
        ({"command": ["/own"], "args": ["x", "$(A)"]}, ["/own", "x", "a"]),
        ({"command": ["/own", "$$(A)", "$(NONE)"]}, ["/own", "$(A)", "$(NONE)"]),
        ({"command": [], "args": []}, ["/entry", "default"]),
    ],
)
def test_the_command_line_of_image_and_pod(container: dict[str, Any], argv: list[str]) -> None:
    assert command_line(container, IMAGE, {"A": "a"}) == argv


def test_an_image_without_entrypoint() -> None:
    assert command_line({"args": ["x"]}, {"Cmd": ["sh"]}, {}) == ["x"]
    assert command_line({}, {"Cmd": ["sh"], "Entrypoint": None}, {}) == ["sh"]
    assert command_line({}, {}, {}) == []


def test_what_a_pod_draws_on_is_found_everywhere() -> None:
    token = {"path": "token", "expirationSeconds": 3607}
    spec = {
        "initContainers": [{"name": "i", "envFrom": [{"secretRef": {"name": "s1"}}]}],
        "containers": [
            {
                "name": "c",
                "envFrom": [{"configMapRef": {"name": "m1"}}],
                "env": [
                    {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "m2", "key": "k"}}},
                    {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s2", "key": "k"}}},
                ],
            }
        ],
        "volumes": [
            {"name": "a", "configMap": {"name": "m3"}},
            {"name": "b", "secret": {"secretName": "s3"}},
            {
                "name": "c",
                "projected": {
                    "sources": [
                        {"serviceAccountToken": token},
                        {"serviceAccountToken": {"path": "other", "audience": "vault"}},
                        {"configMap": {"name": "m4"}},
                        {"secret": {"name": "s4"}},
                    ]
                },
            },
        ],
    }
    assert needs({"metadata": {}, "spec": spec}) == Needs(
        frozenset({"m1", "m2", "m3", "m4"}),
        frozenset({"s1", "s2", "s3", "s4"}),
        frozenset({Token("", 3607), Token("vault", 3600)}),
    )


def test_contents_of_api_objects() -> None:
    assert config_map_data({"data": {"a": "ü"}, "binaryData": {"b": "/w=="}}) == {
        "a": "ü".encode(),
        "b": b"\xff",
    }
    assert config_map_data({}) == {}
    assert secret_data({"data": {"a": "cGFzcw=="}}) == {"a": b"pass"}
    assert secret_data({"data": None}) == {}
