"""The one error tree.

    SlurmletError
    ├── UserError          the user can fix it: bad flag, bad manifest, missing file
    ├── SiteError          this machine or site lacks something
    ├── CommandError       an external command failed (base/processes.py)
    ├── SlurmError         Slurm refused, or could not be asked (slurm/)
    ├── ApiError           the API server refused a request (kube/)
    └── RefusedPod         a pod asks for what slurmlet cannot give (model/)

Every error carries `reason` (CamelCase, goes into conditions and events), `transient` (worth a retry) and `hint`
(the next step to take). The CLI prints message and hint and exits 1; no user sees a traceback.
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


class SlurmError(SlurmletError):
    """Slurm refused a request, or did not answer. `said`: its own sentence, for events; "" where it said nothing.

    Reasons: SlurmRefused (as asked for, never), SlurmLimited (a limit on the user's jobs that others of them will free),
    SlurmBusy (it limits the rate of requests), SlurmUnavailable (nobody answered: the request may have been carried out).
    All but the first are transient.
    """

    reason = "SlurmRefused"

    def __init__(
        self,
        message: str,
        *,
        said: str = "",
        hint: str = "",
        reason: str | None = None,
        transient: bool = False,
    ) -> None:
        super().__init__(message, hint=hint, reason=reason, transient=transient)
        self.said = said or message


class RefusedPod(SlurmletError):
    """A pod that can never run here as written; `message` names the field."""

    reason = "PodRefused"
