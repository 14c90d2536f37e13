"""From a SlurmWorkerConfig or VirtualKubeletConfig to the user-data of its machine. Pure.

A worker gets the key of auth/slurm and nothing else that opens a door: no key of an authority, no kubeconfig. Inline content
and commands are jinja templates against the metadata, as in the thesis; what comes from Secrets is data, never a template.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

from slurmlet.base.errors import UserError
from slurmlet.operators.provisioning.bootstrap.cloud_config_text import (
    cloud_config_text,
    without_jinja_comments,
)
from slurmlet.operators.provisioning.bootstrap.worker_scripts import (
    JOIN_PATH,
    KEY_PATH,
    VIRTUAL_KUBELET_PATH,
    join_script,
    virtual_kubelet_script,
)
from slurmlet.operators.provisioning.controller_lookup import ControllerFacts
from slurmlet.operators.provisioning.controller_spec import MetaDataNames, SecretKey

Obj = dict[str, Any]
WORKER, VIRTUAL_KUBELET = "SlurmWorkerConfig", "VirtualKubeletConfig"
# Cluster API's sign, by which infrastructure providers see that the machine was set up.
_SENTINEL = "mkdir -p /run/cluster-api && echo success > /run/cluster-api/bootstrap-success.complete"
# cloud-init leaves the metadata, and so the key, where every user of the machine can read them; it writes them at each boot.
_HIDDEN = "chmod 0600 /run/cloud-init/instance-data.json || true"
# As crypt(3) writes them: printable, without colons, and without what would be a template of jinja's.
_HASH = re.compile(rb"[!-9;-z|~]+")
_USER_FIELDS = {
    "name": "name",
    "gecos": "gecos",
    "groups": "groups",
    "homeDir": "homedir",
    "shell": "shell",
    "passwd": "passwd",
    "primaryGroup": "primary_group",
    "lockPassword": "lock_passwd",
    "sudo": "sudo",
    "sshAuthorizedKeys": "ssh_authorized_keys",
}


def secrets_needed(kind: str, spec: Mapping[str, Any]) -> list[SecretKey]:
    """What `bootstrap_data` wants to be given, of the config's own namespace."""
    refs = [(one.get("contentFrom") or {}).get("secret") for one in spec.get("files") or ()]
    refs += [(one.get("passwdFrom") or {}).get("secret") for one in spec.get("users") or ()]
    if kind == WORKER:
        refs.append(((spec.get("slurmd") or {}).get("key") or {}).get("secret"))
    return [SecretKey(ref["name"], ref["key"]) for ref in refs if ref]


def bootstrap_data(
    kind: str,
    spec: Mapping[str, Any],
    machine: str,
    secrets: Mapping[SecretKey, bytes],
    facts: ControllerFacts | None = None,
    names: MetaDataNames = MetaDataNames(),  # noqa: B008 - frozen
) -> str:
    """`facts`: of the SlurmCluster that the config names; None where they come from the metadata."""
    document: Obj = {
        "users": [_user(one, secrets) for one in spec.get("users") or ()],
        "write_files": [_file(one, secrets) for one in spec.get("files") or ()],
        "runcmd": [without_jinja_comments(one) for one in spec.get("commands") or ()],
    }
    if kind == WORKER:
        return cloud_config_text(_worker(document, spec, machine, secrets, facts, names))
    if kind == VIRTUAL_KUBELET:
        return cloud_config_text(_virtual_kubelet(document, spec))
    raise UserError(f"no bootstrap data for kind {kind}")


