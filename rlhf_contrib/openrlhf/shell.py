"""Find the OpenRLHF commands of a shell script by interpreting its syntax. Nothing is run.

Assignments, arrays, here-documents, functions, `set --`, `eval` and scripts inside `bash -c "..."` take effect.
Conditions are evaluated if the script sets all values in them. Every part that is skipped, or read differently from a
shell, gets a note with its line: undecided choices, loops, `source`, and flags on a separate line, which belong to the
command before a forgotten backslash or before a comment between continued lines.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple

from rlhf_contrib.openrlhf.expansion import COMMANDS, Values, double_test, released, test
from rlhf_contrib.openrlhf.redaction import ScriptSecrets
from rlhf_contrib.openrlhf.syntax import ASSIGNMENT, Block, Branch, Item, Simple, assigned_names, leaves, parse
from rlhf_core.errors import ConfigError
from rlhf_core.secrets.redaction import HIDDEN

_MODULE = re.compile(r"openrlhf[./]cli[./](\w+?)(?:\.py)?$")
_MENTION = re.compile(r"openrlhf[./]cli[./](\w+)")
_INSIDE = re.compile(r"\s" + _MENTION.pattern)
_PRINTERS = {"echo", "printf", "cat", "tee"}
_LOCAL = {"local", "declare", "typeset"}
_NAME = re.compile(r"[A-Za-z_]\w*")
_DECLARERS = {"export", "local", "declare", "typeset", "readonly"}
_TESTS = {"[", "test", "[[", "((", "true", "false", ":"}
_ARGUMENT = re.compile(r"\$(\d|OPTARG)")
_DEEPEST = 20
"""Maximum depth of nested function calls."""
_LOOK, _STEP, _COMMAND = 20, 100, 10_000
"""Units of work for a word that is examined, a command, and an OpenRLHF command, whose flags are translated."""
_OTHERWISE = "the values in the script choose otherwise"


@dataclass(frozen=True, slots=True)
class Command:
    """One call of `openrlhf.cli.<module>`: the words before the module (the launcher's) and the words after it."""

    module: str
    launcher: tuple[str, ...]
    words: tuple[str, ...]


class Script(NamedTuple):
    """The OpenRLHF commands of a script in order, the last value of each variable, and notes on unclear parts."""

    commands: list[Command]
    variables: dict[str, str]
    notes: list[str]
    hidden: Callable[[str], str]
    """Function that removes the script's secrets from a text."""


def read_commands(text: str) -> Script:
    """Read the OpenRLHF commands of a script; raises ConfigError for an unclosed quote or bracket.

    >>> read_commands("M=base; deepspeed --module openrlhf.cli.train_sft --pretrain $M").commands[0].words
    ('--pretrain', 'base')
    """
    if "\0" in text:
        raise ConfigError("script: has a NUL character, which no shell can read; remove it")
    text = text.replace("\r\n", "\n")
    shell = _Shell(ScriptSecrets(text))
    try:
        shell.script(text, 1)
        shell.functions_without_a_call()
    except RecursionError:
        raise ConfigError("script: its blocks are nested too deeply; give the commands alone") from None
    missing = dict.fromkeys(_MENTION.findall(re.sub(r"(?m)^[ \t]*#.*", "", text)))
    found = {command.module for command in shell.commands}
    for module in missing:
        if module not in found:
            shell.note(0, f"openrlhf.cli.{module} is named, but no command of it was found; give that command alone")
    commands = [
        Command(one.module, *(tuple(map(released, words)) for words in (one.launcher, one.words)))
        for one in shell.commands
    ]
    values = {name: released(" ".join(words)) for name, words in shell.values.variables.items()}
    texts = [*(" ".join(one.words) for one in commands), *map("=".join, values.items())]
    shell.secrets.read("\n".join(texts))
    notes = shell.secrets.hide(shell.relevant_notes(), shell.values.spend)
    return Script(commands, values, notes, partial(shell.secrets.without_values, spend=shell.values.spend))


class _Shell:
    """Reads a script in the order in which a shell would run it."""

    def __init__(self, secrets: ScriptSecrets) -> None:
        self.secrets = secrets
        self.values = Values()
        self.commands: list[Command] = []
        self._notes: list[tuple[str, set[str] | None]] = []
        self._functions: dict[str, Block] = {}
        self._called: list[str] = []
        self._ever_called: set[str] = set()
        self._locals: list[dict[str, list[str] | None]] = []
        self._kept: dict[str, str] = {}
        self._before: list[str] = []
        self._follows = False

    # ------------------------------------------------------------ notes

    def note(self, line: int, text: str, names: set[str] | None = None) -> None:
        """Add a note. With `names`, the note is kept only if the script uses one of these variables."""
        shown = released(text)
        self.values.spend(_STEP + len(shown))
        self._notes.append((f"line {line}: {shown}" if line else shown, names))

    def relevant_notes(self) -> list[str]:
        """The notes that apply to this script, without duplicates."""
        notes = [text for text, names in self._notes if names is None or names & self.values.used]
        named = {name for _, names in self._notes for name in names or ()}
        kept = (released(text) for name, text in self._kept.items() if name in self.values.used - named)
        return list(dict.fromkeys((*notes, *kept)))

    # ------------------------------------------------------------ lists and blocks

    def script(self, text: str, line: int) -> bool | None:
        """Read a script that begins at a line; returns its exit status as `_items` does."""
        self.values.spend(_STEP + COMMANDS * len(text))
        outside, self._before, self._follows = (self._before, self._follows), [], False
        status = self._items(parse(text, line))
        self._before, self._follows = outside
        return status

    def _items(self, items: Sequence[Item]) -> bool | None:
        """Read a list of commands; returns whether it succeeds, None if unknown."""
        status: bool | None = True
        for item in items:
            self.values.spend(_STEP)
            runs = {"&&": status, "||": None if status is None else not status}.get(item.operator, True)
            if runs:
                status = self._node(item.node)
            elif runs is None:
                self._maybe(item.node.line, f"after {item.operator}", [item._replace(operator=";")])
            else:
                self._skipped(item.node.line, f"after {item.operator}", [item])
            if item.negated and status is not None and runs:
                status = not status
        return status

    def _node(self, node: Simple | Block) -> bool | None:
        if isinstance(node, Simple):
            return self._simple(node)
        match node.kind:
            case "if":
                self._choice(node, [self._decided(one) if one.condition else True for one in node.branches])
            case "case":
                self._choice(node, [self._matches(node.head[0], one) for one in node.branches])
            case "while" | "until":
                self._while(node)
            case "for":
                self._for(node)
            case "function":
                self._functions[node.head[0]] = node
            case "(":
                before = dict(self.values.variables)
                self.values.spend(len(before))
                self._items(node.branches[0].body)
                self.values.variables.clear()
                self.values.variables.update(before)
            case _:
                return self._items(node.branches[0].body)
        return True

    # ------------------------------------------------------------ choices

    def _choice(self, block: Block, decisions: list[bool | None]) -> None:
        """Read the branches of `if` or `case` that may run: undecided ones, up to the first that is true."""
        maybe: list[bool] = []
        done = False
        for branch, decision in zip(block.branches, decisions, strict=True):
            what = f"case {block.head[0]} in {branch.text}" if block.head else block.shown(branch)
            number = len(self.commands)
            if done or decision is False:
                self._skipped(branch.line, what, branch.body)
                continue
            if decision and not maybe:
                self._items(branch.body)
            else:
                self._maybe(branch.line, what, branch.body)
                maybe.append(len(self.commands) > number)
            done = decision is True
        if sum(maybe) > 1:
            self.note(block.line, f"of the branches of `{block.kind}` a shell runs one; the commands of all are read")

    def _decided(self, branch: Branch) -> bool | None:
        """Evaluate the condition of a branch; None if the script does not determine it."""
        status = self._items(branch.condition)
        last = branch.condition[-1].node if branch.condition else None
        return status if isinstance(last, Simple) and last.words and last.words[0] in _TESTS else None

    def _matches(self, subject: str, branch: Branch) -> bool | None:
        if "*" in branch.patterns:
            return True
        text = self.values.text(subject)
        patterns = [self.values.pattern(pattern) for pattern in branch.patterns]
        if any("$" in one for one in (text, *patterns)):
            return None
        return any(fnmatchcase(text, pattern) for pattern in patterns)

    def _maybe(self, line: int, what: str, items: Sequence[Item]) -> None:
        """Read commands that may not run. Undo assignments to names that already have a value, or from an argument."""
        variables, before = self.values.variables, dict(self.values.variables)
        self.values.spend(_STEP + 10 * len(before))
        self._items(items)
        for name, words in list(variables.items()):
            if words is before.get(name):
                continue
            new, old = " ".join(words), " ".join(before.get(name, []))
            shown = HIDDEN if self.secrets.holds(name) else new
            if name in before and words != before[name]:
                variables[name] = before[name]
            elif name not in before and _ARGUMENT.search(new):
                del variables[name]
            else:
                if name not in before:
                    text = f"{name}={shown} ({what}) is read: the script leaves open whether it runs"
                    self._kept.setdefault(name, f"line {line}: {text}")
                continue
            change = f"{name}+={shown.removeprefix(old)}" if old and shown.startswith(old) else f"{name}={shown}"
            text = f"{change} ({what}) is not read: the script leaves open whether it runs"
            self.note(line, text, {name.partition("[")[0]})

    def _skipped(self, line: int, what: str, items: Sequence[Item]) -> None:
        """Add a note on commands that the script's own values exclude, if they could matter."""
        nodes = self._leaves(items)
        mentioned = [one for node in nodes for text in node.texts() for one in _MENTION.findall(text)]
        if mentioned:
            self.note(line, f"{', '.join(mentioned)} ({what}) is not read: {_OTHERWISE}")
        assigned = [found for node in nodes for word in node.words if (found := ASSIGNMENT.fullmatch(word))]
        if assigned:
            shown = [f"{one[1]}={HIDDEN}" if self.secrets.holds(one[1]) else one[0] for one in assigned]
            self.note(line, f"{'; '.join(shown)} ({what}) is not read: {_OTHERWISE}", {one[1] for one in assigned})

    def _leaves(self, items: Sequence[Item]) -> list[Simple]:
        nodes = list(leaves(items))
        self.values.spend(sum(_STEP + sum(map(len, node.texts())) for node in nodes))
        return nodes

    # ------------------------------------------------------------ loops

    def _while(self, block: Block) -> None:
        branch = block.branches[0]
        what = block.shown(branch)
        runs = self._decided(branch)
        if block.kind == "until" and runs is not None:
            runs = not runs
        if runs is False:
            self._skipped(block.line, what, branch.body)
            return
        number = len(self.commands)
        if runs:
            self._items(branch.body)
        else:
            self._maybe(block.line, what, branch.body)
        if runs or len(self.commands) > number:
            names = assigned_names(word for node in self._leaves(branch.body) for word in node.words)
            text = f"the commands of {what} are read once"
            self.note(block.line, text, None if len(self.commands) > number else names)

    def _for(self, block: Block) -> None:
        """Read the commands of a loop for each value; an OpenRLHF command only for the first value."""
        name, body = block.head[0], block.branches[0].body
        if name == "((":
            self.values.number(block.head[1].partition(";")[0])
            self._items(body)
            self.note(block.line, f"the commands of for (({block.head[1]})) are read once")
            return
        raw = block.head[2:] if len(block.head) > 1 else ('"$@"',)
        values = [value for word in raw for value in self.values.listed(word)]
        self.secrets.read("\n".join(f"{name}={value}" for value in values))
        if not values:
            self._skipped(block.line, f"for {name} in nothing", body)
        number = len(self.commands)
        for value in values:
            self.values.variables[name] = [value]
            self._items(body)
            if len(self.commands) > number:
                if others := [other for other in values if other != value]:
                    text = f"the commands of for {name} are read with {value} alone, not with {', '.join(others)}"
                    self.note(block.line, text)
                elif re.search(r"[{*?[]", value):
                    text = f"the commands of for {name} are read once, with {value} as it is, which a shell may expand to several"
                    self.note(block.line, text)
                return

    # ------------------------------------------------------------ simple commands

    def _simple(self, node: Simple) -> bool | None:
        """Read a simple command; returns its status as `_items` does. Unknown commands are assumed to succeed."""
        if node.words and node.words[0] == "((":
            number = self.values.number(node.words[1])
            return None if number is None else number != 0
        if node.words and node.words[0] == "[[":
            self.values.spend(COMMANDS * len(node.words[1]))
            return (
                None if re.search(r"[<>]|=~", node.words[1]) else double_test(parse(node.words[1]), self.values.pattern)
            )
        number = next((at for at, word in enumerate(node.words) if not ASSIGNMENT.fullmatch(word)), len(node.words))
        assigned, words = node.words[:number], node.words[number:]
        if not words or words[0] in _DECLARERS:
            self._before, self._follows = [], False
            for word in (*assigned, *words):
                if self._locals and words and words[0] in _LOCAL and (found := _NAME.match(word)):
                    self._locals[-1].setdefault(found[0], self.values.variables.get(found[0]))
                self.values.assign(word)
            self._doubts(node.line)
            return True
        expanded = [field for raw in words for field in self.values.fields(raw) if field != "\\"]
        self._doubts(node.line)
        before = {name: self.values.variables.get(name) for name in assigned_names(assigned)}
        for word in assigned:
            self.values.assign(word)
        status = self._run(node, expanded) if expanded else True
        self.values.restore(before)
        return status

    def _run(self, node: Simple, words: list[str]) -> bool | None:
        """Run the shell's built-in effects of a command whose words are already expanded."""
        read = words[0] != ":" and (words[0] not in _PRINTERS or node.to_file)
        if node.bodies and read and self._reads(node, words):
            return True
        match words[0]:
            case "[" | "test":
                return test(words[1 : -1 if words[0] == "[" else None])
            case "true" | ":" | "false":
                return words[0] != "false"
            case "grep" | "which" | "type":
                return None
            case "command" if words[1:2] == ["-v"]:
                return None
            case "set":
                self.values.arguments = words[words.index("--") + 1 :] if "--" in words else self.values.arguments
            case "shift" if self.values.arguments and (*words, "1")[1].isdecimal():
                self.values.spend(len(self.values.arguments))
                self.values.arguments = self.values.arguments[int((*words, "1")[1]) :]
            case "let":
                for word in words[1:]:
                    self.values.number(word)
            case "unset":
                for name in words[1:]:
                    self.values.variables.pop(name, None)
            case "source" | ".":
                self.note(node.line, f"{' '.join(words)} is not read; what it sets has no value here")
            case "eval":
                return self.script(" ".join(words[1:]), node.line)
            case name if name in self._functions:
                self._call(name, words[1:])
            case name if name not in _PRINTERS:
                self._program(node.line, words)
                return True
        self._before, self._follows = [], False
        return True

    def _reads(self, node: Simple, words: list[str]) -> bool:
        """Read the here-document of a command into a variable or as a script; returns whether it is one of these."""
        body = node.bodies[-1]
        self.values.spend(len(body.text))
        if words[0] in ("read", "mapfile", "readarray"):
            self.values.read_into(node, words)
        elif _MENTION.search(body.text):
            if node.to_file:
                self.note(node.line, f"the text of {words[0]} goes to a file; its commands are read as if that ran")
            self.script(body.text if body.literal else self.values.body(body.text), node.line + 1)
        else:
            return False
        return True

    def _call(self, name: str, arguments: list[str]) -> None:
        if len(self._called) > _DEEPEST:
            return
        outside, self.values.arguments = self.values.arguments, arguments
        self._called.append(name)
        self._locals.append({})
        self._items(self._functions[name].branches[0].body)
        self._called.pop()
        self.values.restore(self._locals.pop())
        self._ever_called.add(name)
        self.values.arguments = outside

    def functions_without_a_call(self) -> None:
        """Read the commands of functions that the script defines but never calls."""
        for name, block in self._functions.items():
            number = len(self.commands)
            if name not in self._ever_called:
                self._items(block.branches[0].body)
            if len(self.commands) > number:
                self.note(block.line, f"function {name} is not called; its commands are read")

    def _program(self, line: int, words: list[str]) -> None:
        """Read a call of a program. A line that begins with a flag continues the previous command."""
        loose = words[0].startswith("-")
        if loose:
            if self._follows:
                self.commands.pop()
            words = [*self._before, *words]
        elif self._follows and words[0].startswith("$"):
            self.note(line, f"{words[0]} begins a line and has no value; flags of the command before it are not read")
        shown = " ".join(words[len(self._before) :])
        found = self._find(words, line)
        if loose and found:
            text = f"{shown} is a line of its own, which a shell does not pass on; it is read as part of the command"
            self.note(line, f"{text} before (a backslash is missing there, or a comment or a blank follows it)")
        elif loose:
            self.note(line, f"{shown} follows no command of OpenRLHF and is not read")
        self._before, self._follows = words, found

    def _find(self, words: list[str], line: int) -> bool:
        """Add the OpenRLHF commands in the words or in a script among them; returns whether one was found."""
        self.values.spend(_LOOK * len(words) + sum(map(len, words)))
        for number, word in enumerate(words):
            if found := _MODULE.search(word):
                self.values.spend(_COMMAND)
                launcher = tuple(map(self.secrets.hidden, words[:number]))
                self.commands.append(Command(found[1], launcher, tuple(words[number + 1 :])))
                return True
            if _INSIDE.search(word) and not word.startswith(("$", "`")):
                self.script(word, line)
        return False

    def _doubts(self, line: int) -> None:
        for doubt in self.values.doubts:
            self.note(line, doubt)
        self.values.doubts.clear()
