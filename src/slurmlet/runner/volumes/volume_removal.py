"""Removes a volume's directory, whoever's files are in it: `python -m slurmlet.runner.volumes.volume_removal <directory>`.

Where a user has subordinate ids, containers leave files of other users behind, which only a user namespace with the
same mapping may remove. Started by the hub as a process of its own: it forks, and the
hub has threads.
"""

from __future__ import annotations

import os
import sys
from typing import List, Optional

from slurmlet.runner.host.image_unpack import remove_tree


def main(argv: Optional[List[str]] = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1 or not os.path.isabs(arguments[0]) or os.path.normpath(arguments[0]) == "/":
        print("usage: removing <absolute directory>", file=sys.stderr)
        return 2
    path = arguments[0]
    remove_tree(path)
    if os.path.lexists(path):
        from slurmlet.runner.host import sandbox

        def remove() -> int:
            remove_tree(path)
            return 0

        try:
            sandbox.with_ids(remove)
        except (sandbox.SandboxError, OSError) as error:
            print(f"{path}: files of other users, and {error}", file=sys.stderr)
            return 1
    if os.path.lexists(path):
        print(f"{path}: not all of it could be removed", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
