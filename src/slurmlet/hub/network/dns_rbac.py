"""What CoreDNS may see: names and addresses of Services, nothing else. Granted before it starts, so it is never refused."""

from __future__ import annotations

from typing import Any

from slurmlet.kube.client import ApiClient, ApiError

# CN of CoreDNS's certificate (controlplane/pki.py).
USER = "slurmlet:dns"
_GROUP = "rbac.authorization.k8s.io"
_PATH = f"/apis/{_GROUP}/v1"


async def grant(client: ApiClient) -> None:
    for kind, wanted in objects().items():
        try:
            await client.create(f"{_PATH}/{kind}", wanted)
        except ApiError as error:
            if error.status != 409:
                raise
            await client.patch(f"{_PATH}/{kind}/{USER}", wanted)


def objects() -> dict[str, dict[str, Any]]:
    reads = ["list", "watch"]
    return {
        "clusterroles": {
            "metadata": {"name": USER},
            "rules": [
                {"apiGroups": [""], "resources": ["services", "namespaces"], "verbs": reads},
                {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": reads},
            ],
        },
        "clusterrolebindings": {
            "metadata": {"name": USER},
            "roleRef": {"apiGroup": _GROUP, "kind": "ClusterRole", "name": USER},
            "subjects": [{"apiGroup": _GROUP, "kind": "User", "name": USER}],
        },
    }
