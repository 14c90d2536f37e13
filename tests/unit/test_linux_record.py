"""Records of the runner's are what `typing.NamedTuple` makes."""

from __future__ import annotations

import pickle
import typing

import pytest

from slurmlet.linux.record import Record


class Own(Record):
    one: int
    two: str = "2"
    three: tuple[int, ...] = ()

    @property
    def both(self) -> str:
        return f"{self.one}{self.two}"


class Derived(Own):
    """Of another kind, with the same places."""


class Original(typing.NamedTuple):
    one: int
    two: str = "2"
    three: tuple[int, ...] = ()


@pytest.mark.parametrize("kind", [Own, Derived])
def test_they_are_what_python_makes(kind: type[Own]) -> None:
    for arguments, named in [
        ((1,), {}),
        ((1, "a", (3,)), {}),
        ((), {"two": "b", "one": 5}),
        ((7,), {"three": (1,)}),
    ]:
        made, original = kind(*arguments, **named), Original(*arguments, **named)  # type: ignore[arg-type]
        assert tuple(made) == tuple(original)
        assert hash(made) == hash(original)
        assert (made.one, made.two, made.three) == (original.one, original.two, original.three)
        assert made._replace(two="z")._asdict() == original._replace(two="z")._asdict()
        assert repr(made) == repr(original).replace("Original", kind.__name__)
        assert kind._make(made) == made
        assert isinstance(made._replace(one=2), kind)
        assert pickle.loads(pickle.dumps(made)) == made
    assert kind._fields == Original._fields
    assert kind(1).both == "12"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((), {}), ((1, "2", (), 4), {}), ((1,), {"one": 1}), ((1,), {"four": 4}), ((), {"two": ""})],
)
def test_a_wrong_call_is_a_type_error(
    arguments: tuple[typing.Any, ...], named: dict[str, typing.Any]
) -> None:
    for kind in (Original, Own):
        with pytest.raises(TypeError):
            kind(*arguments, **named)


def test_a_field_that_is_not_there_cannot_be_replaced() -> None:
    with pytest.raises(ValueError, match="four"):
        Own(1)._replace(two="", four=4)  # type: ignore[call-arg]


def test_nobody_writes_into_them() -> None:
    made = Own(1)
    with pytest.raises(AttributeError):
        made.one = 2  # type: ignore[misc]
