"""Who a container runs as: numbers from the plan, or the image's "User" looked up in the image's own files."""

from __future__ import annotations

from slurmlet.linux.record import Record
from slurmlet.linux.safe_open import read_beneath
from slurmlet.runner.host.sandbox import SINGLE, Mapping

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List, Optional, Tuple

    from slurmlet.protocol.pod_plan import PlannedUser


class UnknownUser(Exception):
    """The image names a user that its /etc/passwd does not have."""


class Unmapped(Exception):
    """A uid or gid that the user has none of on this node."""


class User(Record):
    uid: int
    gid: int
    groups: Tuple[int, ...]
    home: str


def resolve(root: str, wanted: PlannedUser) -> User:
    """`wanted` is the plan's user: {uid, gid, groups, name}; `root` is the image's tree."""
    passwd = _rows(root, "etc/passwd", 7)
    name, _, group = str(wanted.get("name") or "").partition(":")
    uid, gid = wanted.get("uid"), wanted.get("gid")
    row = _find(passwd, str(uid)) if uid is not None else _find(passwd, name or "0")
    if uid is None:
        uid = _number(name or "0", row, 2, "user")
    if gid is None and group and wanted.get("uid") is None:
        gid = _number(group, _find(_rows(root, "etc/group", 4), group), 2, "group")
    if gid is None:
        gid = int(row[3]) if row is not None and row[3].isdigit() else 0
    groups = [int(number) for number in wanted.get("groups") or []]
    if row is not None and not wanted.get("strict"):
        groups += _memberships(root, row[0])
    others = tuple(dict.fromkeys(number for number in groups if number != gid))
    return User(int(uid), int(gid), others, row[5] if row is not None and row[5] else "/")


def check_mapped(user: User, mapping: Mapping) -> None:
    """With one uid anybody can be played; with subordinate ids there are just so many. Raises Unmapped."""
    if mapping.kind == SINGLE:
        return
    asked = [("runAsUser", user.uid, mapping.uids), ("runAsGroup", user.gid, mapping.gids)]
    asked += [("supplementalGroups", group, mapping.gids) for group in user.groups]
    for field, number, count in asked:
        if number >= count:
            raise Unmapped(
                f"securityContext.{field}: {number} is beyond the ids you have on this node (0 to {count - 1}); "
                "choose a smaller one, or ask for more subordinate ids (/etc/subuid, /etc/subgid)"
            )


def _rows(root: str, path: str, columns: int) -> List[List[str]]:
    text = read_beneath(root, path).decode("utf-8", "replace")
    rows = [line.split(":") for line in text.splitlines() if not line.startswith("#")]
    return [row for row in rows if len(row) >= columns]


def _find(rows: List[List[str]], key: str) -> Optional[List[str]]:
    """A row by name, or else by number: as a number names a user only where no name is spelled so."""
    by_name = next((row for row in rows if row[0] == key), None)
    return by_name or next((row for row in rows if row[2] == key), None)


def _number(text: str, row: Optional[List[str]], column: int, what: str) -> int:
    if row is not None and row[column].isdigit():
        return int(row[column])
    if text.isdigit():
        return int(text)
    raise UnknownUser(f"unable to find {what} {text}: no matching entries in the image's files")


def _memberships(root: str, name: str) -> List[int]:
    rows = _rows(root, "etc/group", 4)
    return [int(row[2]) for row in rows if name in row[3].split(",") and row[2].isdigit()]
