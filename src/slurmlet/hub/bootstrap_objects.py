"""What a cluster inside one job must have in its first second: elsewhere controllers make it in their own time.

The default service account and the CA's config map of the default namespace, without which no pod is admitted or
starts, and a token for programs that speak to the API server without a client certificate.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from slurmlet.base.files import write_private
from slurmlet.hub.hub_settings import Settings
from slurmlet.hub.nodes.allocation_node_controller import AllocationNodeController
from slurmlet.kube.client import ApiClient, ApiError

log = logging.getLogger(__name__)
_AGAIN_S = 0.05
_ACCOUNT = "slurmlet-admin"
_RBAC = "rbac.authorization.k8s.io"
_TOKEN_S = 365 * 24 * 3600
_CORE = "/api/v1/namespaces"


async def provide(settings: Settings, client: ApiClient, nodes: AllocationNodeController) -> None:
    """Until all is there. The token's file appears last: who waits for it finds a cluster that takes pods."""
    await asyncio.gather(
        nodes.until_ready({path.name for path in settings.files.nodes.iterdir()}),
        _create(client, f"{_CORE}/default/serviceaccounts", {"metadata": {"name": "default"}}),
        _create(
            client,
            f"{_CORE}/default/configmaps",
            {
                "metadata": {"name": "kube-root-ca.crt"},
                "data": {"ca.crt": settings.pki("ca.crt").read_text()},
            },
        ),
        _make_admin(client),
    )
    path = f"{_CORE}/kube-system/serviceaccounts/{_ACCOUNT}/token"
    answer = await _create(client, path, {"spec": {"expirationSeconds": _TOKEN_S}})
    write_private(settings.files.token, str(answer["status"]["token"]))


async def _make_admin(client: ApiClient) -> None:
    """Returns when the API server acts on it: it hears of its own new bindings a moment later."""
    await _create(client, f"{_CORE}/kube-system/serviceaccounts", {"metadata": {"name": _ACCOUNT}})
    binding = {
        "metadata": {"name": _ACCOUNT},
        "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": _ACCOUNT, "namespace": "kube-system"}],
    }
    await _create(client, f"/apis/{_RBAC}/v1/clusterrolebindings", binding)
    question = {
        "spec": {
            "user": f"system:serviceaccount:kube-system:{_ACCOUNT}",
            "resourceAttributes": {"verb": "list", "resource": "nodes"},
        }
    }
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    while True:
        answer = await _create(client, path, question)
        if answer["status"]["allowed"]:
            return
        await asyncio.sleep(_AGAIN_S)


async def _create(client: ApiClient, path: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """Try until the API server takes it: its namespaces and roles appear one after another."""
    while True:
        try:
            return await client.create(path, wanted)
        except ApiError as error:
            if error.status == 409:
                return {}
            log.info("%s: %s", path, error.message)
            await asyncio.sleep(_AGAIN_S)
