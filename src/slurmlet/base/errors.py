"""The one error tree.

    SlurmletError
    ├── UserError          the person can mend it: bad flag, bad manifest, missing file
    ├── SiteError          this machine or site lacks something
    ├── CommandError       an external command failed (base/processes.py)
    ├── ApiError           the API server said no (kube/)
    └── RefusedPod         a pod asks for what slurmlet cannot give (model/)

Every error carries `reason` (CamelCase, goes into conditions and events), `transient` (worth a retry) and `hint`
(the next step to take). The CLI prints message and hint and exits 1; nothing prints a traceback at a person.
"""

from __future__ import annotations


class SlurmletError(Exception):
    reason = "Error"
    transient = False

    def __init__(
        self, message: str, *, hint: str = "", reason: str | None = None, transient: bool | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if reason is not None:
            self.reason = reason
        if transient is not None:
            self.transient = transient


class UserError(SlurmletError):
    reason = "InvalidInput"


class SiteError(SlurmletError):
    reason = "SiteLacksSupport"


class RefusedPod(SlurmletError):
    """A pod that can never run here as written; `message` names the field."""

    reason = "PodRefused"
