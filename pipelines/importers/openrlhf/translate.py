"""Translate a script of OpenRLHF commands to a validated profile, with the outcome of every flag."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass

from pipelines.flows.profile import parse
from pipelines.importers.openrlhf.arguments import read_arguments
from pipelines.importers.openrlhf.draft import Draft, Outcome, Sheet
from pipelines.importers.openrlhf.flags import COMMANDS, OTHER_COMMANDS
from pipelines.importers.openrlhf.offline_rules import distillation, dpo, kto, process_reward_model, reward_model, sft
from pipelines.importers.openrlhf.rollout_rules import ppo
from pipelines.importers.openrlhf.sampling_rules import combine, generate, score, sections, serve
from pipelines.importers.openrlhf.shell import read_commands
from pipelines.importers.openrlhf.toml import render
from pipelines.importers.openrlhf.treatments import IGNORED, MISSING
from rlhf_core.errors import ConfigError

_RULES: dict[str, Callable[[Sheet, str], None]] = {
    "sft": sft,
    "rm": reward_model,
    "dpo": dpo,
    "kto": kto,
    "prm": process_reward_model,
    "kd": distillation,
    "ppo": ppo,
    "serve": serve,
    "combine": combine,
}
_NO_FLAG = "OpenRLHF's {module} has no such flag"
_ROUNDS = "TRAINING_ITERS"
"""Loop limit variable in OpenRLHF's own script of iterative DPO."""


@dataclass(frozen=True)
class Translation:
    """A profile that `load_profile` accepts, and the report on the script."""

    profile: str
    """The profile; empty if the script has only commands that need none, such as serve_rm."""
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...]
    """Notes that the user must read or act on before the first run."""
    template: str
    """Content of the chat template's file, empty if the profile needs none."""


def translate(script: str, *, name: str, template_file: str, lenient: bool = False) -> Translation:
    """Return the profile of a script and the outcome of each of its flags.

    Raises ConfigError for a script without a command that is translated, an unknown flag (unless `lenient`), and
    settings that no profile may have.
    """
    commands, variables, notes = read_commands(script)
    draft = Draft(template_file=template_file, notes=notes)
    for command in commands:
        if command.module not in COMMANDS:
            instead = OTHER_COMMANDS.get(command.module, "there is no equivalent")
            draft.note(f"{command.module} is not read: {instead}")
    read = [read_arguments(command, lenient=lenient) for command in commands if command.module in COMMANDS]
    if not read:
        others = {command.module for command in commands}
        seen = [
            note
            for note in draft.notes
            if "openrlhf.cli" in note or "what it sets" in note or note.split()[0] in others
        ]
        found = "; ".join(seen) or "no call of openrlhf.cli was found"
        raise ConfigError(f"script: {found}; known are {', '.join(COMMANDS)}")
    for arguments, section in zip(read, sections(read), strict=True):
        one = Sheet(arguments, draft)
        _translate(one, section)
        one.close()
        if one.has("save_path"):
            made = "dpo" if arguments.command == "kto" else section
            draft.made[one.arguments.given["save_path"].text] = made
        _unread(one)
    if "iterative_dpo.dpo.loss.type" in draft.values and variables.get(_ROUNDS, "").isdigit():
        one.put("iterative_dpo.rounds", int(variables[_ROUNDS]), note=f"{_ROUNDS} of the script")
    profile = render(draft, name=name) if draft.values else ""
    try:
        if profile:
            parse(tomllib.loads(profile), origin="the translated profile")
    except ConfigError as error:
        raise _of_the_script(error, draft) from None
    return Translation(profile, tuple(draft.outcomes), tuple(draft.notes), draft.template)


def _translate(one: Sheet, section: str) -> None:
    """Apply the rules of a command, then the tables of flags that need none."""
    command = one.arguments.command
    if command == "infer":
        scores = one.text("eval_task") == "rm"
        (score if scores else generate)(one, section)
    else:
        _RULES[command](one, section)
    for name in one.arguments.given:
        if name in IGNORED:
            one.ignore(name, IGNORED[name])
        if name in MISSING:
            missing = MISSING[name]
            if missing.off and _is(one.text(name), missing.off):
                one.ignore(name, f"{missing.off} switches it off")
            else:
                one.refuse(name, missing.reason, missing.nearest)


def _unread(one: Sheet) -> None:
    """Record words that are no flag of the command, and flags that a later one replaces."""
    for given in one.arguments.repeated:
        one.extra(given, "ignored", "is given more than once, and the last one counts")
    for given in one.arguments.unknown:
        open_value = given.flag.startswith("$")
        what = "the script gives it no value; flags in it are not read" if open_value else _NO_FLAG
        one.extra(given, "not translatable", what.format(module=one.arguments.module))


def _of_the_script(error: ConfigError, draft: Draft) -> ConfigError:
    """Return an error in the profile with the flag of the script, or the default, from which its key has its value."""
    message = str(error)
    keys = [key for key in draft.values if message.startswith((f"{key} ", f"{key}.", f"{key}:"))]
    if not keys:
        return error
    rule, of_profile, _ = message.partition("; change it in the translated profile")
    remedy = "; change it in the script" if of_profile else ""
    return ConfigError(f"{draft.values[max(keys, key=len)].comment}: {rule}{remedy}")


def _is(text: str, off: str) -> bool:
    try:
        return float(text) == float(off)
    except ValueError:
        return text == off
