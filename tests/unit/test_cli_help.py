"""Help texts: every command and option has one, in one form, so that people can guess the next."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest

from slurmlet.cli.main import COMMANDS, app

# A command is an imperative. Extend the list with verbs that kubectl or Slurm use.
COMMAND_VERBS = frozenset({
    "Add", "Check", "Download", "Drain", "Inject", "Install", "List", "Load", "Manage", "Measure", "Open",
    "Print", "Pull", "Remove", "Run", "Serve", "Set", "Show", "Start", "Stop",
})  # fmt: skip
# An option is an imperative too, or names the value that it takes.
OPTION_VERBS = frozenset({
    "Admit", "Check", "Clean", "Delete", "Encrypt", "Forward", "Leave", "Print", "Select", "Show", "Skip",
    "Validate", "Wait",
})  # fmt: skip
OPTION_VALUES = frozenset({
    "Address", "Binary", "Connection", "Directory", "Duration", "Format", "Image", "Interface", "Launch", "Manifest",
    "Maximum", "Minimum", "Name", "Names", "Namespace", "Number", "Option", "Options", "Partition",
    "Path", "Port", "RuntimeClass", "SVG", "Time", "Total", "Version",
})  # fmt: skip
UNITS = {
    "time": "in seconds",
    "seconds": "in seconds",
    "timeout": "in seconds",
    "idle": "in seconds",
    "size": "in bytes",
}


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    yield " ".join(("slurmlet", *path)), command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands(found, (*path, name))


ALL = dict(commands(app))
OPTIONS = {
    f"{name} {max(option.opts, key=len)}": option
    for name, command in ALL.items()
    for option in command.params
    if isinstance(option, click.Option)
}


def sentences(text: str) -> str:
    """The prose of a help text: without examples, which click keeps as they are after a \\b."""
    return "\n\n".join(part for part in text.split("\n\n") if not part.lstrip().startswith("\b")).strip()


def test_the_commands_of_every_group_are_found() -> None:
    assert {"slurmlet up", "slurmlet pool size", "slurmlet testbed fault", "slurmlet bench network"} <= set(
        ALL
    )
    assert len(ALL) > len(COMMANDS) + 15


@pytest.mark.parametrize("name", ALL)
def test_the_help_of_a_command_is_an_imperative_sentence(name: str) -> None:
    text = sentences(ALL[name].help or "")
    assert text, "has no help"
    assert text.split()[0] in COMMAND_VERBS, text
    assert text.endswith((".", ":")), text
    assert not re.search(r"\b(my|mine|we|our)\b", text), text


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_the_command_itself_does(name: str) -> None:
    first = (ALL[f"slurmlet {name}"].help or "").split("\n\n")[0]
    assert " ".join(first.split()) == COMMANDS[name]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_help_of_an_option_is_a_verb_or_names_its_value(name: str) -> None:
    option = OPTIONS[name]
    assert option.help, "has no help"
    allowed = OPTION_VERBS if option.is_flag else OPTION_VERBS | OPTION_VALUES
    assert option.help.split()[0] in allowed, option.help
    assert option.help.endswith("."), option.help
    assert "default:" not in option.help, "defaults belong to show_default"


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_takes_a_duration_or_a_size_names_its_unit(name: str) -> None:
    option = OPTIONS[name]
    words = {word for opt in (*option.opts, option.name or "") for word in re.split(r"[-_]", opt) if word}
    measured = isinstance(option.type, click.types.FloatParamType) or option.name == "timeout"
    if option.is_flag or not (measured or words & UNITS.keys()):
        return
    unit = next((UNITS[word] for word in sorted(words) if word in UNITS), "in seconds")
    assert unit in (option.help or ""), option.help


def test_an_option_of_several_commands_reads_the_same_everywhere() -> None:
    for shared in ("--cluster", "--output"):
        texts = {option.help for name, option in OPTIONS.items() if name.endswith(f" {shared}")}
        assert len(texts) == 1, texts


def test_every_default_is_shown() -> None:
    hidden = [
        name
        for name, option in OPTIONS.items()
        if isinstance(option.default, str | int | float | tuple)
        and option.default
        and not option.show_default
        and not option.is_flag
    ]
    assert not hidden
