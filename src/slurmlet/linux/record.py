"""Immutable records with named fields, for modules that are loaded before a pod's first container runs.

`typing.NamedTuple` is the same thing, and is what type checkers see here. Loading `typing` and having Python compile
the methods of twenty such classes takes 7 ms, and every pod waits for that. Where nobody waits, use NamedTuple.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple as Record
else:
    from operator import itemgetter

    class Record(tuple):
        """A subclass names its fields by annotations; defaults follow fields without."""

        __slots__ = ()
        _fields = ()
        _field_defaults = {}  # noqa: RUF012 - as NamedTuple calls it; never written to

        def __init_subclass__(cls):
            fields = tuple(getattr(cls, "__annotations__", ()))
            if fields and fields != cls._fields:
                cls._fields = fields
                cls._field_defaults = {name: cls.__dict__[name] for name in fields if name in cls.__dict__}
                for place, name in enumerate(fields):
                    setattr(cls, name, property(itemgetter(place)))

        def __new__(cls, *values, **named):
            if named or len(values) != len(cls._fields):
                values = cls._complete(values, named)
            return tuple.__new__(cls, values)

        @classmethod
        def _complete(cls, values, named):
            missing = cls._fields[len(values) :]
            known = {**cls._field_defaults, **named}
            if len(values) > len(cls._fields) or not named.keys() <= set(missing) <= known.keys():
                raise TypeError(f"{cls.__name__}{cls._fields} made of {values!r} and {named!r}")
            return (*values, *(known[name] for name in missing))

        @classmethod
        def _make(cls, values):
            return cls(*values)

        def _replace(self, **named):
            changed = [named.pop(name, value) for name, value in zip(self._fields, self)]
            if named:
                raise ValueError(f"{type(self).__name__} has no {sorted(named)}")
            return type(self)(*changed)

        def _asdict(self):
            return dict(zip(self._fields, self))

        def __repr__(self):
            said = ", ".join(f"{name}={value!r}" for name, value in zip(self._fields, self))
            return f"{type(self).__name__}({said})"

        def __getnewargs__(self):
            return tuple(self)


__all__ = ["Record"]
