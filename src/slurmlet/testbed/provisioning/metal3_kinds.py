"""Metal3's kinds as CRDs of our own: the same groups, versions and fields, as far as a worker's way through them goes.

Upstream's controller for them talks to real management boards; infrastructure_provider.py stands in for it. Fields that it
does not read are kept as they are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Obj = dict[str, Any]
GROUP = "infrastructure.cluster.x-k8s.io"
VERSIONS = ("v1beta1", "v1beta2")
HOST_GROUP, HOST_VERSION = "metal3.io", "v1alpha1"
_CONTRACTS = {"cluster.x-k8s.io/v1beta1": "v1beta1", "cluster.x-k8s.io/v1beta2": "v1beta2"}
_TEXT: Obj = {"type": "string"}
_FLAG: Obj = {"type": "boolean"}
_ANY: Obj = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def _object(**fields: Obj) -> Obj:
    return {"type": "object", "properties": fields, "x-kubernetes-preserve-unknown-fields": True}


def _list(of: Obj) -> Obj:
    return {"type": "array", "items": of}


_REFERENCE = _object(name=_TEXT, namespace=_TEXT)
_CONDITIONS = _list(_ANY)
_STATUS = _object(ready=_FLAG, initialization=_object(provisioned=_FLAG), conditions=_CONDITIONS)
_MACHINE = _object(
    providerID=_TEXT,
    image=_ANY,
    userData=_REFERENCE,
    metaData=_REFERENCE,
    networkData=_REFERENCE,
    hostSelector=_object(
        matchLabels={"type": "object", "additionalProperties": _TEXT}, matchExpressions=_list(_ANY)
    ),
    dataTemplate=_REFERENCE,
    automatedCleaningMode=_TEXT,
)
_PAIRS = _list(_object(key=_TEXT, value=_TEXT))
_DATA_TEMPLATE = _object(
    clusterName=_TEXT,
    templateReference=_TEXT,
    metaData=_object(
        strings=_PAIRS,
        objectNames=_list(_object(key=_TEXT, object=_TEXT)),
        indexes=_list(_ANY),
        namespaces=_list(_object(key=_TEXT)),
        fromLabels=_list(_object(key=_TEXT, object=_TEXT, label=_TEXT)),
        fromAnnotations=_list(_object(key=_TEXT, object=_TEXT, annotation=_TEXT)),
    ),
    networkData=_ANY,
)


def definitions() -> list[Obj]:
    return [
        _crd("Metal3Cluster", _object(controlPlaneEndpoint=_ANY), _STATUS),
        _crd("Metal3Machine", _MACHINE, _STATUS),
        _crd("Metal3MachineTemplate", _object(template=_object(spec=_MACHINE))),
        _crd("Metal3DataTemplate", _DATA_TEMPLATE),
        _crd(
            "Metal3Data",
            _object(
                index={"type": "integer"}, metaData=_REFERENCE, networkData=_REFERENCE,
                claim=_REFERENCE, template=_REFERENCE,
            ),
            _object(ready=_FLAG, error=_FLAG, errorMessage=_TEXT),
        ),
        _crd("Metal3DataClaim", _object(template=_REFERENCE), _object(renderedData=_REFERENCE)),
        _crd(
            "BareMetalHost",
            _object(online=_FLAG, bootMACAddress=_TEXT, consumerRef=_ANY, userData=_ANY, metaData=_ANY),
            _object(provisioning=_object(state=_TEXT), errorMessage=_TEXT),
            group=HOST_GROUP,
            versions=(HOST_VERSION,),
        ),
    ]  # fmt: skip


def _crd(
    kind: str, spec: Obj, status: Obj | None = None, *, group: str = GROUP, versions: Sequence[str] = VERSIONS
) -> Obj:
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "properties": {"spec": spec, "status": status or _ANY}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            "labels": {
                **_CONTRACTS,
                "cluster.x-k8s.io/provider": "infrastructure-metal3",
                "clusterctl.cluster.x-k8s.io": "",
            },
        },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                **({"shortNames": ["bmh"]} if kind == "BareMetalHost" else {}),
            },
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": version == versions[-1],
                    "schema": {"openAPIV3Schema": schema},
                    "subresources": {"status": {}},
                }
                for version in versions
            ],
        },
    }
