"""The operator under test as a process of the site: started, killed, asked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmlet.base.processes import Completed
from slurmlet.testbed.provisioning import site_objects
from slurmlet.testbed.provisioning.provision_site import OPERATOR, ProvisionSite, done_on


@dataclass
class OperatorProcess:
    site: ProvisionSite
    root: Path
    name: str = OPERATOR
    arguments: Sequence[str] = ()

    def install(self) -> None:
        raise NotImplementedError

    def start(self) -> None:
        raise NotImplementedError

    def kill(self) -> None:
        self.site.management.end(self.name, kill=True)

    def stop(self) -> None:
        self.site.management.end(self.name)

    def running(self) -> bool:
        return self.site.management.running(self.name)

    def log(self) -> str:
        return self.site.management.log(self.name)

    def ask(self, *words: str) -> Completed:
        """`slurmlet provision WORDS` of an administrator."""
        argv = [str(Path(sys.executable).parent / "slurmlet"), "provision", *words]
        return done_on(self.site, [*argv, "--kubeconfig", str(self.site.management.kubeconfig)])


__all__ = ["OperatorProcess", "site_objects"]
