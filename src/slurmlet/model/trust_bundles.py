"""ClusterTrustBundles as a projected volume shows them: anchors without comments, each once, in a stable order. Pure."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from typing import Any

from slurmlet.model.label_selectors import compiled
from slurmlet.model.pod_sources import MissingSource

Obj = Mapping[str, Any]
_BLOCK = re.compile(r"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", re.DOTALL)
_LINE = 64


def anchors(source: Obj, bundles: Iterable[Obj]) -> bytes:
    """PEM of the bundles that a projection names. Raises MissingSource, with the kubelet's words, where there is none."""
    chosen = [bundle for bundle in bundles if _matches(source, bundle)]
    if not chosen and not source.get("optional"):
        name = source.get("name")
        raise MissingSource(
            f'while getting ClusterTrustBundle: clustertrustbundle.certificates.k8s.io "{name}" not found'
            if name
            else "combination of signerName and labelSelector matched zero ClusterTrustBundles"
        )
    # Sorted, where the kubelet shuffles: an order of its own on each look would look like a change.
    return "".join(map(_pem, sorted({der for bundle in chosen for der in _certificates(bundle)}))).encode()


def _matches(source: Obj, bundle: Obj) -> bool:
    if source.get("name"):
        return bool(bundle["metadata"]["name"] == source["name"])
    if (bundle.get("spec") or {}).get("signerName", "") != source.get("signerName"):
        return False
    selector = source.get("labelSelector")
    # As in the kubelet: no selector matches nothing, an empty one everything.
    return selector is not None and compiled(selector)(bundle["metadata"].get("labels") or {})


def _certificates(bundle: Obj) -> Iterable[bytes]:
    for body in _BLOCK.findall((bundle.get("spec") or {}).get("trustBundle") or ""):
        # PEM headers end with an empty line; the API server lets none through, other writers might.
        try:
            yield base64.b64decode("".join(body.rpartition("\n\n")[2].split()))
        except binascii.Error:
            continue


def _pem(der: bytes) -> str:
    text = base64.b64encode(der).decode()
    lines = [text[start : start + _LINE] for start in range(0, len(text), _LINE)]
    return "\n".join(["-----BEGIN CERTIFICATE-----", *lines, "-----END CERTIFICATE-----", ""])
