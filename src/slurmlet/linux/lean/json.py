"""Python's `json`: bytes and text in, compact text out, by its own scanner and encoder in C."""

from __future__ import annotations

from slurmlet.linux.lean.typing import IO, Any, Callable, Iterable, Tuple, Union

_BLANK = " \t\n\r"


class _Scanning:
    """What the scanner asks of a decoder."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float, parse_int = float, int

    @staticmethod
    def parse_constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")


def _refuse(value: Any) -> Any:
    raise TypeError(f"a {type(value).__name__} cannot be told in JSON")


def loads(said: Union[str, bytes, bytearray]) -> Any:
    """Raises ValueError."""
    text = (said if isinstance(said, str) else said.decode()).strip(_BLANK)
    try:
        value, end = _scan(text, 0)
    except StopIteration as error:
        raise ValueError(f"no JSON at character {error.value}") from None
    if end != len(text):
        raise ValueError(f"more than JSON at character {end}")
    return value


def load(file: IO[Any]) -> Any:
    return loads(file.read())


def dumps(value: Any) -> str:
    return "".join(_encode(value, 0))


def dump(value: Any, file: IO[str]) -> None:
    file.write(dumps(value))


_scan: Callable[[str, int], Tuple[Any, int]]
_encode: Callable[[Any, int], Iterable[str]]
try:
    from _json import encode_basestring_ascii, make_encoder, make_scanner

    _scan = make_scanner(_Scanning)  # type: ignore[arg-type] # any object with these attributes
    _encode = make_encoder(None, _refuse, encode_basestring_ascii, None, ":", ",", False, False, True)
except (ImportError, TypeError):
    # A Python that was built without them.
    from json import JSONDecoder, JSONEncoder

    _scan = JSONDecoder().scan_once  # type: ignore[attr-defined]
    _encode = JSONEncoder(separators=(",", ":")).iterencode  # type: ignore[assignment]
