"""The arguments of `slurmlet run`: our own, srun's, and the command after `--`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurmlet.base.errors import UserError

DEFAULT_TIMEOUT_S = 120.0
# srun's options that stand alone (or carry their value behind "="): a bare word after one of them is no value of it.
_ALONE = frozenset({
    "contiguous", "disable-status", "exact", "exclusive", "hold", "immediate", "kill-on-bad-exit", "label", "multi-prog",
    "nice", "no-allocate", "no-kill", "overcommit", "overlap", "oversubscribe", "preserve-env", "propagate", "pty", "quiet",
    "reboot", "share", "spread-job", "stepmgr", "unbuffered", "use-min-nodes", "verbose", "whole", "x11",
})  # fmt: skip
_SHORT_WITH_VALUE = frozenset("AaBCcDdeFGgiJjLMmNnoPpqRrSTtWwx")


@dataclass(frozen=True)
class Request:
    """The parsed arguments."""

    command: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    manifests: tuple[str, ...] = ()
    wait: bool = False
    images: tuple[str, ...] = ()
    keep_logs: str = ""
    verbose: bool = False
    timeout_s: float = DEFAULT_TIMEOUT_S
    encrypt: bool = False

    def inner_words(self) -> list[str]:
        """The same request for the processes inside the job, which need no options of srun's."""
        words = [f"--manifest={one}" for one in self.manifests] + [f"--image={one}" for one in self.images]
        words += ["--wait"] * self.wait + ["--verbose"] * self.verbose + ["--encrypt"] * self.encrypt
        words += [f"--keep-logs={self.keep_logs}"] if self.keep_logs else []
        return [*words, f"--timeout={self.timeout_s:g}", "--", *self.command]


def parse(words: Sequence[str]) -> Request:
    """Raises UserError for what cannot be meant."""
    ours, srun, command = _split(words)
    try:
        timeout_s = float(ours["timeout"][-1]) if ours["timeout"] else DEFAULT_TIMEOUT_S
    except ValueError as error:
        raise UserError(f"--timeout {ours['timeout'][-1]} is not a number of seconds") from error
    if ours["wait"] and not ours["manifest"]:
        raise UserError(
            "--wait needs --manifest FILE",
            hint="Add --manifest FILE, or leave out --wait: a command is always waited for.",
        )
    if ours["manifest"] and command and ours["wait"]:
        raise UserError(
            "--wait cannot be combined with a command",
            hint="Wait in the command (kubectl wait), or leave out --wait.",
        )
    return Request(
        command=tuple(command),
        srun=tuple(srun),
        manifests=tuple(ours["manifest"]),
        wait=bool(ours["wait"]),
        images=tuple(ours["image"]),
        keep_logs=ours["keep-logs"][-1] if ours["keep-logs"] else "",
        verbose=bool(ours["verbose"]),
        timeout_s=timeout_s,
        encrypt=bool(ours["encrypt"]),
    )


_WITH_VALUE = ("manifest", "image", "keep-logs", "timeout")
_FLAGS = {"--wait": "wait", "--encrypt": "encrypt", "--verbose": "verbose", "-v": "verbose"}


def _split(words: Sequence[str]) -> tuple[dict[str, list[str]], list[str], list[str]]:
    """(ours by name, srun's, the command)."""
    ours: dict[str, list[str]] = {name: [] for name in (*_WITH_VALUE, *_FLAGS.values())}
    srun: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            break
        name, has_value, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in _WITH_VALUE:
            if not has_value and not left:
                raise UserError(f"--{name} needs a value")
            ours[name].append(value if has_value else left.pop(0))
        elif word in _FLAGS:
            ours[_FLAGS[word]].append(word)
        else:
            if not word.startswith("-") and not _takes_value(srun[-1] if srun else ""):
                raise UserError(
                    f"{word!r} is neither an option nor the value of one",
                    hint="Put -- before the command: slurmlet run -N2 -- kubectl get nodes",
                )
            srun.append(word)
    return ours, srun, left


def _takes_value(option: str) -> bool:
    """Whether the word after this one is its value."""
    if option.startswith("--"):
        return "=" not in option and option[2:] not in _ALONE
    return len(option) == 2 and option[0] == "-" and option[1] in _SHORT_WITH_VALUE
