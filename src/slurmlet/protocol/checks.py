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

# Raises ProtocolError; the text says where in the message the value is.
Check = Callable[[Any, str], None]

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
    checker(PodReport)(value, "report")
    return cast("PodReport", value)


def checked(message: messages.AnyMessage, type_: Any) -> Any:
    checker(type_)(message, str(message.get("type")))
    return message


def _one_of(message: messages.AnyMessage, types: Tuple[Any, ...]) -> Any:
    type_ = _by_tag(types).get(str(message["type"]))
    return None if type_ is None else checked(message, type_)


@functools.cache
def _by_tag(types: Tuple[Any, ...]) -> Mapping[str, Any]:
    return {get_args(get_type_hints(type_)["type"])[0]: type_ for type_ in types}


@functools.cache
def checker(type_: Any) -> Check:
    if type_ is Any:
        return lambda _value, _where: None
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
    # JSON has one kind of number, and True is an int to Python alone.
    allowed = (int, float) if class_ is float else (class_,)

    def check(value: Any, where: str) -> None:
        if not isinstance(value, allowed) or (isinstance(value, bool) and class_ is not bool):
            raise ProtocolError(f"{where} is {_shown(value)}, not {class_.__name__}")

    return check


def _of_values(values: Tuple[Any, ...]) -> Check:
    def check(value: Any, where: str) -> None:
        if value not in values:
            raise ProtocolError(f"{where} is {_shown(value)}, not {' or '.join(map(repr, values))}")

    return check


def _of_union(types: Tuple[Any, ...]) -> Check:
    """Null or one type: messages to the hub hold no other union."""
    (inner,) = [checker(each) for each in types if each is not type(None)]

    def check(value: Any, where: str) -> None:
        if value is not None:
            inner(value, where)

    return check


def _of_list(inner: Check) -> Check:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, list):
            raise ProtocolError(f"{where} is {_shown(value)}, not a list")
        for each in value:
            inner(each, where)

    return check


def _of_places(inner: List[Check]) -> Check:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, list) or len(value) != len(inner):
            raise ProtocolError(f"{where} is {_shown(value)}, not a list of {len(inner)}")
        for place, each in zip(inner, value):
            place(each, where)

    return check


def _of_entries(inner: Check) -> Check:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise ProtocolError(f"{where} is {_shown(value)}, not an object")
        for name, each in value.items():
            inner(each, f"{where}.{name}")

    return check


def _of_fields(type_: Any) -> Check:
    fields: Dict[str, Check] = {name: checker(hint) for name, hint in get_type_hints(type_).items()}
    required = frozenset(type_.__required_keys__)

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise ProtocolError(f"{where} is {_shown(value)}, not an object")
        if not required <= value.keys():
            raise ProtocolError(f"{where} has no {', '.join(sorted(required - value.keys()))}")
        for name, inner in fields.items():
            if name in value:
                inner(value[name], f"{where}.{name}")

    return check


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
