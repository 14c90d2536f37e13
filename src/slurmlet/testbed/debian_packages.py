"""File trees out of Debian packages, for images: resolved and downloaded by apt, unpacked by dpkg-deb, nothing installed.

Both run inside the Debian root that the testbed's hosts have, read-only, with lists, a state and a source of their own: the
machine's own packages play no part and cannot come to harm. Must never call either of them outside of it, nor a verb
that installs.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmlet.base.errors import SiteError
from slurmlet.base.processes import CommandError, Completed, run

SUITE = "trixie"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_LIMIT_S = 600
# work root argv…: argv in the root, which nothing can write to but for /tmp; the work lies in /mnt.
_INSIDE = """
work=$1 root=$2; shift 2
mount --bind "$root" "$root"
mount --rbind "$work" "$root/mnt"
mount -t tmpfs tmpfs "$root/tmp"
mount -t proc proc "$root/proc"
mount --bind /etc/resolv.conf "$root/etc/resolv.conf"
mount -o remount,bind,ro "$root"
exec chroot "$root" "$@"
"""
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
    """Debian's archive as the hosts' root reaches it. In `work` lie apt's lists, the downloaded packages and the trees."""

    root: Path
    work: Path

    @property
    def packages(self) -> Path:
        return self.work / "downloads"

    def refresh(self) -> None:
        source = self._source()
        folder = self.work / "apt"
        for needed in (folder / "lists" / "partial", folder / "none", folder / "log", self.packages):
            needed.mkdir(parents=True, exist_ok=True)
        (folder / "status").write_text("")
        (folder / "sources.list").write_text(f"deb [signed-by={_KEYRING}] {source} {SUITE} main\n")
        self._apt(["update"])

    def _source(self) -> str:
        """The mirror that the root was made from."""
        listed = (self.root / "etc/apt/sources.list").read_text()
        found = re.search(r"^deb\s+(?:\[.*?\]\s+)?(\S+)", listed, re.MULTILINE)
        if not found:
            raise SiteError(
                "the hosts' root file system has no Debian mirror", hint="Build it again: slurmlet testbed up"
            )
        return found[1]

    def closure(self, names: Sequence[str]) -> list[str]:
        """`name=version` of the packages and all they depend on."""
        said = self._apt(["install", "--simulate", "--no-install-recommends", *names]).stdout
        found = re.findall(r"^Inst (\S+) \((\S+) ", said, re.MULTILINE)
        return [f"{name}={version}" for name, version in found]

    def unpack(self, names: Sequence[str], without: Collection[str], tree: Path) -> None:
        """Put the packages and what they depend on into the tree, but for those `without`."""
        wanted = [each for each in self.closure(names) if each.partition("=")[0] not in without]
        self._apt(["download", *wanted], "downloads")
        files = [self._file_of(each) for each in wanted]
        # The one that makes /bin a link to /usr/bin must come first.
        for file in sorted(files, key=lambda path: not path.name.startswith("base-files_")):
            self._inside(["dpkg-deb", "--extract", self._seen(file), self._seen(tree)])
        for folder in _PROSE:
            shutil.rmtree(tree / "usr/share" / folder, ignore_errors=True)

    def _file_of(self, wanted: str) -> Path:
        name, _, version = wanted.partition("=")
        found = list(self.packages.glob(f"{name}_{version.replace(':', '%3a')}_*.deb"))
        if len(found) != 1:
            raise SiteError(f"apt did not download {wanted}", hint=f"Empty {self.packages} and try again.")
        return found[0]

    def _apt(self, arguments: Sequence[str], cwd: str = "") -> Completed:
        folder = "/mnt/apt"
        settings = {
            "Dir::State": folder,
            "Dir::State::lists": f"{folder}/lists",
            "Dir::State::status": f"{folder}/status",
            "Dir::Cache": folder,
            "Dir::Log": f"{folder}/log",
            "Dir::Etc::sourcelist": f"{folder}/sources.list",
            "Dir::Etc::sourceparts": f"{folder}/none",
            "Dir::Etc::preferencesparts": f"{folder}/none",
            "APT::Sandbox::User": "root",
            "Acquire::Languages": "none",
            "Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled": "false",
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled": "false",
        }
        options = [part for key, value in settings.items() for part in ("-o", f"{key}={value}")]
        there = ["env", "--chdir", f"/mnt/{cwd}"]
        try:
            return self._inside([*there, "apt-get", "-q", *options, *arguments])
        except CommandError as error:
            raise SiteError(
                f"apt-get {arguments[0]} failed: {error.stderr[-500:]}",
                hint="Check that this machine reaches the Debian mirror of the testbed's hosts.",
            ) from error

    def _seen(self, path: Path) -> str:
        """The name of a file of ours in there."""
        return f"/mnt/{path.relative_to(self.work)}"

    def _inside(self, argv: Sequence[str]) -> Completed:
        alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-euc", _INSIDE, "inside"]
        keep = {key: value for key, value in os.environ.items() if key.lower().endswith("_proxy")}
        env = {**keep, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
        return run([*alone, str(self.work), str(self.root), *argv], timeout_s=_LIMIT_S, env=env)
