"""Layers into one tar of the final tree: the store's `rootfs.tar`. The only place that does it.

Two passes over the layers: the first reads headers (and checks every byte against the diff ids) to learn the final
tree, the second copies just the content that survives. Directories come first, symbolic links last, so that whoever
unpacks the result can never be led through a link. See docs/decisions/0008.
"""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path

from slurmlet.images.archives import Layer
from slurmlet.images.bundles import Bundle, check_space
from slurmlet.images.layer_trees import EntryKey, Node, Tree
from slurmlet.images.layers import entries, layer_entries

_BLOCK_BYTES = 512
_XATTR = "SCHILY.xattr."


def flatten(bundle: Bundle, layers: Sequence[Layer], target: Path, *, scratch: Path) -> int:
    """Write the tree to `target` and return its size. Raises BadImage (damaged, hostile) or UserError (no room)."""
    tree = Tree()
    for number, layer in enumerate(layers):
        with layer_entries(bundle, layer, scratch) as archive:
            tree.add_layer(number, entries(archive))
    directories, links, contents = _sorted_out(tree)
    check_space(target.parent, _expected_bytes(tree, contents), bundle.label)
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as output:
        for path, node in directories:
            output.addfile(_directory_header(path, node))
        for number, layer in enumerate(layers):
            with layer_entries(bundle, layer, scratch) as archive:
                _copy_layer(archive, number, contents, output)
        for path, node in links:
            assert node.inode.header is not None
            output.addfile(_header(path, node.inode.header, kind=tarfile.SYMTYPE))
    return target.stat().st_size


def _sorted_out(
    tree: Tree,
) -> tuple[list[tuple[str, Node]], list[tuple[str, Node]], dict[EntryKey, list[str]]]:
    """Directories, symbolic links, and for everything with content all its names."""
    directories: list[tuple[str, Node]] = []
    links: list[tuple[str, Node]] = []
    contents: dict[EntryKey, list[str]] = {}
    if tree.root.inode.header is not None:
        directories.append((".", tree.root))
    for path, node in tree.walk():
        header = node.inode.header
        if node.children is not None:
            directories.append((path, node))
        elif header is not None and header.issym():
            links.append((path, node))
        elif header is not None and (header.isreg() or header.isfifo()):
            contents.setdefault(node.inode.key, []).append(path)
    return directories, links, contents


def _expected_bytes(tree: Tree, contents: dict[EntryKey, list[str]]) -> int:
    """From above: content, and three blocks for each name (header, extended header, padding)."""
    total = 0
    for _, node in tree.walk():
        header = node.inode.header
        total += 3 * _BLOCK_BYTES
        if header is not None and header.isreg():
            total += header.size // len(contents[node.inode.key])
    return total


def _copy_layer(
    archive: tarfile.TarFile, number: int, contents: dict[EntryKey, list[str]], output: tarfile.TarFile
) -> None:
    for index, header in entries(archive):
        names = contents.get((number, index))
        if names is None:
            continue
        if header.isfifo():
            output.addfile(_header(names[0], header, kind=tarfile.FIFOTYPE))
        else:
            output.addfile(_header(names[0], header, kind=tarfile.REGTYPE), archive.extractfile(header))
        for name in names[1:]:
            link = _header(name, header, kind=tarfile.LNKTYPE)
            link.linkname = names[0]
            output.addfile(link)


def _directory_header(path: str, node: Node) -> tarfile.TarInfo:
    if node.inode.header is not None:
        return _header(path, node.inode.header, kind=tarfile.DIRTYPE)
    implied = tarfile.TarInfo(path)
    implied.type, implied.mode = tarfile.DIRTYPE, 0o755
    return implied


def _header(path: str, source: tarfile.TarInfo, *, kind: bytes) -> tarfile.TarInfo:
    """Only what means something in a container: owners by number (the builder's user names do not), no odd records."""
    header = tarfile.TarInfo(path)
    header.type = kind
    header.mode = source.mode & 0o7777
    header.uid, header.gid = source.uid, source.gid
    header.mtime = int(source.mtime)
    if kind == tarfile.REGTYPE:
        header.size = source.size
    if kind == tarfile.SYMTYPE:
        header.linkname = source.linkname
    header.pax_headers = {key: value for key, value in source.pax_headers.items() if key.startswith(_XATTR)}
    return header
