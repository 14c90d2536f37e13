"""`--manifest FILE`: applied before the command; with `--wait` followed until its Jobs and bare pods have ended.

Everything goes through kubectl, as a person would do it: so all that it reads (directories, URLs, stdin) is read here too.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slurmlet.base.console import say
from slurmlet.base.errors import UserError
from slurmlet.base.processes import CommandError, run

_POLL_S = 0.5
_OVER = ("Succeeded", "Failed")
Obj = dict[str, Any]


def apply(files: Sequence[str], environment: Mapping[str, str]) -> None:
    try:
        run(["kubectl", "apply", *_named(files)], env=environment, timeout_s=120)
    except CommandError as error:
        raise UserError(f"--manifest: {error.stderr}") from error


def wait(files: Sequence[str], environment: Mapping[str, str], check: Callable[[], None]) -> int:
    """The wait status of the whole: 0, or 1 << 8 when a Job or pod failed. `check` may raise to end it."""
    wanted = _wanted(files, environment)
    if not wanted:
        raise UserError("--wait: the manifests contain neither a Job nor a Pod", hint="Leave out --wait.")
    followers: dict[str, threading.Thread] = {}
    while True:
        check()
        found = [_get(one, environment) for one in wanted]
        for pod in _pods(found, environment):
            _follow(pod, environment, followers)
        states = [_outcome(obj) for obj in found]
        if None not in states:
            break
        time.sleep(_POLL_S)
    for thread in followers.values():
        thread.join(5.0)
    failed = [
        f"{kind} {name}" for (kind, _, name), state in zip(wanted, states, strict=True) if state is False
    ]
    if failed:
        say(f"slurmlet: failed: {', '.join(failed)}")
    return (1 << 8) if failed else 0


def _named(files: Sequence[str]) -> list[str]:
    return [word for one in files for word in ("-f", one)]


def _wanted(files: Sequence[str], environment: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(kind, namespace, name) of everything in the manifests that ends by itself."""
    told = run(["kubectl", "get", *_named(files), "-o", "json"], env=environment).stdout
    loaded = json.loads(told)
    items = loaded["items"] if loaded.get("kind") == "List" else [loaded]
    return [
        (item["kind"], item["metadata"]["namespace"], item["metadata"]["name"])
        for item in items
        if item["kind"] in ("Job", "Pod")
    ]


def _get(one: tuple[str, str, str], environment: Mapping[str, str]) -> Obj | None:
    kind, namespace, name = one
    told = run(["kubectl", "get", kind, "-n", namespace, name, "-o", "json"], env=environment, check=False)
    return json.loads(told.stdout) if told.ok else None


def _outcome(obj: Obj | None) -> bool | None:
    """True: it ended well, False: it did not (or somebody deleted it), None: it has not ended."""
    if obj is None:
        return False
    status = obj.get("status") or {}
    if obj["kind"] == "Pod":
        return status.get("phase") == "Succeeded" if status.get("phase") in _OVER else None
    for condition in status.get("conditions") or ():
        if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
            return bool(condition["type"] == "Complete")
    return None


def _pods(found: Sequence[Obj | None], environment: Mapping[str, str]) -> list[Obj]:
    pods = [obj for obj in found if obj is not None and obj["kind"] == "Pod"]
    for job in (obj for obj in found if obj is not None and obj["kind"] == "Job"):
        argv = ["kubectl", "get", "pods", "-n", job["metadata"]["namespace"], "-o", "json"]
        told = run([*argv, "-l", f"batch.kubernetes.io/job-name={job['metadata']['name']}"], env=environment)
        pods += json.loads(told.stdout)["items"]
    return pods


def _follow(pod: Obj, environment: Mapping[str, str], followers: dict[str, threading.Thread]) -> None:
    uid = pod["metadata"]["uid"]
    phase = (pod.get("status") or {}).get("phase")
    if uid in followers or phase not in ("Running", *_OVER):
        return
    argv = [
        "kubectl",
        "logs",
        "-f",
        "--all-containers",
        "-n",
        pod["metadata"]["namespace"],
        pod["metadata"]["name"],
    ]
    followers[uid] = thread = threading.Thread(target=_copy, args=(argv, dict(environment)), daemon=True)
    thread.start()


def _copy(argv: list[str], environment: dict[str, str]) -> None:
    """base/processes.run would hold the lines back until the end."""
    with (
        contextlib.suppress(OSError),
        subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.flush()
            os.write(1, line)
