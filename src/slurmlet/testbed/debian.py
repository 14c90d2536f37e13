"""File trees out of Debian packages, for images: resolved and downloaded by apt, unpacked by dpkg-deb, nothing installed.

apt gets lists, a state and a source of its own, so the machine's packages play no part. Must never call a verb of apt
or dpkg that installs: a state of its own does not keep `apt-get install` from installing into the machine.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmlet.base.errors import SiteError
from slurmlet.base.processes import CommandError, Completed, run
from slurmlet.testbed.rootfs import machine_mirror

SUITE = "trixie"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_LIMIT_S = 600
# What programs do not read.
_PROSE = (
    "doc",
    "man",
    "info",
    "locale",
    "lintian",
    "bash-completion",
    "bug",
    "icons",
    "pixmaps",
    "doc-base",
    "gdb",
)


@dataclass(frozen=True)
class Archive:
    """Debian's archive as this machine reaches it; `folder` holds apt's lists, `packages` the downloaded files."""

    folder: Path
    packages: Path

    def refresh(self) -> None:
        mirror = machine_mirror()
        if mirror is None:
            raise SiteError(
                "this machine knows no Debian mirror", hint="Images of servers need apt and a Debian mirror."
            )
        for needed in (self.folder / "lists" / "partial", self.folder / "none", self.packages):
            needed.mkdir(parents=True, exist_ok=True)
        (self.folder / "status").write_text("")
        (self.folder / "sources.list").write_text(f"deb [signed-by={_KEYRING}] {mirror} {SUITE} main\n")
        self._apt(["update"])

    def closure(self, names: Sequence[str]) -> list[str]:
        """`name=version` of the packages and all they depend on."""
        said = self._apt(["install", "--simulate", "--no-install-recommends", *names]).stdout
        found = re.findall(r"^Inst (\S+) \((\S+) ", said, re.MULTILINE)
        return [f"{name}={version}" for name, version in found]

    def unpack(self, names: Sequence[str], without: Collection[str], tree: Path) -> None:
        """Put the packages and what they depend on into the tree, but for those `without`."""
        wanted = [each for each in self.closure(names) if each.partition("=")[0] not in without]
        self._apt(["download", *wanted], cwd=self.packages)
        files = [self._file_of(each) for each in wanted]
        # The one that makes /bin a link to /usr/bin must come first.
        for file in sorted(files, key=lambda path: not path.name.startswith("base-files_")):
            run(["dpkg-deb", "--extract", str(file), str(tree)], timeout_s=120)
        for folder in _PROSE:
            shutil.rmtree(tree / "usr/share" / folder, ignore_errors=True)

    def _file_of(self, wanted: str) -> Path:
        name, _, version = wanted.partition("=")
        found = list(self.packages.glob(f"{name}_{version.replace(':', '%3a')}_*.deb"))
        if len(found) != 1:
            raise SiteError(f"apt did not download {wanted}", hint=f"Empty {self.packages} and try again.")
        return found[0]

    def _apt(self, arguments: Sequence[str], cwd: Path | None = None) -> Completed:
        settings = {
            "Dir::State": self.folder,
            "Dir::State::lists": self.folder / "lists",
            "Dir::State::status": self.folder / "status",
            "Dir::Cache": self.folder,
            "Dir::Etc::sourcelist": self.folder / "sources.list",
            "Dir::Etc::sourceparts": self.folder / "none",
            "Dir::Etc::preferencesparts": self.folder / "none",
            "APT::Sandbox::User": "root",
            "Acquire::Languages": "none",
            "Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled": "false",
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled": "false",
        }
        options = [part for key, value in settings.items() for part in ("-o", f"{key}={value}")]
        try:
            return run(["apt-get", "-q", *options, *arguments], timeout_s=_LIMIT_S, cwd=cwd)
        except CommandError as error:
            raise SiteError(
                f"apt-get {arguments[0]} failed: {error.stderr[-500:]}",
                hint="Is the Debian mirror of this machine reachable (apt-get update)?",
            ) from error
