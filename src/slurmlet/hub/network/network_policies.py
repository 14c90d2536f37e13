"""NetworkPolicy: which rules hold for which pod, now, and whom a change concerns.

Kept of a pod are a few words; results are made when asked for and shared by all pods that the same policies select, so a
pusher may encode one of them once. A change of a pod touches only the pods whose policies may mean it. Nothing here sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from slurmlet.kube.client import ApiClient
from slurmlet.kube.events import EventRecorder
from slurmlet.kube.reflector import Reflector
from slurmlet.model.ids import PodUid
from slurmlet.model.network_policy import (
    OPEN,
    Peer,
    Pod,
    Policy,
    View,
    pod_of,
    policy_of,
    resolve,
    unenforceable,
)
from slurmlet.podnet.netd_setup import NO_NETNS
from slurmlet.protocol.pod_plan import Policy as PodPolicy

Obj = dict[str, Any]
Labels = Mapping[str, str]
OnChange = Callable[[PodUid], None]

POLICIES, NAMESPACES = "/apis/networking.k8s.io/v1/networkpolicies", "/api/v1/namespaces"
# Changes come in bursts (a Deployment of a thousand pods); whoever is concerned is told once.
_SETTLE_S = 0.05
_REASON = "NetworkPolicyNotEnforced"
# The cluster's DNS has no pod; policies that let pods ask it name the one that every other cluster has.
_DNS_UID = PodUid("dns")
_DNS_LABELS = {"k8s-app": "kube-dns"}
_DNS_PORTS = (("dns", 17, 53), ("dns-tcp", 6, 53))


class Policies:
    """`on_change(uid)` is called when the rules of a pod may be others than before; `of(uid)` tells them."""

    def __init__(
        self,
        client: ApiClient,
        events: EventRecorder,
        *,
        pod_range: str,
        gateway: str,
        on_change: OnChange = lambda _uid: None,
    ) -> None:
        self._events = events
        self.on_change = on_change
        # Set once all policies and namespaces have been listed: before that, "not isolated" is not a fact.
        self.ready = asyncio.Event()
        self._unlisted = {POLICIES, NAMESPACES}
        self._client = client
        self._view = View(pod_range, gateway, self._members_of, self._all_pods)
        self._pods: dict[str, dict[PodUid, Pod]] = {}  # by namespace
        self._where: dict[PodUid, str] = {}
        self._placed: dict[PodUid, str] = {}
        # Pods whose other traffic than TCP goes past us.
        self._loose: set[PodUid] = set()
        self._namespaces: dict[str, Labels] = {}
        self._policies: dict[str, dict[str, Policy]] = {}  # by namespace and name
        # Remembered until something they are made of changes.
        self._members: dict[Peer, tuple[Pod, ...]] = {}
        self._results: dict[tuple[Any, ...], PodPolicy] = {}
        # Whom to tell: these pods, and those that these policies select.
        self._concerned: set[PodUid] = set()
        self._doubtful: set[Policy] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._put(_DNS_UID, Pod("kube-system", "kube-dns", _DNS_LABELS, gateway, _DNS_PORTS))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for path, heard in ((POLICIES, self.policy_changed), (NAMESPACES, self.namespace_changed)):
                reflector = Reflector(
                    self._client,
                    path,
                    heard,
                    on_synced=lambda path=path: self._listed(path),  # type: ignore[misc]
                )
                tasks.create_task(reflector.run(), name=f"watch of {path}")

    def _listed(self, path: str) -> None:
        self._unlisted.discard(path)
        if not self._unlisted and not self.ready.is_set():
            self.ready.set()
            self._concern(self._where)

    # What is asked.

    def of(self, uid: PodUid) -> PodPolicy:
        """{ingress, egress} as docs/network.md has them. The same object for pods that the same policies select."""
        pod = self._pod(uid)
        chosen = tuple(self._selecting(pod)) if pod is not None else ()
        if pod is None or not chosen:
            return OPEN
        key = (chosen, pod.ports if any(policy.names_own_ports for policy in chosen) else ())
        found = self._results.get(key)
        if found is None:
            found = self._results[key] = resolve(pod, chosen, self._view)
        return found

    def _selecting(self, pod: Pod) -> Iterator[Policy]:
        return (policy for policy in self._policies.get(pod.namespace, {}).values() if policy.selects(pod))

    def _pod(self, uid: PodUid) -> Pod | None:
        return self._pods.get(self._where.get(uid, ""), {}).get(uid)

    def _all_pods(self) -> Iterator[Pod]:
        return (pod for pods in self._pods.values() for pod in pods.values())

    def _members_of(self, peer: Peer) -> Collection[Pod]:
        found = self._members.get(peer)
        if found is None:
            where = self._pods if peer.namespaces is not None else (peer.namespace,)
            found = self._members[peer] = tuple(
                pod
                for name in where
                for pod in self._pods.get(name, {}).values()
                if pod.ip and peer.selects(pod, self._namespaces.get(name, {}))
            )
        return found

    # What happens.

    def placed(self, uid: PodUid, ip: str) -> None:
        """The address of a pod, as soon as it is chosen: the API server shows it only after a while."""
        self._placed[uid] = ip
        pod = self._pod(uid)
        if pod is not None and not pod.ip and not pod.host_network:
            self._replace(uid, pod, Pod(pod.namespace, pod.name, pod.labels, ip, pod.ports))

    def pod_changed(self, obj: Obj, gone: bool) -> None:
        uid = PodUid(obj["metadata"]["uid"])
        if gone:
            self._placed.pop(uid, None)
            self._loose.discard(uid)
        before = self._pod(uid)
        after = None if gone else pod_of(obj, self._placed.get(uid, ""))
        # Most news of a pod is not about any of this.
        if after != before:
            self._replace(uid, before, after)
        if after is not None and after.host_network and (before is None or before.labels != after.labels):
            self._tell_unenforced([uid], self._policies.get(after.namespace, {}).values())

    def _replace(self, uid: PodUid, before: Pod | None, after: Pod | None) -> None:
        if after is None:
            self._drop(uid)
        else:
            self._put(uid, after)
        if after is not None and (
            before is None or (before.labels, before.ports) != (after.labels, after.ports)
        ):
            self._concern([uid])
        for policy in self._all_policies():
            if any(self._touches(policy, pod) for pod in (before, after) if pod is not None and pod.ip):
                self._forget(policy)

    def _touches(self, policy: Policy, pod: Pod) -> bool:
        """Whether a pod is among those the policy's rules speak of."""
        if policy.names_others_ports and pod.ports:
            return True
        labels = self._namespaces.get(pod.namespace, {})
        # A range stands for all pods, whoever they are.
        return any(not peer.everybody and peer.selects(pod, labels) for peer in policy.peers)

    def _put(self, uid: PodUid, pod: Pod) -> None:
        self._pods.setdefault(pod.namespace, {})[uid] = pod
        self._where[uid] = pod.namespace

    def _drop(self, uid: PodUid) -> None:
        namespace = self._where.pop(uid, "")
        pods = self._pods.get(namespace, {})
        pods.pop(uid, None)
        if not pods:
            self._pods.pop(namespace, None)

    def namespace_changed(self, obj: Obj, gone: bool) -> None:
        name, labels = obj["metadata"]["name"], obj["metadata"].get("labels") or {}
        before = self._namespaces.get(name)
        if gone:
            self._namespaces.pop(name, None)
        else:
            self._namespaces[name] = labels
        if before == labels and not gone:
            return
        for policy in self._all_policies():
            if any(
                peer.namespaces is not None
                and peer.namespaces(before or {}) != peer.namespaces({} if gone else labels)
                for peer in policy.peers
            ):
                self._forget(policy)

    def policy_changed(self, obj: Obj, gone: bool) -> None:
        metadata = obj["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        there = self._policies.setdefault(namespace, {})
        before = there.pop(name, None)
        if before is not None:
            self._forget(before)
        if gone:
            return
        policy = there[name] = policy_of(obj)
        self._forget(policy)
        for text in unenforceable(obj):
            self._events.object_event("networking.k8s.io/v1", "NetworkPolicy", obj, "Warning", _REASON, text)
        self._tell_unenforced(list(self._pods.get(namespace, {})), [policy])

    def _all_policies(self) -> Iterator[Policy]:
        return (policy for there in self._policies.values() for policy in there.values())

    def attached(self, uid: PodUid, mode: str) -> None:
        """How the pod's network could be made on its host (docs/network.md)."""
        if mode != NO_NETNS:
            self._loose.discard(uid)
        elif uid not in self._loose:
            self._loose.add(uid)
            pod = self._pod(uid)
            self._tell_unenforced([uid], self._policies.get(pod.namespace, {}).values() if pod else ())

    def _tell_unenforced(self, uids: Iterable[PodUid], policies: Collection[Policy]) -> None:
        for uid in uids:
            pod = self._pod(uid)
            if pod is None or not (pod.host_network or uid in self._loose):
                continue
            why = "at all: it uses the host's network"
            if not pod.host_network:
                why = "beyond TCP: its host allows no network namespaces"
            metadata = {"namespace": pod.namespace, "name": pod.name, "uid": uid}
            for policy in policies:
                if policy.chosen(pod.labels):
                    text = f"NetworkPolicy {policy.name} is not enforced for this pod {why}"
                    self._events.core_event("Pod", {"metadata": metadata}, "Warning", _REASON, text)

    # Who is told.

    def _forget(self, policy: Policy) -> None:
        """What was resolved from it no longer holds; those it selects are told."""
        for peer in policy.peers:
            self._members.pop(peer, None)
        for key in [key for key in self._results if policy in key[0]]:
            del self._results[key]
        self._doubtful.add(policy)
        self._tell_soon()

    def _concern(self, uids: Iterable[PodUid]) -> None:
        self._concerned.update(uids)
        self._tell_soon()

    def _tell_soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SETTLE_S, self._tell)

    def _tell(self) -> None:
        concerned, doubtful = self._concerned, self._doubtful
        self._concerned, self._doubtful, self._timer = set(), set(), None
        if not self.ready.is_set():
            return  # all are told once it is
        for policy in doubtful:
            pods = self._pods.get(policy.namespace, {})
            concerned.update(uid for uid, pod in pods.items() if policy.selects(pod))
        for uid in concerned - {_DNS_UID}:
            self.on_change(uid)
