"""securityContext as far as the plan decides it; the kubelet's words where it would not start a container."""

from __future__ import annotations

from typing import Any

import pytest

from slurmlet.base.errors import RefusedPod
from slurmlet.model.hostnames import names_of
from slurmlet.model.security_context import container_security


def pod(**spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "web", "namespace": "shop", "uid": "u-1"}, "spec": spec}


def security(
    context: dict[str, Any], own: dict[str, Any] | None = None, image_user: str = ""
) -> dict[str, Any]:
    container = {"name": "c", "securityContext": own or {}}
    return container_security(pod(securityContext=context), container, image_user)


def test_the_containers_word_goes_over_the_pods() -> None:
    found = security(
        {"runAsUser": 1, "runAsGroup": 2, "fsGroup": 9, "seccompProfile": {"type": "RuntimeDefault"}},
        {"runAsUser": 5, "seccompProfile": {"type": "Unconfined"}, "procMount": "Unmasked"},
    )
    assert found["user"] == {"uid": 5, "gid": 2, "groups": [9], "name": ""}
    assert (found["seccomp"], found["unmasked_proc"]) == ("Unconfined", True)


def test_what_nobody_says_is_free() -> None:
    found = security({})
    assert (found["seccomp"], found["unmasked_proc"], found["no_new_privs"]) == ("Unconfined", False, False)
    assert security({"supplementalGroupsPolicy": "Strict"})["user"]["strict"] is True


WHERE = '(pod: "web_shop(u-1)", container: c)'


@pytest.mark.parametrize(
    ("context", "image_user", "words"),
    [
        ({}, "", f"container has runAsNonRoot and image will run as root {WHERE}"),
        ({}, "0:0", f"container has runAsNonRoot and image will run as root {WHERE}"),
        ({}, "00", f"container has runAsNonRoot and image will run as root {WHERE}"),
        ({"runAsUser": 0}, "app", f"container's runAsUser breaks non-root policy {WHERE}"),
        (
            {},
            "app:app",
            f"container has runAsNonRoot and image has non-numeric user (app), cannot verify user is non-root {WHERE}",
        ),
    ],
)
def test_what_may_be_root_is_refused_in_the_kubelets_words(
    context: dict[str, Any], image_user: str, words: str
) -> None:
    with pytest.raises(RefusedPod) as refused:
        security({"runAsNonRoot": True, **context}, image_user=image_user)
    assert (refused.value.message, refused.value.reason) == (words, "CreateContainerConfigError")
    assert "runAsUser" in refused.value.hint


@pytest.mark.parametrize(("context", "image_user"), [({"runAsUser": 7}, "root"), ({}, "1000:0"), ({}, "5")])
def test_what_is_not_root_runs(context: dict[str, Any], image_user: str) -> None:
    assert security({"runAsNonRoot": True, **context}, image_user=image_user)["user"]["name"] == image_user


FULL = "web.pool.shop.svc.cluster.local"


@pytest.mark.parametrize(
    ("spec", "kernel", "hosts"),
    [
        ({}, "web", ("web",)),
        ({"hostname": "h"}, "h", ("h",)),
        ({"hostname": "h" * 62 + "-" + "x"}, "h" * 62, ("h" * 62,)),
        ({"subdomain": "pool"}, "web", (FULL, "web")),
        ({"subdomain": "pool", "setHostnameAsFQDN": True}, FULL, (FULL, "web")),
        # Without a subdomain there is no full name to set.
        ({"setHostnameAsFQDN": True}, "web", ("web",)),
        ({"hostnameOverride": "db.example.org", "subdomain": "pool"}, "db.example.org", ("db.example.org",)),
        ({"hostNetwork": True, "hostname": "h"}, "c7", ("c7",)),
    ],
)
def test_names(spec: dict[str, Any], kernel: str, hosts: tuple[str, ...]) -> None:
    names = names_of(pod(**spec), "c7")
    assert (names.kernel, names.hosts) == (kernel, hosts)


def test_a_full_name_that_no_kernel_takes_is_refused() -> None:
    with pytest.raises(RefusedPod, match=r"spec\.setHostnameAsFQDN: FQDN .* is too long"):
        names_of(pod(subdomain="s" * 60, setHostnameAsFQDN=True), "c7")
