"""Translate a script of OpenRLHF commands to a validated profile, and report the outcome of every flag."""

import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from pipelines.flows.profile import PipelineConfig, parse
from pipelines.flows.profile_text import toml_literal
from rlhf_contrib.openrlhf.draft import Draft, Fate, Outcome, Sheet, SheetSource
from rlhf_contrib.openrlhf.flags import COMMANDS, IGNORED, MISSING, OTHER_COMMANDS, read_arguments
from rlhf_contrib.openrlhf.offline_rules import (
    distillation,
    kto,
    translate_dpo,
    translate_process_reward_model,
    translate_reward_model,
    translate_sft,
)
from rlhf_contrib.openrlhf.policy_rules import trackers
from rlhf_contrib.openrlhf.rollout_rules import (
    combine,
    sections,
    translate_generate,
    translate_ppo,
    translate_score,
    translate_serve,
)
from rlhf_contrib.openrlhf.shell import Script, read_commands
from rlhf_core.errors import ConfigError

# ---------------------------------------------------------------- toml

_SOURCES = "prepare_data.data"


def render(draft: Draft, *, name: str) -> str:
    """The profile as TOML, with tables in the order of a pipeline."""
    tables: dict[str, list[str]] = {"": [f"name = {toml_literal(name)}"]}
    for key, value in draft.values.items():
        table, _, last = key.rpartition(".")
        comment = f"  # {_one_line(value.comment)}" if value.comment else ""
        tables.setdefault(table, []).append(f"{last} = {toml_literal(value.value)}{comment}")
    if draft.sources:
        tables.setdefault(_SOURCES, []).insert(0, 'type = "files"')
    blocks = []
    for table in sorted(tables, key=_order):
        blocks.append("\n".join([f"[{table}]"] * bool(table) + tables[table]))
        if table == _SOURCES:
            blocks += [_source(source) for source in draft.sources]
    return "\n\n".join(blocks) + "\n"


def _order(table: str) -> tuple[int, str]:
    """Sort key of a table: nested tables follow their parent."""
    sections = ["", *PipelineConfig.model_fields]
    return sections.index(table.partition(".")[0]), table


def _source(source: SheetSource) -> str:
    share = int(100 / len(source.uses)) / 100
    fields = {key: value for key, value in source.fields.items() if value != {}}
    fields["use"] = dict.fromkeys(source.uses, share)
    comments = {"path": source.comment, "revision": "to be set: the commit of the data set"}
    lines = [
        f"{key} = {toml_literal(value)}" + (f"  # {_one_line(comments[key])}" if key in comments else "")
        for key, value in fields.items()
    ]
    return "\n".join([f"[[{_SOURCES}.sources]]", *lines])


def _one_line(text: str) -> str:
    """`text` in a form that a TOML comment allows: without line ends and control characters."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))


# ---------------------------------------------------------------- translate

_RULES: dict[str, Callable[[Sheet, str], None]] = {
    "sft": translate_sft,
    "rm": translate_reward_model,
    "dpo": translate_dpo,
    "kto": kto,
    "prm": translate_process_reward_model,
    "kd": distillation,
    "ppo": translate_ppo,
    "serve": translate_serve,
    "combine": combine,
}
_NO_FLAG = "OpenRLHF's {module} has no such flag"
_ROUNDS = "TRAINING_ITERS"
"""Loop limit variable in OpenRLHF's own script of iterative DPO."""


@dataclass(frozen=True)
class Translation:
    """A profile that `load_profile` accepts, and the report on the script."""

    profile: str
    """The profile as TOML; empty if no command of the script needs one, such as serve_rm."""
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...]
    """Notes that the user must read or act on before the first run."""
    template: str
    """Content of the chat template's file; empty if the profile needs none."""


def translate(script: str, *, name: str, template_file: str, lenient: bool = False) -> Translation:
    """Translate a script to a profile and the outcome of each of its flags.

    Raises ConfigError for a script without a translatable command, for an unknown flag (unless `lenient`), and for
    settings that no profile may have. Errors, outcomes and notes never contain the script's secrets.
    """
    read = read_commands(script)
    hidden = read.hidden
    try:
        made = _translated(read, name=name, template_file=template_file, lenient=lenient)
    except ConfigError as error:
        raise ConfigError(hidden(str(error))) from None
    outcomes = [replace(one, text=hidden(one.text), what=[*map(hidden, one.what)]) for one in made.outcomes]
    return replace(made, outcomes=tuple(outcomes), notes=tuple(map(hidden, made.notes)))


