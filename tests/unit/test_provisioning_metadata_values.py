"""metaData with what a worker needs: what was there stays as it is, whatever it is and whatever the bytes of the key."""

from __future__ import annotations

import base64

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from slurmlet.operators.provisioning.controller_lookup import BrokenLink, ControllerFacts
from slurmlet.operators.provisioning.controller_spec import MetaDataNames
from slurmlet.operators.provisioning.injection.metadata_values import injected, parsed, values

NAMES = MetaDataNames()


def facts(key: bytes = b"k", address: str = "192.0.2.1") -> ControllerFacts:
    return ControllerFacts(address, 6817, key)


@given(st.binary(min_size=1, max_size=2048))
def test_a_key_of_any_bytes_arrives(key: bytes) -> None:
    text = injected("name: m\n", values(facts(key), NAMES, "")).text
    assert base64.b64decode(yaml.safe_load(text)["slurm_key_base64"]) == key


plain = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: not name.startswith("slurm")), st.text(max_size=20)
)


@given(plain, st.booleans(), st.booleans())
def test_what_was_there_stays_and_a_second_time_adds_nothing(
    present: dict[str, str], flow: bool, ended: bool
) -> None:
    text = yaml.safe_dump(present, default_flow_style=flow) + ("...\n" if ended else "")
    wanted = values(facts(), NAMES, "hpc")
    result = injected(text, wanted)
    assert yaml.safe_load(result.text) == {**present, **wanted}
    again = injected(result.text, wanted)
    assert (again.text, again.added, again.differing) == (result.text, (), ())


def test_a_block_is_continued_to_the_letter() -> None:
    text = "# by Metal3\nindex: 007\nname: 'm-0'  # quoted"
    assert injected(text, {"a": "b"}).text == f"{text}\na: b\n"


def test_a_name_that_somebody_set_stays_and_is_told() -> None:
    result = injected("slurm_controller_address: 198.51.100.1\n", values(facts(), NAMES, ""))
    assert parsed(result.text)["slurm_controller_address"] == "198.51.100.1"
    assert result.differing == ("slurm_controller_address",)
    assert result.added == ("slurm_conf_server", "slurm_key_base64")


def test_an_address_of_the_sixth_version_is_bracketed_before_its_port() -> None:
    assert values(facts(address="2001:db8::1"), NAMES, "")["slurm_conf_server"] == "[2001:db8::1]:6817"


@pytest.mark.parametrize("text", ["- a", "a: [b]", "a: {b: c}", "a: b: c", "\0", "&a [*a]", "? [x]\n: y"])
def test_anything_but_a_map_of_plain_values_is_refused_without_its_content(text: str) -> None:
    with pytest.raises(BrokenLink) as error:
        injected(text, {"x": "y"})
    assert error.value.message == "metaData: data.metaData is not a YAML map of names to plain values"
