"""The shell scripts that a new machine runs once: install and start slurmd, or the thesis's Virtual Kubelet. Pure.

They are templates of jinja too (cloud_config_text), so no brace pair may stand in them but where one is meant.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from slurmlet.base.errors import UserError
from slurmlet.operators.provisioning.bootstrap.cloud_config_text import without_jinja_comments

JOIN_PATH = "/usr/local/sbin/slurmlet-join"
VIRTUAL_KUBELET_PATH = "/usr/local/sbin/slurmlet-virtual-kubelet"
KEY_PATH = "/etc/slurm/slurm.key"
# Two shells and systemd read these words one after the other; what any of them would take for its own is refused.
_RISKY = re.compile(r"""['"\\$`\n%]""")

_JOIN = """\
#!/bin/sh
# Makes this machine a Slurm worker. Written by slurmlet's bootstrap provider; safe to run again.
set -eu
fail() {{ echo "slurmlet-join: $*" >&2; exit 1; }}

conf_server={conf_server}
case "$conf_server" in
  "" | CI_MISSING_JINJA_VAR*) fail "the metadata do not say where slurmctld is: did the Injection Webhook see them?" ;;
esac
{user}{install}
command -v slurmd > /dev/null || fail "slurmd is not installed"
{key}
set -- {dynamic}--conf-server "$conf_server" {arguments}
if [ -d /run/systemd/system ]; then
  for file in /etc/default/slurmd /etc/sysconfig/slurmd; do
    [ ! -d "${{file%/*}}" ] || echo "SLURMD_OPTIONS=\\"{dynamic}--conf-server $conf_server {options}\\"" > "$file"
  done
  systemctl enable slurmd
  systemctl restart slurmd
else
  slurmd "$@"
fi
"""

_USER = """
if ! getent passwd {user} > /dev/null; then
  getent group {user} > /dev/null || groupadd --system {gid}{user}
  useradd --system {uid}--gid {user} --no-create-home --home-dir /var/lib/slurm --shell /usr/sbin/nologin {user}
fi
"""

_PACKAGES = """
if command -v apt-get > /dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get -qq update
  # The daemon must not start before it knows its controller.
  ln -sf /dev/null /run/systemd/system/slurmd.service 2> /dev/null || true
  apt-get -qq install --no-install-recommends {apt}
  rm -f /run/systemd/system/slurmd.service
  [ ! -d /run/systemd/system ] || systemctl daemon-reload
elif command -v dnf > /dev/null; then
  dnf -y -q install {dnf}
elif command -v zypper > /dev/null; then
  zypper --non-interactive --quiet install {zypper}
else
  fail "no package manager that is known here: set slurmd.installCommands"
fi"""

_KEY = """
[ -s {path} ] || fail "{path} is empty: the metadata had no key"
if getent passwd {user} > /dev/null; then chown {user}: {path}; fi
chmod 0600 {path}
"""

_VIRTUAL_KUBELET = """\
#!/bin/sh
# Fetches and starts the Virtual Kubelet. It has no kubeconfig but one that `files` gave it.
set -eu
curl --fail --silent --show-error --location --output /usr/local/bin/virtual-kubelet {url}
chmod 0755 /usr/local/bin/virtual-kubelet
cat > /etc/systemd/system/virtual-kubelet.service << 'UNIT'
[Unit]
Description=Virtual Kubelet
After=network-online.target
[Service]
ExecStart=/usr/local/bin/virtual-kubelet {args}
Restart=on-failure
[Install]
WantedBy=multi-user.target
UNIT
systemctl daemon-reload
systemctl enable --now virtual-kubelet
"""


def join_script(slurmd: Mapping[str, Any], machine: str, conf_server: str, *, has_key: bool) -> str:
    user = slurmd.get("user") or "slurm"
    node = slurmd.get("nodeName") or f"{slurmd.get('nodeNamePrefix') or ''}{machine}"
    conf = " ".join(
        part
        for part in (
            f"Feature={','.join(slurmd['features'])}" if slurmd.get("features") else "",
            slurmd.get("conf") or "",
        )
        if part
    )
    words = ["-N", node, *(["--conf", conf] if conf else []), *(slurmd.get("extraArguments") or ())]
    for word in (conf_server, *words):
        if _RISKY.search(word):
            raise UserError(f"slurmd's argument {word!r} has a quote, a backslash, $, % or a line break")
    return _JOIN.format(
        conf_server=shlex.quote(conf_server),
        user=_user(user, slurmd.get("userID")),
        install=_install(slurmd),
        key=_KEY.format(path=KEY_PATH, user=user) if has_key else "",
        # A CLOUD node has its record in slurm.conf.
        dynamic="" if slurmd.get("cloud") else "-Z ",
        arguments=shlex.join(words),
        options=shlex.join(words),
    )


def virtual_kubelet_script(url: str, args: Sequence[str]) -> str:
    """The thesis gives option and value as one string (`--provider mock`): systemd splits them, as it did there."""
    return _VIRTUAL_KUBELET.format(
        url=shlex.quote(url), args=" ".join(without_jinja_comments(one) for one in args)
    )


def _user(user: str, uid: int | None) -> str:
    """Only where a uid is asked for: packages make the user, with the distribution's own."""
    if uid is None:
        return ""
    return _USER.format(user=user, uid=f"--uid {uid} ", gid=f"--gid {uid} ")


def _install(slurmd: Mapping[str, Any]) -> str:
    commands: Sequence[str] = slurmd.get("installCommands") or ()
    if commands:
        return _where_missing("\n".join(without_jinja_comments(one) for one in commands))
    packages: Sequence[str] | None = slurmd.get("packages")
    if packages is None:
        # As Debian and Ubuntu, Fedora with EPEL, and SUSE call it.
        steps = _PACKAGES.format(apt="slurmd", dnf="slurm-slurmd", zypper="slurm-node")
        return _where_missing(steps.strip("\n"))
    words = shlex.join(packages)
    return _PACKAGES.format(apt=words, dnf=words, zypper=words) if packages else ""


def _where_missing(steps: str) -> str:
    return f"\nif ! command -v slurmd > /dev/null; then\n{steps}\nfi"
