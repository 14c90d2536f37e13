"""Slurm's configuration as `scontrol show config` tells it, and what of it matters to others than the doctor."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping

from slurmlet.base.processes import run
from slurmlet.model.slurm_values import Capabilities
from slurmlet.slurm.environment import command_environment

COMMANDS = ("sbatch", "squeue", "scancel", "sinfo", "scontrol", "srun")
_CONFIG_LINE = re.compile(r"^(\w+)\s*=\s?(.*?)\s*$")
_TIMEOUT_S = 15.0
_NO_ACCOUNTING = ("", "(null)", "accounting_storage/none")


def missing_commands() -> list[str]:
    return [name for name in COMMANDS if shutil.which(name) is None]


def parse_config(text: str) -> dict[str, str]:
    """`scontrol show config` as a mapping; lines of other shapes are headings."""
    found = (_CONFIG_LINE.match(line) for line in text.splitlines())
    return {match[1]: match[2] for match in found if match}


def show_config(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Raises CommandError."""
    around = command_environment() if environment is None else environment
    return parse_config(run(["scontrol", "show", "config"], timeout_s=_TIMEOUT_S, env=around).stdout)


def capabilities_of(config: Mapping[str, str]) -> Capabilities:
    return Capabilities(
        version=config.get("SLURM_VERSION", "unknown"),
        accounting=config.get("AccountingStorageType", "") not in _NO_ACCOUNTING,
        immediate_problem=_immediate_problem(config),
        kill_wait_s=_seconds(config.get("KillWait", "")) or 30.0,
        plugin_dirs=config.get("PluginDir", ""),
    )


def _immediate_problem(config: Mapping[str, str]) -> str:
    if limit_s := _seconds(config.get("InactiveLimit", "")):
        return f"InactiveLimit is {limit_s:g}: Slurm ends jobs whose srun is gone"
    return ""


def _seconds(text: str) -> float:
    """ "30 sec"; 0 where there is no number."""
    found = re.match(r"\d+", text.strip())
    return float(found.group()) if found else 0.0
