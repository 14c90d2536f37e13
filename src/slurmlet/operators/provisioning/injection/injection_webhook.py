"""The Injection Webhook: Secrets that Metal3 makes for a new machine's metadata get what slurmd needs to join.

It only reads, and answers with a patch; asked twice it adds nothing the second time. Whether a Secret may be made without
what it lacks is a setting (`fail_open`): closed, Metal3 asks again until the chain holds, and no machine boots in vain.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurmlet.base.errors import SlurmletError
from slurmlet.kube.events import EventRecorder
from slurmlet.kube.webhook import Review, Verdict, denied
from slurmlet.model.histogram import Histogram
from slurmlet.model.stats_summary import Family
from slurmlet.operators.provisioning.controller_lookup import BrokenLink, Chain, ControllerLookup, Link
from slurmlet.operators.provisioning.controller_spec import CLUSTER_LABEL, NAMESPACE_LABEL
from slurmlet.operators.provisioning.injection.metadata_chain import MetadataChain, data_owner
from slurmlet.operators.provisioning.injection.metadata_values import injected, values

Obj = dict[str, Any]
PATH = "/inject-metadata"
_META_DATA = "metaData"
_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class InjectionSettings:
    """`timeout_s` is below that of the server, so that a link that hangs is named."""

    fail_open: bool = False
    timeout_s: float = 6.0


class InjectionWebhook:
    """`review` is a handler for kube/webhook's server, under PATH."""

    def __init__(
        self,
        chain: MetadataChain,
        lookup: ControllerLookup,
        events: EventRecorder,
        settings: InjectionSettings = InjectionSettings(),  # noqa: B008 - frozen
    ) -> None:
        self._chain, self._lookup, self._events, self._settings = chain, lookup, events, settings
        self._took = Histogram(_BOUNDS_S)
        self._broken: Counter[Link] = Counter()

    async def review(self, review: Review) -> Verdict:
        owner = data_owner(review.object)
        raw = (review.object.get("data") or {}).get(_META_DATA)
        if review.operation != "CREATE" or review.kind != "Secret" or owner is None or raw is None:
            return Verdict()
        began_s, outcome = time.monotonic(), "failed"
        try:
            verdict, outcome = await self._verdict(review, owner, raw)
        except BrokenLink as error:
            verdict = self._failure(review, owner, error)
        finally:
            self._took.observe(time.monotonic() - began_s, {"outcome": outcome})
        return verdict

    def families(self) -> list[Family]:
        took = self._took.family(
            "slurmlet_provision_injection_duration_seconds", "How long an injection took, by its outcome"
        )
        broken = Family(
            "slurmlet_provision_injection_failures_total",
            "counter",
            "Injections that failed, by the broken link",
        )
        for link, count in sorted(self._broken.items()):
            broken.add(count, {"link": link.value})
        return [took, broken]

    async def _verdict(self, review: Review, owner: Obj, raw: str) -> tuple[Verdict, str]:
        chain, began_s = Chain(), time.monotonic()
        try:
            text = base64.b64decode(raw, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError, ValueError):
            raise BrokenLink(Link.SECRET, "data.metaData is not text") from None
        try:
            # A moment longer than the lookup may take: that one knows which link it hangs at.
            async with asyncio.timeout(self._settings.timeout_s + 0.5):
                origin = await self._chain.origin(review.object, owner, review.namespace, chain)
                if origin is None:
                    labels = f"{CLUSTER_LABEL} or {NAMESPACE_LABEL}"
                    said = f"the Metal3DataTemplate has no label {labels}: metaData left as it is"
                    self._tell(review, owner, "Normal", "NotForSlurm", said)
                    return Verdict(), "ignored"
                left_s = began_s + self._settings.timeout_s - time.monotonic()
                facts = await self._lookup.facts(origin.spec, origin.namespace, origin.cluster, left_s)
        except (SlurmletError, TimeoutError) as error:
            raise chain.broken(error) from error
        result = injected(text, values(facts, origin.spec.names, origin.spec.slurm_cluster))
        warnings = tuple(
            f"metaData has {name} already, with another value: left as it is" for name in result.differing
        )
        if not result.added:
            return Verdict(warnings=warnings), "unchanged"
        self._tell(
            review, owner, "Normal", "Injected", f"metaData of {_name(review)}: {', '.join(result.added)}"
        )
        return Verdict(changed=_with(review.object, result.text), warnings=warnings), "injected"

    def _failure(self, review: Review, owner: Obj, error: BrokenLink) -> Verdict:
        self._broken[error.link] += 1
        text = f"slurmlet cannot inject into {_name(review)}: broken link {error.message}"
        text += f". {error.hint}" if error.hint else ""
        self._tell(review, owner, "Warning", error.reason, text)
        if self._settings.fail_open:
            return Verdict(warnings=(text[:256],))
        return denied(text, code=503 if error.transient else 422)

    def _tell(self, review: Review, owner: Obj, kind: str, reason: str, text: str) -> None:
        if review.dry_run:
            return
        about = {"metadata": {**_names(owner), "namespace": review.namespace}}
        self._events.object_event(owner["apiVersion"], owner["kind"], about, kind, reason, text)


def _names(owner: Mapping[str, Any]) -> Obj:
    return {"name": owner["name"], "uid": owner["uid"]}


def _name(review: Review) -> str:
    name = review.name or (review.object.get("metadata") or {}).get("name") or "(generated name)"
    return f"Secret {review.namespace}/{name}"


def _with(secret: Mapping[str, Any], text: str) -> Obj:
    data = {**secret["data"], _META_DATA: base64.b64encode(text.encode()).decode()}
    return {**secret, "data": data}
