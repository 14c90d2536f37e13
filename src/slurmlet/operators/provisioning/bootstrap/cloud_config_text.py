"""A cloud-config as text that is a jinja template first and YAML afterwards. Pure.

cloud-init renders the whole text with jinja before it reads YAML. A YAML library quotes and folds strings as it likes and so
breaks the jinja expressions in them: a string with one goes into a literal block, where every character stands for itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from slurmlet.base.errors import UserError

_HEADER = "## template: jinja\n#cloud-config\n"
_JINJA = re.compile(r"\{[{%]")
# What YAML takes for a line break or refuses, and so cannot stand for itself in a block.
_UNFIT = re.compile(
    r"[^\t\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)
_STEP = "  "


def cloud_config_text(document: Mapping[str, Any]) -> str:
    """Of dictionaries, lists, strings, numbers and booleans. Empty parts are left out."""
    return _HEADER + "".join(f"{name}:{_node(value, 0)}" for name, value in document.items() if value)


def without_jinja_comments(text: str) -> str:
    """`${#list}` of a shell would begin a comment of jinja's, mostly one without an end."""
    if "{#" not in text or re.search(r"\{%-?\s*raw", text):
        return text
    return text.replace("{#", "{{ '{#' }}")


def _node(value: Any, depth: int) -> str:
    """What follows `name:` or `-`, with the line's end."""
    margin = _STEP * (depth + 1)
    if isinstance(value, Mapping):
        return "\n" + "".join(
            f"{margin}{name}:{_node(one, depth + 1)}" for name, one in value.items() if one is not None
        )
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "\n" + "".join(f"{margin}-{_node(one, depth + 1)}" for one in value)
    if isinstance(value, bool):
        return f" {'true' if value else 'false'}\n"
    if isinstance(value, int):
        return f" {value}\n"
    return _block(value, margin) if _JINJA.search(value) else f" {_quoted(value)}\n"


def _block(text: str, margin: str) -> str:
    unfit = _UNFIT.search(text)
    if unfit is not None:
        raise UserError(
            f"a text with jinja expressions has the character U+{ord(unfit[0]):04X}, which YAML cannot hold as it is",
            hint="Remove it (for a carriage return: dos2unix), or give the content as base64.",
        )
    # The digit: a first line may begin with spaces of its own.
    body, end = (text[:-1], "+") if text.endswith("\n") else (text, "-")
    return f" |{len(_STEP)}{end}\n" + "".join(f"{margin}{line}\n" for line in body.split("\n"))


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return '"' + _UNFIT.sub(lambda found: f"\\U{ord(found[0]):08x}", escaped) + '"'