def _worker(
    document: Obj,
    spec: Mapping[str, Any],
    machine: str,
    secrets: Mapping[SecretKey, bytes],
    facts: ControllerFacts | None,
    names: MetaDataNames,
) -> Obj:
    slurmd: Mapping[str, Any] = spec.get("slurmd") or {}
    given = slurmd.get("key") or {}
    key: Obj | None = None
    if given.get("secret"):
        key = _data(secrets[SecretKey(given["secret"]["name"], given["secret"]["key"])])
    elif given.get("none") is None:
        key = (
            _data(facts.key)
            if facts
            else {"content": f"{{{{ ds.meta_data.{_jinja_name(names.key)} }}}}", "encoding": "b64"}
        )
    if key is not None and facts is None and not given.get("secret"):
        document = {"bootcmd": [_HIDDEN], **document}
    metadata = f"{{{{ ds.meta_data.{_jinja_name(names.conf_server)} }}}}"
    conf_server = slurmd.get("confServer") or (facts.conf_server if facts else metadata)
    script = join_script(slurmd, machine, conf_server, has_key=key is not None)
    document["write_files"].append({"path": JOIN_PATH, "permissions": "0755", "content": script})
    if key is not None:
        # Last: where the metadata have no key, cloud-init gives up at this file.
        document["write_files"].append({"path": KEY_PATH, "permissions": "0600", **key})
    document["runcmd"] += [
        _HIDDEN if "bootcmd" in document else None,
        f"{JOIN_PATH} && {_SENTINEL}",
        *(without_jinja_comments(one) for one in spec.get("postCommands") or ()),
    ]
    return {**document, "runcmd": [one for one in document["runcmd"] if one]}


def _virtual_kubelet(document: Obj, spec: Mapping[str, Any]) -> Obj:
    """The thesis's order: its own program first, then the commands."""
    given: Mapping[str, Any] = spec.get("virtualKubelet") or {}
    first: list[str] = []
    if given.get("url"):
        script = virtual_kubelet_script(given["url"], given.get("args") or ())
        document["write_files"].append(
            {"path": VIRTUAL_KUBELET_PATH, "permissions": "0755", "content": script}
        )
        first = [VIRTUAL_KUBELET_PATH]
    return {**document, "runcmd": [*first, *document["runcmd"], _SENTINEL]}


def _file(given: Mapping[str, Any], secrets: Mapping[SecretKey, bytes]) -> Obj:
    written: Obj = {"path": given["path"], "owner": given.get("owner"), "append": given.get("append")}
    written["permissions"] = given.get("permissions")
    encoding = given.get("encoding")
    ref = (given.get("contentFrom") or {}).get("secret")
    if ref:
        written |= _encoded(secrets[SecretKey(ref["name"], ref["key"])], encoding, given["path"])
    else:
        written |= {"content": without_jinja_comments(given.get("content") or ""), "encoding": encoding}
    return {name: value for name, value in written.items() if value is not None}


def _encoded(value: bytes, encoding: str | None, path: str) -> Obj:
    """A Secret's bytes: as base64 over whatever they are, unless they are base64 already by their owner's word."""
    if encoding is None or encoding == "gzip":
        return {**_data(value), "encoding": "b64" if encoding is None else "gzip+base64"}
    try:
        text = "".join(value.decode("ascii").split())
        # Whatever else it were, jinja might take it for a template.
        base64.b64decode(text, validate=True)
    except ValueError as error:
        raise UserError(f"file {path}: its Secret does not hold {encoding}") from error
    return {"content": text, "encoding": encoding}


def _data(value: bytes) -> Obj:
    return {"content": base64.b64encode(value).decode(), "encoding": "b64"}


def _user(given: Mapping[str, Any], secrets: Mapping[SecretKey, bytes]) -> Obj:
    user = {ours: given[theirs] for theirs, ours in _USER_FIELDS.items() if given.get(theirs) is not None}
    if given.get("inactive"):
        user["inactive"] = "0"  # days after which an unused password is locked; cloud-init has no plain yes
    ref = (given.get("passwdFrom") or {}).get("secret")
    if ref:
        password = secrets[SecretKey(ref["name"], ref["key"])].strip()
        if not _HASH.fullmatch(password):
            raise UserError(
                f"user {given['name']}: Secret {ref['name']} holds no password hash",
                hint="Make one with: openssl passwd -6",
            )
        user["passwd"] = password.decode("ascii")
    return user


def _jinja_name(name: str) -> str:
    """cloud-init offers names with hyphens under names with underscores."""
    return name.replace("-", "_")
