"""What a WorkerSet scales: its /scale, and the Machines or pods behind it.

A MachineDeployment (or anything else of Cluster API with /scale) has Machines; a Slinky NodeSet, a StatefulSet or whatever
else has pods. Which of them belong to the target is what its /scale says (`status.selector`). Everything is read fresh from
the API server: a decision on an old list could take away a machine that has just been given to somebody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurmlet.base.clock import parse_rfc3339, rfc3339
from slurmlet.base.errors import SlurmletError
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.discovery import Discovery, Resource
from slurmlet.operators.provisioning import worker_annotations as marks
from slurmlet.operators.provisioning.autoscaler.cluster_snapshot import Machine
from slurmlet.operators.provisioning.autoscaler.worker_sets import NodeNameFrom, WorkerSet

Obj = dict[str, Any]
MACHINE_GROUP = "cluster.x-k8s.io"
_DEPLOYMENT_LABEL = "cluster.x-k8s.io/deployment-name"


class TargetProblem(SlurmletError):
    """The target of a WorkerSet cannot be read as one: it is not there, or has no /scale."""

    reason = "TargetNotFound"


@dataclass(frozen=True)
class Member:
    """A Machine or a pod of a target."""

    obj: Mapping[str, Any]
    path: str
    node: str  # its name in Slurm
    is_machine: bool

    @property
    def name(self) -> str:
        return str(self.obj["metadata"]["name"])

    @property
    def annotations(self) -> Mapping[str, str]:
        return annotations_of(self.obj)

    @property
    def deleting(self) -> bool:
        return bool(self.obj["metadata"].get("deletionTimestamp"))

    @property
    def ended(self) -> bool:
        """A pod that is over does not count as a replica any more."""
        return not self.is_machine and (self.obj.get("status") or {}).get("phase") in ("Succeeded", "Failed")

    def facts(self) -> Machine:
        found = self.annotations
        costs = (found.get(marks.POD_DELETION_COST), found.get(marks.SLINKY_DELETION_COST))
        return Machine(
            name=self.name,
            node=self.node,
            created_at_s=parse_rfc3339(self.obj["metadata"]["creationTimestamp"]).timestamp(),
            deleting=self.deleting,
            marked=marks.DELETE_MACHINE in found if self.is_machine else marks.FIRST_TO_GO in costs,
            marked_by_us=marks.SCALE_IN in found,
            registered_before=marks.REGISTERED in found,
        )


@dataclass(frozen=True)
class Target:
    """A target as it was read. `version`: of the whole object; replicas are only changed where it is still the same."""

    path: str  # of its /scale
    version: str
    replicas: int
    members: tuple[Member, ...]

    def member(self, name: str) -> Member | None:
        return next((one for one in self.members if one.name == name), None)


class ScaleTargets:
    def __init__(self, client: ApiClient, discovery: Discovery) -> None:
        self._client, self._discovery = client, discovery

    async def read(self, namespace: str, spec: WorkerSet) -> Target:
        """Raises TargetProblem, or ApiError where the API server did not answer."""
        resource = await self._resource(spec)
        path = resource.path(spec.target.name, namespace, "scale")
        try:
            scale = await self._client.get(path)
        except ApiError as error:
            if error.status == 404:
                raise _missing(spec, error.message) from error
            raise
        replicas = int((scale.get("spec") or {}).get("replicas") or 0)
        members = await self._members(namespace, spec, resource, scale)
        return Target(path, str(scale["metadata"]["resourceVersion"]), replicas, tuple(members))

    async def set_replicas(self, target: Target, replicas: int) -> Target:
        """Raises ApiError 409 where somebody else changed the target since it was read."""
        change = {"metadata": {"resourceVersion": target.version}, "spec": {"replicas": replicas}}
        scale = await self._client.patch(target.path, change)
        return Target(target.path, str(scale["metadata"]["resourceVersion"]), replicas, target.members)

    async def mark(self, member: Member) -> None:
        """Let the target's controller take this one first. May be repeated."""
        first = (
            {marks.DELETE_MACHINE: "yes"}
            if member.is_machine
            else {marks.POD_DELETION_COST: marks.FIRST_TO_GO, marks.SLINKY_DELETION_COST: marks.FIRST_TO_GO}
        )
        await self.annotate(member, {**first, marks.SCALE_IN: rfc3339()})

    async def unmark(self, member: Member) -> None:
        """Take back a mark of ours; somebody else's stays."""
        if marks.SCALE_IN in member.annotations:
            names = (
                marks.SCALE_IN,
                *(
                    (marks.DELETE_MACHINE,)
                    if member.is_machine
                    else (marks.POD_DELETION_COST, marks.SLINKY_DELETION_COST)
                ),
            )
            await self.annotate(member, dict.fromkeys(names))

    async def annotate(self, member: Member, annotations: Mapping[str, str | None]) -> None:
        """One that is gone needs no annotation; another under its name (a StatefulSet's) must not get this one's."""
        metadata = {"annotations": dict(annotations), "uid": member.obj["metadata"]["uid"]}
        try:
            await self._client.patch(member.path, {"metadata": metadata})
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def _resource(self, spec: WorkerSet) -> Resource:
        group = spec.target.api_version.rpartition("/")[0]
        try:
            resource = await self._discovery.resource(spec.target.kind, group)
        except ApiError as error:
            if error.status == 404:
                raise _missing(spec, error.message) from error
            raise
        if "scale" not in resource.subresources:
            # Its definition may be given one later.
            self._discovery.forget(spec.target.kind, group)
            raise TargetProblem(
                f"spec.scaleTargetRef: {spec.target.kind} of {spec.target.api_version} has no /scale",
                reason="TargetNotScalable",
                hint="Name a MachineDeployment, a NodeSet, or another kind whose definition has a scale subresource.",
            )
        return resource

    async def _members(self, namespace: str, spec: WorkerSet, resource: Resource, scale: Obj) -> list[Member]:
        is_machine = resource.group == MACHINE_GROUP
        selector = str((scale.get("status") or {}).get("selector") or "")
        if not selector and resource.kind == "MachineDeployment":
            selector = f"{_DEPLOYMENT_LABEL}={spec.target.name}"
        if not selector:
            # Its controller has not looked at it yet. Of no other kind can its members be told.
            return []
        kind = await self._discovery.resource(
            "Machine" if is_machine else "Pod", MACHINE_GROUP if is_machine else ""
        )
        listed = await self._client.get(kind.path(namespace=namespace), labelSelector=selector)
        found = [
            Member(
                one,
                kind.path(one["metadata"]["name"], namespace),
                node_name(one, spec, is_machine),
                is_machine,
            )
            for one in listed.get("items") or ()
        ]
        return [one for one in found if not one.ended]


