"""docs/protocol.md from the types of `slurmlet.protocol`: `make protocol` writes it, a test compares it."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "slurmlet" / "protocol"
PAGE = ROOT / "docs" / "protocol.md"
MODULES = ("messages", "pod_plan", "pod_report", "network_tables", "cluster_files")
_INTRODUCTION = """# Protocol

What hub, runner, agent, gateway and netd say to each other, and the files that more than one of them reads.
Made from the types in `src/slurmlet/protocol` by `make protocol`; a test compares the two.
Frames, channels and flow control are described in `src/slurmlet/protocol/wire.py`, what the network's tables mean in
[network.md](network.md).

**Version.** Every hello names the version of the protocol, `protocol` (major) and `minor`: {version}. A hub understands
runners, agents and gateways of its own version and of the minor version before it, so that pods keep running over
`pip install -U slurmlet && slurmlet up`. It refuses others, and says so in an event of the pod. Fields and
types that a receiver does not know are ignored. "?" marks a field that may be absent.
"""


def page() -> str:
    wire = (PACKAGE / "wire.py").read_text()
    found = re.search(r"^MAJOR, MINOR = (\d+), (\d+)$", wire, re.MULTILINE)
    assert found is not None
    parts = [_INTRODUCTION.format(version=f"{found[1]}.{found[2]} now")]
    parts += [_section(name, (PACKAGE / f"{name}.py").read_text()) for name in MODULES]
    return "\n".join(parts)


def _section(name: str, source: str) -> str:
    tree, comments = ast.parse(source), _comments(source)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    lines = [f"## {name}.py", "", ast.get_docstring(tree) or "", ""]
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.endswith("Base"):
            lines += _class(node, classes, comments)
        elif isinstance(node, ast.Assign) and not (alias := ast.unparse(node.targets[0])).startswith("_"):
            lines += [f"**{alias}** = `{_type(node.value)}`", ""]
    return "\n".join(lines)


def _class(node: ast.ClassDef, classes: dict[str, ast.ClassDef], comments: dict[int, str]) -> list[str]:
    rows = _fields(node, classes, comments)
    width = max((len(row[0]) for row in rows), default=0)
    told = [f"{left:<{width}}  {comment}".rstrip() for left, comment in rows]
    return [f"**{node.name}** {ast.get_docstring(node) or ''}".strip(), "```", *told, "```", ""]


def _fields(
    node: ast.ClassDef, classes: dict[str, ast.ClassDef], comments: dict[int, str]
) -> list[tuple[str, str]]:
    """(field and type, comment), of the classes that it is made from too."""
    rows: list[tuple[str, str]] = []
    for base in map(ast.unparse, node.bases):
        rows += _fields(classes[base], classes, comments) if base in classes else []
    mark = "?" if any(keyword.arg == "total" for keyword in node.keywords) else ""
    for item in node.body:
        if isinstance(item, ast.AnnAssign):
            field = f"{ast.unparse(item.target)}{mark}: {_type(item.annotation)}"
            rows.append((field, comments.get(item.lineno, "")))
    return rows


def _comments(source: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}


def _type(node: ast.expr) -> str:
    """A Python annotation in the manner of JSON."""
    if isinstance(node, ast.Constant):
        return json.dumps(node.value)
    if not isinstance(node, ast.Subscript):
        return ast.unparse(node)
    inner = [_type(each) for each in getattr(node.slice, "elts", [node.slice])]
    return {
        "Optional": lambda: f"{inner[0]} | null",
        "Union": lambda: " | ".join(inner),
        "Literal": lambda: " | ".join(inner),
        "List": lambda: f"[{inner[0]}, …]",
        "Tuple": lambda: f"[{', '.join(inner)}]",
        "Dict": lambda: f"{{name: {inner[-1]}}}",
    }[ast.unparse(node.value)]()


if __name__ == "__main__":
    PAGE.write_text(page())
