"""Slurm's configuration as `scontrol show config` tells it, and what of it matters to others than the doctor."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import replace

from slurmlet.base.processes import run
from slurmlet.model.slurm_values import Capabilities
from slurmlet.slurm.environment import command_environment

COMMANDS = ("sbatch", "squeue", "scancel", "sinfo", "scontrol", "srun")
_CONFIG_LINE = re.compile(r"^(\w+)\s*=\s?(.*?)\s*$")
_TIMEOUT_S = 15.0
# The first release with `srun --async`.
_ASYNC_STEPS = (26, 5)
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
    known = Capabilities(config.get("SLURM_VERSION", "unknown"), accounting=False)
    return replace(
        known,
        accounting=config.get("AccountingStorageType", "") not in _NO_ACCOUNTING,
        immediate_problem=_immediate_problem(config),
        async_steps=known.release >= _ASYNC_STEPS and _has_step_manager(config),
        kill_wait_s=_seconds(config.get("KillWait", "")) or 30.0,
        plugin_dirs=config.get("PluginDir", ""),
    )


def _has_step_manager(config: Mapping[str, str]) -> bool:
    """Whether a job can have one: for all jobs, or for those that ask (`--stepmgr`), which needs an extern step."""
    for_all = "enable_stepmgr" in config.get("SlurmctldParameters", "").lower().split(",")
    return for_all or "contain" in config.get("PrologFlags", "").lower().split(",")


def _immediate_problem(config: Mapping[str, str]) -> str:
    if limit_s := _seconds(config.get("InactiveLimit", "")):
        return f"InactiveLimit is {limit_s:g}: Slurm cancels jobs whose srun has ended"
    return ""


def _seconds(text: str) -> float:
    """ "30 sec"; 0 where there is no number."""
    found = re.match(r"\d+", text.strip())
    return float(found.group()) if found else 0.0
