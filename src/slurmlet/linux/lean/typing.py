"""Python's `typing`: names that may be followed by brackets, and tuples with names for which no code is compiled."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import (
        IO,
        Any,
        Callable,
        Deque,
        Dict,
        FrozenSet,
        Iterable,
        Iterator,
        List,
        Mapping,
        NamedTuple,
        Optional,
        Protocol,
        Sequence,
        Set,
        Tuple,
        Type,
        Union,
    )
else:
    # What `collections` makes its own named tuples of.
    from _collections import _tuplegetter

    class _Hint:
        def __getitem__(self, _parameters):
            return self

    IO = Any = Callable = Deque = Dict = FrozenSet = Iterable = Iterator = List = _Hint()
    Mapping = Optional = Sequence = Set = Tuple = Type = Union = _Hint()

    class Protocol:
        pass

    class _Naming(type):
        """Gives a class of tuples a name for each place, from its annotations."""

        def __new__(cls, name, bases, body):
            body["__slots__"] = ()
            fields = tuple(body.get("__annotations__", ()))
            if fields:
                defaults = {field: body.pop(field) for field in fields if field in body}
                body.update(_fields=fields, _field_defaults=defaults, _count=len(fields))
                body.update((field, _tuplegetter(place, "")) for place, field in enumerate(fields))
            return super().__new__(cls, name, bases, body)

    class NamedTuple(tuple, metaclass=_Naming):
        def __new__(cls, *values, **named):
            if named or len(values) != cls._count:
                values = cls._complete(values, named)
            return tuple.__new__(cls, values)

        @classmethod
        def _complete(cls, values, named):
            missing = cls._fields[len(values) :]
            known = {**cls._field_defaults, **named}
            if len(values) > cls._count or not named.keys() <= set(missing) <= known.keys():
                raise TypeError(f"{cls.__name__}{cls._fields} made of {values!r} and {named!r}")
            return (*values, *(known[field] for field in missing))

        @classmethod
        def _make(cls, values):
            return cls(*values)

        def _replace(self, **named):
            changed = tuple.__new__(type(self), [*map(named.pop, self._fields, self)])
            if named:
                raise ValueError(f"{type(self).__name__} has no {sorted(named)}")
            return changed

        def _asdict(self):
            return dict(zip(self._fields, self))

        def __repr__(self):
            said = ", ".join(f"{field}={value!r}" for field, value in zip(self._fields, self))
            return f"{type(self).__name__}({said})"

        def __getnewargs__(self):
            return tuple(self)


__all__ = [
    "IO",
    "TYPE_CHECKING",
    "Any",
    "Callable",
    "Deque",
    "Dict",
    "FrozenSet",
    "Iterable",
    "Iterator",
    "List",
    "Mapping",
    "NamedTuple",
    "Optional",
    "Protocol",
    "Sequence",
    "Set",
    "Tuple",
    "Type",
    "Union",
]
