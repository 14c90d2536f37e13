"""The PodPlan: the contract of ARCHITECTURE.md, field by field."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pytest

from slurmlet.base.errors import RefusedPod
from slurmlet.model.downward_api import Place
from slurmlet.model.network_plan import PodNetwork
from slurmlet.model.plan_builder import PlannedImage, Setting, check_sources, pod_plan
from slurmlet.model.pod_sources import MissingSource, Sources, Token

IMAGE = PlannedImage(
    "registry.example/app@sha256:1",
    "/store/images/sha256-1",
    {
        "Entrypoint": ["/app"],
        "Env": ["PATH=/image/bin", "LANG=C", "A=image"],
        "WorkingDir": "/work",
        "User": "app:staff",
    },
)
SOURCES = Sources(
    config_maps={"cm": {"a": b"A", "b": b"B"}},
    secrets={"sec": {"key": b"\x00\xff"}},
    tokens={Token("", 3607): "jwt"},
)


def pod(container: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "web-0", "namespace": "shop", "uid": "u-1", "labels": {"app": "web"}},
        "spec": {"containers": [{"name": "c", "image": "app:1", **(container or {})}], **spec},
    }


def plan(asked: dict[str, Any], image: PlannedImage = IMAGE) -> dict[str, Any]:
    setting = Setting(
        "default", {"app:1": image}, SOURCES, Place("10.0.0.5", "c1", 16, 1 << 30), {"SVC": "10.1.0.1"}
    )
    made = pod_plan(asked, setting)
    assert json.loads(json.dumps(made)) == made, "a plan travels as JSON"
    return made


def covers(made: Any, wanted: Any) -> bool:
    """Whether `made` has all that is wanted; the contract may grow."""
    if isinstance(wanted, dict):
        return isinstance(made, dict) and all(
            key in made and covers(made[key], value) for key, value in wanted.items()
        )
    if isinstance(wanted, list) and isinstance(made, list) and wanted and isinstance(wanted[0], dict):
        return len(made) == len(wanted) and all(map(covers, made, wanted))
    return bool(made == wanted)


def only(asked: dict[str, Any], image: PlannedImage = IMAGE) -> dict[str, Any]:
    found: dict[str, Any] = plan(asked, image)["containers"][0]
    return found


def test_a_plain_pod_as_a_whole() -> None:
    wanted = {
        "uid": "u-1", "name": "web-0", "namespace": "shop", "cluster": "default", "hostname": "web-0",
        "restart_policy": "Always", "grace_s": 30, "share_pid": False, "hosts": [], "init_containers": [], "volumes": {},
        "containers": [
            {
                "name": "c", "image": "app:1", "image_id": "registry.example/app@sha256:1",
                "image_dir": "/store/images/sha256-1", "argv": ["/app"],
                "env": [["PATH", "/image/bin"], ["HOSTNAME", "web-0"], ["LANG", "C"], ["A", "image"], ["SVC", "10.1.0.1"]],
                "cwd": "/work", "mounts": [], "tty": False, "stdin": False, "stdin_once": False,
                "termination_message_path": "/dev/termination-log", "termination_message_policy": "File",
                "stop_signal": "SIGTERM", "sidecar": False,
                "user": {"uid": None, "gid": None, "groups": [], "name": "app:staff"},
                "read_only_root": False, "add_caps": [], "drop_caps": [], "no_new_privs": False, "privileged": False,
            }
        ],
    }  # fmt: skip
    assert covers(plan(pod()), wanted)


def test_everything_a_container_may_say() -> None:
    container = only(
        pod(
            {
                "command": ["sh", "-c", "$(A)"], "args": ["x"], "workingDir": "/tmp", "tty": True, "stdin": True,
                "stdinOnce": True, "terminationMessagePath": "/msg", "terminationMessagePolicy": "FallbackToLogsOnError",
                "env": [{"name": "A", "value": "mine"}],
                "volumeMounts": [
                    {"name": "v", "mountPath": "/v", "readOnly": True, "subPath": "s"}, {"name": "v", "mountPath": "/w"},
                ],
                "securityContext": {"runAsUser": 5, "readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False,
                                    "capabilities": {"add": ["NET_RAW"], "drop": ["ALL"]}},
            },
            securityContext={"runAsUser": 1, "runAsGroup": 2, "supplementalGroups": [3, 4]},
        )
    )  # fmt: skip
    assert container["argv"] == ["sh", "-c", "mine", "x"]
    assert dict(container["env"])["A"] == "mine"
    assert (container["cwd"], container["tty"], container["stdin"], container["stdin_once"]) == (
        "/tmp",
        True,
        True,
        True,
    )
    assert container["termination_message_path"] == "/msg"
    assert container["termination_message_policy"] == "FallbackToLogsOnError"
    mounts = [
        {"volume": "v", "path": "/v", "read_only": True, "sub_path": "s"},
        {"volume": "v", "path": "/w", "read_only": False, "sub_path": ""},
    ]
    assert covers(container["mounts"], mounts)
    assert container["user"] == {"uid": 5, "gid": 2, "groups": [3, 4], "name": "app:staff"}
    assert (container["add_caps"], container["drop_caps"]) == (["NET_RAW"], ["ALL"])
    assert (container["read_only_root"], container["no_new_privs"]) == (True, True)


def test_everything_a_pod_may_say() -> None:
    made = plan(
        pod(
            hostname="h", restartPolicy="Never", terminationGracePeriodSeconds=0, shareProcessNamespace=True,
            hostAliases=[{"ip": "10.9.9.9", "hostnames": ["db", "db.local"]}],
            initContainers=[{"name": "i", "image": "app:1"}, {"name": "s", "image": "app:1", "restartPolicy": "Always"}],
        )
    )  # fmt: skip
    assert (made["hostname"], made["restart_policy"], made["grace_s"], made["share_pid"]) == (
        "h",
        "Never",
        0,
        True,
    )
    assert made["hosts"] == [["10.9.9.9", "db", "db.local"]]
    assert [(one["name"], one["sidecar"]) for one in made["init_containers"]] == [("i", False), ("s", True)]


def test_a_long_name_makes_a_legal_host_name() -> None:
    asked = pod()
    asked["metadata"]["name"] = "a" * 62 + "-b.c"
    assert plan(asked)["hostname"] == "a" * 62


def test_an_image_that_says_nothing_gets_the_usual_path_and_directory() -> None:
    container = only(pod({"command": ["x"]}), PlannedImage("id", "/dir", {}))
    assert dict(container["env"])["PATH"].startswith("/usr/local/sbin:")
    assert (container["cwd"], container["user"]["name"]) == ("/", "")


def test_the_stop_signal_of_the_image_is_kept() -> None:
    assert (
        only(pod(), PlannedImage("id", "/dir", {"Cmd": ["x"], "StopSignal": "SIGQUIT"}))["stop_signal"]
        == "SIGQUIT"
    )


def test_a_container_without_a_command_is_refused() -> None:
    with pytest.raises(RefusedPod, match="container c: neither the image nor the pod"):
        plan(pod(), PlannedImage("id", "/dir", {}))


def test_a_nul_byte_on_the_command_line_is_refused() -> None:
    with pytest.raises(RefusedPod, match="NUL"):
        plan(pod({"command": ["a\0b"]}))


@pytest.mark.parametrize(
    ("container", "of_pod", "user", "refused"),
    [
        ({}, {}, "", False),
        ({"runAsNonRoot": True}, {}, "", True),
        ({"runAsNonRoot": True}, {}, "0", True),
        ({"runAsNonRoot": True}, {}, "root:root", True),
        ({"runAsNonRoot": True}, {}, "1000", False),
        ({"runAsNonRoot": True, "runAsUser": 0}, {}, "1000", True),
        ({"runAsNonRoot": True, "runAsUser": 7}, {}, "", False),
        ({}, {"runAsNonRoot": True}, "", True),
        ({"runAsNonRoot": False}, {"runAsNonRoot": True}, "", False),
        ({"runAsUser": 7}, {"runAsNonRoot": True, "runAsUser": 0}, "", False),
    ],
)
def test_run_as_non_root(container: dict[str, Any], of_pod: dict[str, Any], user: str, refused: bool) -> None:
    image = PlannedImage("id", "/dir", {"Cmd": ["x"], "User": user})
    asked = pod({"securityContext": container}, securityContext=of_pod)
    if not refused:
        assert plan(asked, image)["containers"][0]["argv"] == ["x"]
        return
    with pytest.raises(RefusedPod) as error:
        plan(asked, image)
    assert error.value.reason == "CreateContainerConfigError"


def volume(**source: Any) -> dict[str, Any]:
    found: dict[str, Any] = plan(pod(volumes=[{"name": "v", **source}]))["volumes"]["v"]
    return found


def contents(files: dict[str, Any]) -> dict[str, tuple[bytes, int]]:
    return {path: (base64.b64decode(file["data"]), file["mode"]) for path, file in files.items()}


@pytest.mark.parametrize(
    ("source", "made"),
    [
        ({"emptyDir": {}}, {"kind": "empty", "medium": "", "size_bytes": None}),
        ({}, {"kind": "empty", "medium": "", "size_bytes": None}),
        (
            {"emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
            {"kind": "empty", "medium": "Memory", "size_bytes": 64 << 20},
        ),
        ({"emptyDir": {"sizeLimit": "0"}}, {"kind": "empty", "medium": "", "size_bytes": None}),
        ({"hostPath": {"path": "/data"}}, {"kind": "host", "path": "/data", "type": ""}),
        (
            {"hostPath": {"path": "/data", "type": "Directory"}},
            {"kind": "host", "path": "/data", "type": "Directory"},
        ),
    ],
)
def test_volumes_without_contents(source: dict[str, Any], made: dict[str, Any]) -> None:
    assert covers(volume(**source), made)


@pytest.mark.parametrize(
    ("source", "files"),
    [
        ({"configMap": {"name": "cm"}}, {"a": (b"A", 0o644), "b": (b"B", 0o644)}),
        ({"configMap": {"name": "cm", "defaultMode": 0o400}}, {"a": (b"A", 0o400), "b": (b"B", 0o400)}),
        (
            {"configMap": {"name": "cm", "items": [{"key": "a", "path": "d/x", "mode": 0o755}]}},
            {"d/x": (b"A", 0o755)},
        ),
        ({"configMap": {"name": "cm", "items": [{"key": "a", "path": "x", "mode": 0}]}}, {"x": (b"A", 0)}),
        ({"configMap": {"name": "none", "optional": True}}, {}),
        (
            {"configMap": {"name": "cm", "optional": True, "items": [{"key": "none", "path": "x"}]}},
            {},
        ),
        ({"secret": {"secretName": "sec"}}, {"key": (b"\x00\xff", 0o644)}),
        (
            {"downwardAPI": {"items": [
                {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}, "mode": 0o600},
                {"path": "cpu", "resourceFieldRef": {"containerName": "c", "resource": "limits.cpu"}},
            ]}},
            {"labels": (b'app="web"', 0o600), "cpu": (b"16", 0o644)},
        ),
        (
            {"projected": {"defaultMode": 0o440, "sources": [
                {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
                {"configMap": {"name": "cm", "items": [{"key": "a", "path": "ca.crt"}]}},
                {"secret": {"name": "sec"}},
                {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
            ]}},
            {"token": (b"jwt", 0o440), "ca.crt": (b"A", 0o440), "key": (b"\x00\xff", 0o440), "namespace": (b"shop", 0o440)},
        ),
    ],
)  # fmt: skip
def test_volumes_of_files(source: dict[str, Any], files: dict[str, tuple[bytes, int]]) -> None:
    made = volume(**source)
    assert made["kind"] == "files"
    assert contents(made["files"]) == files


MISSING = [
    pod(volumes=[{"name": "v", "configMap": {"name": "none"}}]),
    pod(volumes=[{"name": "v", "secret": {"secretName": "none"}}]),
    pod(volumes=[{"name": "v", "configMap": {"name": "cm", "items": [{"key": "none", "path": "x"}]}}]),
    pod(volumes=[{"name": "v", "projected": {"sources": [{"configMap": {"name": "cm"}}, {"secret": {"name": "none"}}]}}]),
    pod({"envFrom": [{"secretRef": {"name": "none"}}]}),
    pod(initContainers=[{"name": "i", "image": "app:1", "envFrom": [{"secretRef": {"name": "none"}}]}]),
]  # fmt: skip


@pytest.mark.parametrize("asked", MISSING)
def test_missing_sources_are_noticed_before_a_job_is_submitted_and_again_before_the_plan(
    asked: dict[str, Any],
) -> None:
    with pytest.raises(MissingSource):
        check_sources(asked, SOURCES)
    with pytest.raises(MissingSource):
        plan(asked)


def test_a_pod_whose_sources_are_there_passes_without_its_tokens() -> None:
    token = {
        "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}, {"configMap": {"name": "cm"}}]}
    }
    asked = pod(
        {"envFrom": [{"configMapRef": {"name": "cm"}}]}, volumes=[{"name": "v", **token}, {"name": "w"}]
    )
    check_sources(asked, SOURCES)


def test_a_pod_with_a_network_of_its_own() -> None:
    network = PodNetwork("10.244.0.0/16", "10.96.0.0/16", "ab" * 32)
    place = Place("10.0.0.5", "c1", 16, 1 << 30, own_ip="10.244.0.7")
    env = [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    setting = Setting(
        "default", {"app:1": IMAGE}, SOURCES, place, {}, network, {"ingress": [], "egress": None}
    )
    made = pod_plan(pod({"env": env}), setting)
    assert made["network"]["ip"] == "10.244.0.7"
    assert made["network"]["policy"] == {"ingress": [], "egress": None}
    assert made["resolv_conf"]["base"]["nameservers"] == ["10.96.0.10"]
    assert ["IP", "10.244.0.7"] in made["containers"][0]["env"]


def test_a_pod_of_the_hosts_network_has_none_of_its_own() -> None:
    network = PodNetwork("10.244.0.0/16", "10.96.0.0/16", "ab" * 32)
    setting = Setting("default", {"app:1": IMAGE}, SOURCES, Place("10.0.0.5", "c1"), {}, network)
    made = pod_plan(pod(hostNetwork=True), setting)
    assert (made["network"], made["resolv_conf"]) == (None, None)
    asking = pod_plan(pod(hostNetwork=True, dnsPolicy="ClusterFirstWithHostNet"), setting)
    assert (asking["network"], asking["resolv_conf"]["base"]["nameservers"]) == (None, ["10.96.0.10"])
    joined = replace(setting, place=Place("10.0.0.5", "c1", overlay_ip="10.244.0.7"))
    ports = {"ports": [{"containerPort": 80, "hostPort": 80}]}
    env = {"env": [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]}
    made = pod_plan(pod({**ports, **env}, hostNetwork=True, dnsPolicy="ClusterFirstWithHostNet"), joined)
    found = made["network"]
    assert (found["ip"], found["from_host"], found["host_ports"]) == ("10.244.0.7", True, [])
    assert ["IP", "10.0.0.5"] in made["containers"][0]["env"]
    old = Setting("default", {"app:1": IMAGE}, SOURCES, Place("10.0.0.5", "c1"), {})
    assert (pod_plan(pod(), old)["network"], pod_plan(pod(), old)["resolv_conf"]) == (None, None)
