"""Messages as peers of protocol 1.0 sent them, recorded: hubs of 1.1 understand these."""

from __future__ import annotations

from typing import Any

_CONTAINER: dict[str, Any] = {
    "image": "docker.io/library/busybox:1.37", "state": "running", "reason": "", "message": "",
    "started_at": "2026-11-16T05:00:01Z", "finished_at": None, "exit_code": None, "signal": None,
    "container_id": "crun://0-main-0", "restart_count": 0, "started": True, "ready": True, "last": None,
    "user": {"uid": 0, "gid": 0, "groups": [0, 10]},
}  # fmt: skip
REPORT: dict[str, Any] = {
    "phase": "Running", "started_at": "2026-11-16T05:00:00Z", "exit_code": None, "problem": None,
    "init_containers": {}, "containers": {"main": _CONTAINER}, "ephemeral_containers": {},
}  # fmt: skip
_ENDED: dict[str, Any] = {
    **_CONTAINER, "state": "terminated", "reason": "Error", "finished_at": "2026-11-16T05:01:00Z", "exit_code": 3,
    "signal": 0, "started": False, "ready": False,
    "last": {
        "reason": "Completed", "message": "", "started_at": "2026-11-16T05:00:00Z", "finished_at": "2026-11-16T05:00:01Z",
        "exit_code": 0, "signal": 0, "container_id": "crun://0-main-0",
    },
}  # fmt: skip

RUNNER_HELLO: dict[str, Any] = {
    "type": "hello", "protocol": 1, "pod_uid": "8b0f", "job_id": "17", "host": "c1", "host_ip": "10.77.0.11",
    "version": "0.1.0", "has_pod": True, "report": REPORT,
}  # fmt: skip
FIRST_HELLO: dict[str, Any] = {**RUNNER_HELLO, "has_pod": False, "report": None}
AGENT_HELLO: dict[str, Any] = {
    "type": "hello", "protocol": 1, "node": "pool-1", "version": "0.1.0", "host_ip": "10.77.0.11", "pods": ["8b0f"],
    "ended": {"77aa": 0}, "job_id": "16", "partition": "batch", "host": "c1", "cpus": 4, "memory_mb": 4000,
    "host_memory_mb": 16000, "gpus": 0,
}  # fmt: skip
GATEWAY_HELLO: dict[str, Any] = {"type": "hello", "protocol": 1, "gateway": True, "host_ip": "10.77.0.10"}
OF_RUNNERS: list[dict[str, Any]] = [
    {"type": "report", "seq": 1, "report": REPORT},
    {"type": "bye", "seq": 9, "report": {**REPORT, "phase": "Done", "exit_code": 3, "containers": {"main": _ENDED},
                                         "problem": {"reason": "Terminated", "message": "the Slurm job was signalled"}}},
    {"type": "event", "kind": "Normal", "reason": "Started", "message": "Container started", "container": "main"},
    {"type": "answer", "id": 4, "usage": None},
    {"type": "answer", "id": 5, "usage": {
        "at": 1763269200.5, "volumes": {"cache": None}, "containers": {"main": {
            "started_at": "2026-11-16T05:00:01Z", "cpu_s": 0.25, "memory_bytes": 1 << 20, "rss_bytes": 1 << 19,
            "processes": 2, "rootfs": None, "logs": {"used_bytes": 4096, "inodes_used": 2, "capacity_bytes": 1 << 30,
                                                    "available_bytes": 1 << 29, "inodes": 9, "inodes_free": 8}}}}},
    {"type": "attached", "ip": "10.244.0.7", "overlay_port": 40001, "mode": "fast", "why": "", "listeners": {"80": 40123}},
    {"type": "listeners", "listeners": {}},
    {"type": "network-counts", "counts": {"overlay_dropped": 0}},
    {"type": "ports-taken", "ports": {"tcp 30080": "port 30080 is taken"}},
]  # fmt: skip
POD_ENDED: dict[str, Any] = {"type": "pod-ended", "uid": "77aa", "exit_code": 0}
