"""From the metaData Secret of a new machine up to who says which Slurm it is for: Metal3Data, its template, their labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.discovery import Discovery
from slurmlet.operators.provisioning.controller_lookup import BrokenLink, Chain, Link
from slurmlet.operators.provisioning.controller_spec import (
    CLUSTER_LABEL,
    NAME_LABEL,
    NAMESPACE_LABEL,
    ControllerSpec,
    controller_spec,
)

Obj = dict[str, Any]
METAL3_GROUP = "infrastructure.cluster.x-k8s.io"
_CLUSTER_NAME = "cluster.x-k8s.io/cluster-name"
_SLURM_CLUSTERS = "/apis/slurmlet.io/v1alpha1"


@dataclass(frozen=True)
class MachineOrigin:
    """`template`: named in events. `namespace`: where SlurmClusters and kubeconfig Secrets are looked for."""

    spec: ControllerSpec
    namespace: str
    cluster: str


def data_owner(secret: Mapping[str, Any]) -> Obj | None:
    """The Metal3Data that a Secret belongs to; None for Secrets that are not ours to change."""
    owners: Sequence[Obj] = (secret.get("metadata") or {}).get("ownerReferences") or ()
    return next(
        (
            one
            for one in owners
            if one.get("kind") == "Metal3Data" and one.get("apiVersion", "").partition("/")[0] == METAL3_GROUP
        ),
        None,
    )


class MetadataChain:
    """Both versions of Metal3's kinds are read alike: the one that the API server prefers has what is needed here."""

    def __init__(self, client: ApiClient) -> None:
        self._client, self._discovery = client, Discovery(client)

    async def origin(self, secret: Obj, owner: Obj, namespace: str, chain: Chain) -> MachineOrigin | None:
        """None where neither template nor data carry a label: the machine is not for Slurm."""
        chain.at(Link.DATA)
        data = await self._metal3("Metal3Data", owner["name"], namespace)
        if data["metadata"]["uid"] != owner.get("uid"):
            # The answer carries the key: who does not know the object, to the uid, gets none.
            raise BrokenLink(
                Link.DATA, f"{namespace}/{owner['name']} has another uid than the Secret's owner"
            )
        chain.at(Link.TEMPLATE)
        template = await self._template(data, namespace)
        # A label on one machine's data says more than that of all machines of its template.
        labels = {**(template["metadata"].get("labels") or {}), **(data["metadata"].get("labels") or {})}
        if not labels.get(CLUSTER_LABEL) and not labels.get(NAMESPACE_LABEL):
            return None
        chain.at(Link.SLURM_CLUSTER)
        home = template["metadata"]["namespace"]
        spec = await self._spec(labels, home)
        cluster = _cluster(secret, data, template)
        return MachineOrigin(spec, home, cluster)

    async def _template(self, data: Obj, namespace: str) -> Obj:
        ref = (data.get("spec") or {}).get("template") or {}
        if not ref.get("name"):
            owners = data["metadata"].get("ownerReferences") or ()
            ref = next((one for one in owners if one["kind"] == "Metal3DataTemplate"), {})
        if not ref.get("name"):
            raise BrokenLink(
                Link.TEMPLATE, f"Metal3Data {namespace}/{data['metadata']['name']} names no template"
            )
        if ref.get("namespace") not in (None, "", namespace):
            # Metal3 itself took that field back in v1beta2. Who may make Metal3Data in one namespace gets no key of another.
            raise BrokenLink(
                Link.TEMPLATE, f"{ref['namespace']}/{ref['name']} is not in namespace {namespace}"
            )
        return await self._metal3("Metal3DataTemplate", ref["name"], namespace)

    async def _metal3(self, kind: str, name: str, namespace: str) -> Obj:
        resource = await self._discovery.resource(kind, METAL3_GROUP)
        try:
            return await self._client.read(resource.path(name, namespace))
        except ApiError as error:
            if error.status != 404:
                raise
            # The version may have gone since it was found; the next call looks again.
            self._discovery.forget(kind, METAL3_GROUP)
            raise

    async def _spec(self, labels: Mapping[str, str], namespace: str) -> ControllerSpec:
        path = f"{_SLURM_CLUSTERS}/namespaces/{namespace}/slurmclusters"
        where, name = labels.get(NAMESPACE_LABEL) or "", labels.get(CLUSTER_LABEL)
        if name:
            spec = controller_spec(await self._client.read(f"{path}/{name}"))
            spec = replace(spec, namespace=where or spec.namespace)
        else:
            spec = self._only(await self._described(path), where)
        return replace(spec, instance=labels.get(NAME_LABEL) or "")

    async def _described(self, path: str) -> list[ControllerSpec]:
        """None where the kind is not installed: the thesis's label needs no SlurmCluster."""
        try:
            listed = await self._client.read(path)
        except ApiError as error:
            if error.status != 404:
                raise
            return []
        return [controller_spec(one) for one in listed.get("items") or ()]

    def _only(self, known: Sequence[ControllerSpec], where: str) -> ControllerSpec:
        """The thesis's label alone: the SlurmCluster of that namespace if there is one, else what the thesis does."""
        fitting = [one for one in known if one.namespace == where]
        if len(fitting) > 1:
            names = ", ".join(one.slurm_cluster for one in fitting)
            raise BrokenLink(
                Link.SLURM_CLUSTER,
                f"several have their controller in namespace {where}: {names}",
                hint=f"Label the Metal3DataTemplate with {CLUSTER_LABEL}.",
            )
        return fitting[0] if fitting else ControllerSpec(namespace=where)


def _cluster(secret: Obj, data: Obj, template: Obj) -> str:
    for obj in (secret, data, template):
        name = (obj["metadata"].get("labels") or {}).get(_CLUSTER_NAME)
        if name:
            return str(name)
    return str((template.get("spec") or {}).get("clusterName") or "")
