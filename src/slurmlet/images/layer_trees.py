"""What a stack of layers looks like as one file tree. Pure: knows tar headers, no files.

The rules are the OCI image specification's, read as containerd reads them: a whiteout hides what lower layers have,
never what its own layer brings; a parent that is a symbolic link is followed inside the root; a hard link keeps its
content when the name it was made from goes away. Device nodes hide what they cover and are then left out: an
unprivileged node cannot make them, and the container's /dev comes from the runtime.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from slurmlet.images.bundles import BadImage

MAX_ENTRIES = 5_000_000
_MAX_SYMLINK_HOPS = 40
_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_WHITEOUT_META = ".wh..wh."

EntryKey = tuple[int, int]  # layer number, entry number in the layer


@dataclass(frozen=True)
class Inode:
    """A thing with content, however many names it has. `header` is None for directories no layer spells out."""

    key: EntryKey
    header: tarfile.TarInfo | None

    @property
    def link_target(self) -> str | None:
        return self.header.linkname if self.header is not None and self.header.issym() else None


_IMPLIED = Inode((-1, -1), None)


@dataclass
class Node:
    inode: Inode
    children: dict[str, Node] | None = None


@dataclass
class Tree:
    root: Node = field(default_factory=lambda: Node(_IMPLIED, {}))
    entry_count: int = 0

    def add_layer(self, number: int, headers: Iterable[tuple[int, tarfile.TarInfo]]) -> None:
        kept: list[tuple[int, tarfile.TarInfo]] = []
        for entry in headers:
            self.entry_count += 1
            if self.entry_count > MAX_ENTRIES:
                raise BadImage(f"the image has more than {MAX_ENTRIES} files", hint="Is it an image at all?")
            kept.append(entry)
        # All whiteouts first: they speak of the layers below only, wherever in this layer they stand.
        for _, header in kept:
            self._hide(_components(header.name))
        for index, header in kept:
            self._place((number, index), header, _components(header.name))

    def _hide(self, path: list[str]) -> None:
        if not path or not path[-1].startswith(_WHITEOUT):
            return
        parent = self._directory(path[:-1], create=False)
        if parent is None or parent.children is None:
            return
        if path[-1] == _OPAQUE:
            parent.children.clear()
        elif not path[-1].startswith(_WHITEOUT_META):
            parent.children.pop(path[-1].removeprefix(_WHITEOUT), None)

    def _place(self, key: EntryKey, header: tarfile.TarInfo, path: list[str]) -> None:
        inode = Inode(key, header)
        if not path:
            if header.isdir():
                self.root.inode = inode
            return
        if path[-1].startswith(_WHITEOUT):
            return
        parent = self._directory(path[:-1], create=True)
        assert parent is not None
        assert parent.children is not None
        existing = parent.children.get(path[-1])
        if header.isdir():
            if existing is not None and existing.children is not None:
                existing.inode = inode
            else:
                parent.children[path[-1]] = Node(inode, {})
        elif header.islnk():
            parent.children[path[-1]] = Node(self._linked(header))
        else:
            parent.children[path[-1]] = Node(inode)

    def _linked(self, header: tarfile.TarInfo) -> Inode:
        target = _components(header.linkname)
        parent = self._directory(target[:-1], create=False) if target else None
        node = parent.children.get(target[-1]) if parent is not None and parent.children is not None else None
        if node is None or node.children is not None:
            raise BadImage(
                f"{header.name!r} is a hard link to {header.linkname!r}, which is no file of the image",
                hint="The image is damaged; build or save it again.",
            )
        return node.inode

    def _directory(self, path: list[str], *, create: bool) -> Node | None:
        """The directory a path of components leads to, symbolic links followed without ever leaving the root."""
        trail = [self.root]
        rest = list(reversed(path))
        hops = 0
        while rest:
            name = rest.pop()
            if name == "..":
                if len(trail) > 1:
                    trail.pop()
                continue
            here = trail[-1]
            assert here.children is not None
            node = here.children.get(name)
            target = node.inode.link_target if node is not None else None
            if target is not None:
                hops += 1
                if hops > _MAX_SYMLINK_HOPS:
                    raise BadImage(
                        f"too many symbolic links at {'/'.join(path)!r}", hint="The image is damaged."
                    )
                if target.startswith("/"):
                    trail = [self.root]
                rest.extend(part for part in reversed(target.split("/")) if part not in ("", "."))
                continue
            if node is None or node.children is None:
                if not create:
                    return None
                node = here.children[name] = Node(_IMPLIED, {})
            trail.append(node)
        return trail[-1]

    def walk(self) -> Iterator[tuple[str, Node]]:
        """Every node but the root with its path; parents before children, names in order."""
        stack = [("", self.root)]
        while stack:
            path, node = stack.pop()
            if path:
                yield path, node
            for name in sorted(node.children or {}, reverse=True):
                assert node.children is not None
                stack.append((f"{path}/{name}" if path else name, node.children[name]))


def _components(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise BadImage(
            f"the layer's entry {name!r} leads outside the image",
            hint="Do not use this image; it may be an attack.",
        )
    return parts
