"""Quantities against exact arithmetic, sbatch options against everything people may write, job states without gaps."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from slurmlet.base.errors import RefusedPod, UserError
from slurmlet.model import job_states, quantities, sbatch_options
from slurmlet.model.ids import JobId
from slurmlet.model.job_states import Stage
from slurmlet.model.slurm_values import EndedJob, Job

POWERS = {
    "n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 10**3), "": Fraction(1), "k": Fraction(10**3),
    "M": Fraction(10**6), "G": Fraction(10**9), "T": Fraction(10**12), "P": Fraction(10**15), "E": Fraction(10**18),
    **{unit: Fraction(1024) ** power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)},
}  # fmt: skip
DIGITS = st.integers(0, 10**18)


@given(
    st.sampled_from(("", "+", "-")),
    DIGITS,
    st.none() | st.integers(0, 10**9),
    st.sampled_from(sorted(POWERS)),
)
def test_a_quantity_is_its_number_times_its_unit(
    sign: str, whole: int, places: int | None, unit: str
) -> None:
    text = f"{whole}" if places is None else f"{whole}.{places}"
    expected = Fraction(text) * POWERS[unit] * (-1 if sign == "-" else 1)
    assert quantities.parse(f"{sign}{text}{unit}") == expected


@given(DIGITS, st.integers(-99, 99), st.sampled_from("eE"))
def test_an_exponent_is_a_power_of_ten(whole: int, exponent: int, letter: str) -> None:
    assert quantities.parse(f"{whole}{letter}{exponent}") == whole * Fraction(10) ** exponent


@given(st.text(max_size=12) | st.from_regex(r"[+-]?[0-9.]{0,4}[eEinumkMGTP]{0,3}[0-9]{0,3}", fullmatch=True))
def test_any_text_is_a_quantity_or_is_refused(text: str) -> None:
    try:
        quantities.parse(text)
    except UserError:
        pass


@given(st.integers(0, 10**30), st.sampled_from(sorted(POWERS)))
def test_the_canonical_form_says_the_same(nanos: int, unit: str) -> None:
    value = Fraction(nanos, 10**9)
    written = quantities.canonical(value, f"1{unit}")
    assert quantities.parse(written) == value
    # Written again it stays as it is.
    assert quantities.canonical(quantities.parse(written), written) == written or unit.endswith("i")


@given(st.fractions())
def test_ceil_is_the_smallest_number_that_is_enough(value: Fraction) -> None:
    assert quantities.ceil(value) - 1 < value <= quantities.ceil(value)


NAMES = sorted(sbatch_options._VALUED | sbatch_options._FLAGS | sbatch_options._OPTIONAL_VALUE)
HOSTILE = st.sampled_from(
    (
        "--wrap=id",
        "--wra",
        "-o",
        "--output=/etc/x",
        "a'; echo foo",
        "$(id)",
        "`id`",
        "x --wrap=id",
        "\n--wrap=id",
        "--",
        "-",
        "",
    )
)
VALUES = HOSTILE | st.text(max_size=10)
LINES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(NAMES), VALUES).map(lambda each: f"--{each[0]}={each[1]}"),
        st.sampled_from(NAMES).map("--{}".format),
        st.tuples(st.sampled_from("ABbCcdFGHLmNnOpqsStwxoJeD"), VALUES).map(
            lambda each: f"-{each[0]}{each[1]}"
        ),
        VALUES,
    ),
    max_size=5,
).map(" ".join)
ANNOTATIONS = st.dictionaries(
    st.sampled_from(
        [
            *(f"slurmlet.io/{name}" for name in (*sbatch_options._NAMED, "exclusive", "sbatch")),
            *sbatch_options._LINES,
            *sorted(sbatch_options._SLINKY_KNOWN),
            *sbatch_options._WITHOUT_EFFECT,
        ]
    ),
    VALUES | LINES,
    max_size=6,
)


def check_options(options: list[sbatch_options.Option]) -> None:
    for name, value in options:
        assert name in NAMES
        assert value != ""
        assert not any(ord(char) < 32 for char in value or "")


@given(LINES)
def test_a_line_of_options_is_allowed_names_and_whole_values_or_is_refused(line: str) -> None:
    try:
        options = sbatch_options.parse_line("slurmlet.io/sbatch", line)
    except RefusedPod:
        return
    check_options(options)


@given(ANNOTATIONS)
def test_annotations_become_allowed_options_or_are_refused(annotations: dict[str, str]) -> None:
    try:
        options, notes = sbatch_options.from_annotations(annotations)
    except RefusedPod:
        return
    check_options(options)
    without_effect = [key for key in annotations if key in sbatch_options._WITHOUT_EFFECT]
    assert len(notes) == len(without_effect)


# squeue(1) and sacct(1) of Slurm 22.05 to 25.11, "JOB STATE CODES" and the flags beside them.
STATES = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "CONFIGURING", "COMPLETING", "DEADLINE", "EXPEDITING",
    "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PENDING", "PREEMPTED",
    "POWER_UP_NODE", "RECONFIG_FAIL", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESIZING",
    "RESV_DEL_HOLD", "REVOKED", "RUNNING", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT", "STOPPED",
    "SUSPENDED", "TIMEOUT",
)  # fmt: skip


def test_every_state_of_slurm_has_its_row() -> None:
    assert set(STATES) == set(job_states._TABLE)


@given(
    st.sampled_from(STATES) | st.text(max_size=12), st.text(max_size=12), st.text(max_size=5),
    st.none() | st.integers(0, 2**32), st.integers(0, 255), st.integers(0, 64),
)  # fmt: skip
def test_every_state_has_one_meaning_whoever_tells_it(
    state: str, reason: str, nodes: str, cancelled_by: int | None, exit_code: int, signal: int
) -> None:
    queued = job_states.fate_of(_job(state, reason, nodes))
    ended = job_states.fate_of_ended(_ended(state, reason, cancelled_by, exit_code, signal))
    assert queued.stage == ended.stage == job_states.stage_of(state)
    assert job_states.is_over(state) == (queued.stage is Stage.ENDED) != job_states.holds_resources(state)
    if queued.stage is Stage.ENDED:
        assert queued.reason == ended.reason != ""
        assert queued.by_itself == ended.by_itself
        assert "17" in queued.message
        assert "17" in ended.message
    else:
        assert queued.reason == ended.reason == ""
    if state not in STATES:
        assert queued.stage is Stage.RUNNING


def _job(state: str, reason: str, nodes: str) -> Job:
    return Job(job_id=JobId("17"), state=state, reason=reason, nodes=nodes, partition="batch", comment="")


def _ended(state: str, reason: str, cancelled_by: int | None, exit_code: int, signal: int) -> EndedJob:
    return EndedJob(
        job_id=JobId("17"),
        state=state,
        exit_code=exit_code,
        signal=signal,
        cancelled_by_uid=cancelled_by,
        reason=reason,
    )