def node_name(obj: Mapping[str, Any], spec: WorkerSet, is_machine: bool) -> str:
    """Slurm's name of the worker that this Machine or pod is (or will be)."""
    given = annotations_of(obj).get(marks.SLURM_NODE)
    if given:
        return given
    inside = obj.get("spec") or {}
    name = str(obj["metadata"]["name"])
    if is_machine:
        if spec.node_name_from is NodeNameFrom.INFRASTRUCTURE_MACHINE:
            name = str((inside.get("infrastructureRef") or {}).get("name") or name)
    elif inside.get("hostNetwork"):
        name = str(inside.get("nodeName") or name)
    else:
        labels = obj["metadata"].get("labels") or {}
        name = str(labels.get(marks.SLINKY_HOSTNAME) or inside.get("hostname") or name)
    return f"{spec.node_name_prefix}{name}"


def annotations_of(obj: Mapping[str, Any]) -> Mapping[str, str]:
    found: Mapping[str, str] = obj["metadata"].get("annotations") or {}
    return found


def _missing(spec: WorkerSet, said: str) -> TargetProblem:
    ref = spec.target
    return TargetProblem(
        f"spec.scaleTargetRef: {ref.kind} {ref.name!r} of {ref.api_version} was not found ({said})",
        hint="It must be in the namespace of the WorkerSet, and the operator must be allowed to read it.",
    )