def _translated(script: Script, *, name: str, template_file: str, lenient: bool) -> Translation:
    commands, variables, notes, _ = script
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
    trained: dict[str, str] = {}
    for arguments, section in zip(read, sections(read), strict=True):
        one = Sheet(arguments, draft)
        if arguments.command not in ("infer", "serve", "combine"):
            if section in trained:
                both = f"{trained[section]} and {arguments.module} both make [{section}]"
                draft.note(f"{both}, whose rows and settings are mixed here: import each command on its own")
            trained[section] = arguments.module
        _translate(one, section)
        one.close()
        if one.has("save_path"):
            made = "dpo" if arguments.command == "kto" else section
            draft.made[one.arguments.given["save_path"].text] = made
        _unread(one)
    if "iterative_dpo.dpo.loss.type" in draft.values and variables.get(_ROUNDS, "").isdecimal():
        one.put("iterative_dpo.rounds", int(variables[_ROUNDS]), note=f"{_ROUNDS} of the script")
    profile = render(draft, name=name) if draft.values else ""
    try:
        if profile:
            parse(tomllib.loads(profile), origin="the translated profile")
    except ConfigError as error:
        raise _of_the_script(error, draft) from None
    return Translation(profile, tuple(draft.outcomes), tuple(draft.notes), draft.template)


def _translate(one: Sheet, section: str) -> None:
    """Apply the rules of a command, then the tables of flags that need no rule."""
    command = one.arguments.command
    if command == "infer":
        scores = one.text("eval_task") == "rm"
        (translate_score if scores else translate_generate)(one, section)
    else:
        _RULES[command](one, section)
    trackers(one)
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
    """Record words that are not flags of the command, and flags that a later one overrides."""
    for given in one.arguments.repeated:
        one.extra(given, "ignored", "is given more than once, and the last one counts")
    for given in one.arguments.unknown:
        open_value = given.flag.startswith("$")
        what = "the script gives it no value; flags in it are not read" if open_value else _NO_FLAG
        one.extra(given, "not translatable", what.format(module=one.arguments.module))


def _of_the_script(error: ConfigError, draft: Draft) -> ConfigError:
    """Rewrite an error in the profile to name the script's flag, or the default, that its key was set from."""
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


# ---------------------------------------------------------------- report

_LISTS: tuple[tuple[Fate, str, str], ...] = (
    ("translated", "Translated", "into"),
    ("ignored", "Does not matter here", "because"),
    ("not translatable", "Not translatable", "why, and what comes nearest"),
)


def report(translation: Translation) -> Iterator[RenderableType]:
    """Yield a table for each list that has a flag, and the notes."""
    for fate, title, heading in _LISTS:
        rows = [outcome for outcome in translation.outcomes if outcome.fate == fate]
        if not rows:
            continue
        table = Table(title=f"{title} ({len(rows)})", title_justify="left", show_edge=False, pad_edge=False)
        for column in ("command", "flag", heading):
            table.add_column(column, overflow="fold")
        for row in rows:
            # Text, because a value such as [ppo] would be read as markup.
            cells = (row.command, f"{row.flag} {row.text}".strip(), "; ".join(row.what))
            table.add_row(*(Text(cell) for cell in cells))
        yield table
        yield Text("")
    for note in translation.notes:
        yield Text(f"to do: {note}")


# ---------------------------------------------------------------- the verb

STDIN = "-"
REPORT_WIDTH = 160  # columns of a report that is written to a file: keys and flags stay on one line


def import_script(script: str, *, out: str, lenient: bool, console: Console) -> Translation:
    """Write the profile of `script` to the file `out` and the report to `console`.

    Without `out`, the profile is written to standard output and the report to standard error. Raises ConfigError if the
    script does not exist or parts of it cannot be read, or if `out` already exists.
    """
    target = Path(out).expanduser() if out else Path("openrlhf.toml")
    template = target.with_suffix(".jinja")
    if out:
        _refuse_to_overwrite(target)
    name = target.stem if out or script == STDIN else Path(script).stem
    translation = translate(_read(script), name=name, template_file=str(template), lenient=lenient)
    if out and translation.profile:
        if translation.template:
            _refuse_to_overwrite(template)
            template.write_text(translation.template, encoding="utf-8")
        target.write_text(translation.profile, encoding="utf-8")
    elif not out:
        sys.stdout.write(translation.profile)
        console = Console(stderr=True) if sys.stderr.isatty() else Console(stderr=True, width=REPORT_WIDTH)
    for part in report(translation):
        console.print(part, highlight=False)
    if translation.template and not out:
        console.print(f"to do: write this into {template} (--out does it):\n{translation.template}", markup=False)
    if not translation.profile:
        console.print("no profile is needed for these commands", highlight=False)
    elif out:
        written = f"{target} and {template}" if translation.template else str(target)
        console.print(f"wrote {written}: `rlhf plan {target}` shows its stages", highlight=False, soft_wrap=True)
    return translation


def _read(script: str) -> str:
    try:
        if script == STDIN:
            return sys.stdin.read()
        path = Path(script).expanduser()
        if not path.is_file():
            raise ConfigError("script", script, "is not a file", "check the path, or give - for standard input")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("script", script, f"cannot be read ({error})", "give a text in UTF-8") from error


def _refuse_to_overwrite(path: Path) -> None:
    if path.exists():
        raise ConfigError("--out", str(path), "is there already", "move it, or name another file")
