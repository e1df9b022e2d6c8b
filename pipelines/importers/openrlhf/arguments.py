"""Parse the words of one OpenRLHF command into flags with values, using the table of flags."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipelines.importers.openrlhf.flags import COMMANDS, DEFAULTS, FLAGS, Flag
from pipelines.importers.openrlhf.shell import Command
from rlhf_core.errors import ConfigError, explain

SYNTAX = {"--module", "-m", "--"}
"""Words of a launcher that only precede the command."""
LAUNCHER_SWITCHES = {*SYNTAX, "--no_local_rank", "--standalone", "--no-wait", "--verbose", "--overlap", "--exclusive"}


class Given(NamedTuple):
    """One flag as written in the script, with its words."""

    flag: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        """Return the value as written; empty for a switch."""
        return " ".join(self.words)


@dataclass(frozen=True)
class Arguments:
    """The flags of one command: by name as OpenRLHF reads them, the unknown ones, and those that are repeated later."""

    module: str
    command: str
    given: dict[str, Given]
    repeated: tuple[Given, ...]
    unknown: tuple[Given, ...]
    launcher: tuple[Given, ...]

    @property
    def dotted(self) -> bool:
        """Return whether the command uses the dotted flags of 0.10.2 and later."""
        return any("." in given.flag for given in self.given.values())

    def default(self, name: str) -> str | None:
        """Return OpenRLHF's default, None if the flag has none that a profile needs."""
        for group in ("ppo dotted" if self.dotted and self.command == "ppo" else "", self.command, "all"):
            if group in DEFAULTS and name in DEFAULTS[group]:
                return DEFAULTS[group][name]
        return None

    def spelling(self, name: str) -> str:
        """Return the flag as the script spells it, or else as the command's version does."""
        if name in self.given:
            return self.given[name].flag
        others = [other for flag in FLAGS if flag.name == name for other in flag.others.split() if "." in other]
        own = [other for other in others if not other.startswith("actor.") or self.command == "ppo"]
        return f"--{own[-1] if self.dotted and own else name}"


def read_arguments(command: Command, *, lenient: bool) -> Arguments:
    """Return the flags of a command; raise ConfigError for words that OpenRLHF would refuse, unless `lenient`."""
    name = COMMANDS[command.module]
    known = {spelt: flag for flag in FLAGS if name in flag.commands.split() for spelt in _spellings(flag)}
    given: dict[str, Given] = {}
    repeated, unknown = [], []
    for found in _split(command.words, known):
        if found.flag in known:
            flag = known[found.flag]
            found, surplus = _without_unknown_values(flag, found)
            unknown += surplus
            _check_words(flag, found)
            repeated += [given.pop(flag.name)] if flag.name in given else []
            given[flag.name] = found
        elif lenient or found.flag.startswith("$"):
            unknown.append(found)
        else:
            rule = f"OpenRLHF's {command.module} has no such flag"
            raise ConfigError(
                explain(found.flag, found.text, rule, f"{_remedy(found.flag, list(known))}, or --lenient")
            )
    launcher = tuple(_split(command.launcher, {}))
    return Arguments(command.module, name, given, tuple(repeated), tuple(unknown), launcher)


def _spellings(flag: Flag) -> list[str]:
    return [f"--{spelt}" for spelt in (flag.name, *flag.others.split())]


def _remedy(flag: str, known: list[str]) -> str:
    """Return what to do about a flag that a command does not have: its nearest, or the command that has it."""
    owners = {name for one in FLAGS if flag in _spellings(one) for name in one.commands.split()}
    if modules := [module for module, name in COMMANDS.items() if name in owners]:
        return f"it is one of {', '.join(modules)}: remove it"
    near = difflib.get_close_matches(flag, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else "remove it"


def _without_unknown_values(flag: Flag, given: Given) -> tuple[Given, list[Given]]:
    """Return a flag without words such as `$EXTRA` that it has no use for, since flags may be in them, and those words."""
    room = {"switch": 0, "value": 1, "many": len(given.words)}[flag.kind]
    extra = [word for word in given.words[room:] if word.startswith("$")]
    kept = tuple(word for at, word in enumerate(given.words) if at < room or word not in extra)
    return Given(given.flag, kept), [Given(word, ()) for word in extra]


def _split(words: Sequence[str], known: dict[str, Flag]) -> list[Given]:
    """Return each flag with the words up to the next one. A launcher's flags (not `known`) have at most one word."""
    found: list[Given] = []
    for word in words:
        flag, separator, value = word.partition("=")
        if word in LAUNCHER_SWITCHES and not known:
            found.append(Given(word, ()))
        elif word.startswith("--"):
            found.append(Given(flag, (value,) if separator else ()))
        elif known and not found:
            found.append(Given(word, ()))
        elif found and (known or not (found[-1].words or found[-1].flag in LAUNCHER_SWITCHES)):
            found[-1] = Given(found[-1].flag, (*found[-1].words, word))
    return [one for one in found if known or one.flag not in SYNTAX]


def _check_words(flag: Flag, given: Given) -> None:
    if flag.kind == "switch" and given.words:
        raise ConfigError(explain(given.flag, given.text, "is a switch and takes no value", "remove the value"))
    if flag.kind != "switch" and not given.words:
        raise ConfigError(explain(given.flag, "", "needs a value", "add it"))
    if flag.kind == "value" and len(given.words) > 1:
        raise ConfigError(explain(given.flag, given.text, "takes one value", "quote it, or remove the others"))
