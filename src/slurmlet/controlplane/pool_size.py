"""pool.json, the desired size of the pool. Written here, read by the hub, which submits the jobs."""

from __future__ import annotations

import asyncio
import datetime
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from slurmlet.base.errors import RefusedPod, UserError
from slurmlet.base.files import locked, read_json, write_json
from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane import cluster_config as configs
from slurmlet.controlplane.api_probe import ApiProbe
from slurmlet.model.pool import PoolSpec, spec_of
from slurmlet.model.pool_jobs import PoolJob, pool_jobs
from slurmlet.model.sbatch_options import parse_words
from slurmlet.model.slurm_values import Job, Option
from slurmlet.slurm.session import opened


def options_of(line: str) -> list[Option]:
    """Of `--sbatch`. Raises UserError for what is no option that a pool node's job can have."""
    try:
        return parse_words("--sbatch", shlex.split(line))
    except ValueError as error:
        raise UserError(f"--sbatch: {error}", hint="Check the quotes.") from error
    except RefusedPod as error:
        raise UserError(error.message, hint=error.hint) from error


def check_range(least_option: str, least: int | None, most_option: str, most: int | None) -> None:
    """Raises UserError for a minimum above the maximum; None: the option was not given."""
    if least is not None and most is not None and least > most:
        raise UserError(
            f"{least_option} ({least}) exceeds {most_option} ({most})",
            hint=f"Set {most_option} to {least} or more.",
        )


def load(files: ClusterFiles) -> PoolSpec:
    raw = read_json(files.pool)
    return spec_of(raw if isinstance(raw, dict) else {})


def change(files: ClusterFiles, changed: Callable[[PoolSpec], PoolSpec]) -> PoolSpec:
    config = configs.load_existing(files)
    with locked(files.run / "pool.lock"):
        spec = changed(load(files))
        if spec.unwanted:
            # Names of nodes that are long gone need not be kept.
            live = {one.node for one in _pool_jobs(config)}
            spec = replace(spec, unwanted=spec.unwanted & live)
        if not 0 <= spec.least <= spec.most:
            raise UserError(
                f"the pool's minimum ({spec.least}) exceeds its maximum ({spec.most})",
                hint=f"Run: slurmlet pool size --min {spec.least} --max {spec.least}",
            )
        write_json(
            files.pool,
            {
                "least": spec.least,
                "most": spec.most,
                "options": list(spec.options),
                "idle_s": spec.idle_s,
                "unwanted": sorted(spec.unwanted),
            },
        )
    return spec


def set_size(
    files: ClusterFiles,
    least: int,
    most: int | None = None,
    options: Sequence[Option] = (),
    idle_s: float | None = None,
) -> PoolSpec:
    def changed(spec: PoolSpec) -> PoolSpec:
        return replace(
            spec,
            least=least,
            most=max(least, most) if most is not None else least,
            options=tuple(options) or spec.options,
            idle_s=spec.idle_s if idle_s is None else idle_s,
        )

    return change(files, changed)


def grow(files: ClusterFiles, count: int, options: Sequence[Option] = ()) -> PoolSpec:
    return change(
        files,
        lambda spec: replace(
            spec,
            least=spec.least + count,
            most=max(spec.most, spec.least + count),
            options=tuple(options) or spec.options,
        ),
    )


def shrink(files: ClusterFiles, names: Sequence[str]) -> PoolSpec:
    """Named members go, drained first; the pool is smaller by as many."""
    known = {one.node for one in _pool_jobs(configs.load_existing(files))}
    if unknown := sorted(set(names) - known):
        raise UserError(
            f"no such pool node: {', '.join(unknown)}", hint="List the nodes of the pool: slurmlet pool ls"
        )
    names = sorted(set(names) - load(files).unwanted)
    return change(
        files,
        lambda spec: replace(
            spec,
            least=max(0, spec.least - len(names)),
            most=max(0, spec.most - len(names)),
            unwanted=spec.unwanted | set(names),
        ),
    )


def members(files: ClusterFiles) -> list[dict[str, Any]]:
    """The pool's nodes: their jobs as Slurm has them, and whether they serve pods."""
    config = configs.load_existing(files)
    probe = ApiProbe(files)
    try:
        ready = {node.name: node.ready for node in probe.nodes()}
    finally:
        probe.close()
    return [
        {
            "node": one.node,
            "job": one.job_id,
            "state": one.state,
            "ready": ready.get(one.node, False),
            "time_left": _left(one),
        }
        for one in _pool_jobs(config)
    ]


def _pool_jobs(config: configs.ClusterConfig) -> list[PoolJob]:
    async def listed() -> list[Job]:
        async with opened(config.connection) as slurm:
            return await slurm.jobs()

    return pool_jobs(config.id, asyncio.run(listed()))


def _left(job: PoolJob) -> str | None:
    return None if job.left_s is None else str(datetime.timedelta(seconds=int(job.left_s)))
