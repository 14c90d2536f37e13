"""The message a container leaves when it ends: from its file, or from the end of its log. The kubelet's rules."""

from __future__ import annotations

import os

from slurmlet.protocol.log_files import log_tail

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurmlet.protocol.pod_plan import ContainerPlan


_MAX_BYTES = 4096


def termination_message(plan: ContainerPlan, path: str, log: str, code: int) -> str:
    """`path` is where the file named by terminationMessagePath really lies."""
    text = ""
    if plan.get("termination_message_path"):
        try:
            text = _tail(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            return f"Error on reading termination log {plan['termination_message_path']}: {error.strerror}"
    if not text and code and plan.get("termination_message_policy") == "FallbackToLogsOnError":
        text = log_tail(log)
    return text


def _tail(path: str) -> str:
    """The end of a long message, for that is where things usually went wrong."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _MAX_BYTES))
        return file.read(_MAX_BYTES).decode("utf-8", "replace")
