"""pods/<uid>/job.json: which job the pod has, as one hub writes it down for the next.

Both functions touch the home: never on the event loop.
"""

from __future__ import annotations

from typing import cast

from slurmlet.base.files import read_json, write_json
from slurmlet.base.layout import PodFiles
from slurmlet.protocol.cluster_files import JobFile


def read_job_file(files: PodFiles) -> JobFile:
    """Empty where there is none, or where it is no note of ours."""
    raw = read_json(files.job)
    return cast("JobFile", raw) if isinstance(raw, dict) else {}


def write_job_file(files: PodFiles, note: JobFile) -> None:
    write_json(files.job, note)
