"""Checks of what came from the other side of the wire against the types, before anybody reads a field of it.

For the hub: a runner is a process on a compute node, and may say anything. What is no message of its direction is refused
with a ProtocolError that names the field. Types and fields that are not known are let through and ignored: a newer peer
may send them. A checker is made once for each type. Runners never load this.
"""

from __future__ import annotations

import functools
from typing import (
    Any,
    Callable,
    Dict,
    List,
    Literal,
    Mapping,
    Optional,
    Tuple,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from slurmlet.protocol import messages, network_tables
from slurmlet.protocol.pod_report import PodReport
from slurmlet.protocol.wire import ProtocolError

# Raises _Wrong, to which everybody on the way up adds where the value is.
Check = Callable[[Any], None]

_NETWORK = (
    network_tables.Attached,
    network_tables.Listeners,
    network_tables.NetworkCounts,
    network_tables.PortsTaken,
)
_OF_RUNNERS = (messages.Report, messages.Bye, messages.Event, messages.Answer, *_NETWORK)


def runner_hello(message: messages.AnyMessage) -> messages.RunnerHello:
    return cast("messages.RunnerHello", checked(message, messages.RunnerHello))


def agent_hello(message: messages.AnyMessage) -> messages.AgentHello:
    return cast("messages.AgentHello", checked(message, messages.AgentHello))


def gateway_hello(message: messages.AnyMessage) -> messages.GatewayHello:
    return cast("messages.GatewayHello", checked(message, messages.GatewayHello))


def from_runner(message: messages.AnyMessage) -> Optional[messages.RunnerToHub]:
    """A message of a runner after its hello; None for a type that this version does not know."""
    return cast("Optional[messages.RunnerToHub]", _one_of(message, _OF_RUNNERS))


def from_gateway(message: messages.AnyMessage) -> Optional[messages.GatewayToHub]:
    return cast("Optional[messages.GatewayToHub]", _one_of(message, _NETWORK))


def from_agent(message: messages.AnyMessage) -> Optional[messages.AgentToHub]:
    return cast("Optional[messages.AgentToHub]", _one_of(message, (messages.PodEnded,)))


def pod_report(value: Any) -> PodReport:
    """report.json, which a runner wrote."""
    return cast("PodReport", _checked(value, PodReport, "report"))


def checked(message: messages.AnyMessage, type_: Any) -> Any:
    return _checked(message, type_, str(message.get("type")))


def _checked(value: Any, type_: Any, name: str) -> Any:
    try:
        checker(type_)(value)
    except _Wrong as wrong:
        raise ProtocolError(f"{'.'.join([name, *reversed(wrong.place)])} {wrong.what}") from None
    return value


class _Wrong(Exception):
    def __init__(self, what: str) -> None:
        self.what = what
        self.place: List[str] = []  # innermost first


def _one_of(message: messages.AnyMessage, types: Tuple[Any, ...]) -> Any:
    type_ = _by_tag(types).get(str(message["type"]))
    return None if type_ is None else checked(message, type_)


@functools.cache
def _by_tag(types: Tuple[Any, ...]) -> Mapping[str, Any]:
    return {get_args(get_type_hints(type_)["type"])[0]: type_ for type_ in types}


@functools.cache
def checker(type_: Any) -> Check:
    if type_ is Any:
        return lambda _value: None
    if hasattr(type_, "__required_keys__"):
        return _of_fields(type_)
    origin, arguments = get_origin(type_), get_args(type_)
    if origin is Union:
        return _of_union(arguments)
    if origin is Literal:
        return _of_values(arguments)
    if origin is list:
        return _of_list(checker(arguments[0]))
    if origin is tuple:
        return _of_places([checker(each) for each in arguments])
    if origin is dict:
        return _of_entries(checker(arguments[1]))
    return _of_class(type_)


def _of_class(class_: Any) -> Check:
    # JSON has one kind of number. Types, not isinstance: True is an int to Python alone.
    allowed = (int, float) if class_ is float else (class_,)

    def check(value: Any) -> None:
        if type(value) not in allowed:
            raise _Wrong(f"is {_shown(value)}, not {class_.__name__}")

    return check


def _of_values(values: Tuple[Any, ...]) -> Check:
    def check(value: Any) -> None:
        if value not in values:
            raise _Wrong(f"is {_shown(value)}, not {' or '.join(map(repr, values))}")

    return check


def _of_union(types: Tuple[Any, ...]) -> Check:
    """Null or one type: messages to the hub hold no other union."""
    (inner,) = [checker(each) for each in types if each is not type(None)]

    def check(value: Any) -> None:
        if value is not None:
            inner(value)

    return check


def _of_list(inner: Check) -> Check:
    def check(value: Any) -> None:
        if type(value) is not list:
            raise _Wrong(f"is {_shown(value)}, not a list")
        for each in value:
            inner(each)

    return check


def _of_places(inner: List[Check]) -> Check:
    def check(value: Any) -> None:
        if type(value) is not list or len(value) != len(inner):
            raise _Wrong(f"is {_shown(value)}, not a list of {len(inner)}")
        for place, each in zip(inner, value):
            place(each)

    return check


def _of_entries(inner: Check) -> Check:
    def check(value: Any) -> None:
        if type(value) is not dict:
            raise _Wrong(f"is {_shown(value)}, not an object")
        name = ""
        try:
            for name, each in value.items():  # noqa: B007 - said below, when it is wrong
                inner(each)
        except _Wrong as wrong:
            wrong.place.append(name)
            raise

    return check


def _of_fields(type_: Any) -> Check:
    fields: Dict[str, Check] = {name: checker(hint) for name, hint in get_type_hints(type_).items()}
    required = frozenset(type_.__required_keys__)

    def check(value: Any) -> None:
        if type(value) is not dict:
            raise _Wrong(f"is {_shown(value)}, not an object")
        if not required <= value.keys():
            raise _Wrong(f"has no {', '.join(sorted(required - value.keys()))}")
        name = ""
        try:
            for name, inner in fields.items():
                if name in value:
                    inner(value[name])
        except _Wrong as wrong:
            wrong.place.append(name)
            raise

    return check


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
