"""Kubernetes quantities ("500m", "1.5Gi", "2e3") as exact numbers."""

from __future__ import annotations

import re
from fractions import Fraction

from slurmlet.base.errors import UserError

_SUFFIXES = {
    "n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "": Fraction(1),
    "k": Fraction(10**3), "M": Fraction(10**6), "G": Fraction(10**9), "T": Fraction(10**12), "P": Fraction(10**15),
    "E": Fraction(10**18), "Ki": Fraction(2**10), "Mi": Fraction(2**20), "Gi": Fraction(2**30), "Ti": Fraction(2**40),
    "Pi": Fraction(2**50), "Ei": Fraction(2**60),
}  # fmt: skip
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([eE][+-]?\d{1,2})|([numkMGTPE]|[KMGTPE]i)?)")


def parse(quantity: object) -> Fraction:
    """The exact value. The API server has checked quantities already; a bad one is a bug or a foreign object."""
    found = _QUANTITY.fullmatch(str(quantity))
    if not found:
        raise UserError(f"{quantity!r} is not a Kubernetes quantity", hint="Examples: 500m, 2, 64Mi, 1.5Gi.")
    number, exponent, suffix = found.groups()
    value = Fraction(number)
    return value * Fraction(10) ** int(exponent[1:]) if exponent else value * _SUFFIXES[suffix or ""]


def ceil(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)


def canonical(value: Fraction, like: object) -> str:
    """The one way Kubernetes writes a value, in binary units (where they fit) or decimal ones, as `like` is written."""
    binary = ("Ei", "Pi", "Ti", "Gi", "Mi", "Ki") if str(like).endswith("i") else ()
    for suffix in (*binary, "E", "P", "T", "G", "M", "k", "", "m", "u", "n"):
        scaled = value / _SUFFIXES[suffix]
        if value and scaled.denominator == 1:
            return f"{scaled.numerator}{suffix}"
    return "0"
