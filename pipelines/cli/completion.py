"""Print a script by which a shell completes commands, options and the names of profiles (`rlhf completion`)."""

import argparse
import sys
from collections.abc import Mapping
from shlex import quote

from pipelines.cli.main import _parser
from pipelines.flows.profile import profile_names

Words = Mapping[str, str]
"""Word -> its description."""


def completion(options: argparse.Namespace) -> None:
    """Print the script of a shell."""
    commands = _commands(_parser())
    texts = {name: parser.description or "" for name, parser in commands.items()}
    words = {name: _words(parser) for name, parser in commands.items()}
    sys.stdout.write({"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell](texts, words))


def _commands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {name: inner for action in actions for name, inner in action.choices.items()}


def _words(parser: argparse.ArgumentParser) -> Words:
    """Collect all words that may follow a command, including words of its subcommands (such as `ls` of `store`)."""
    found: dict[str, str] = {}
    for name, inner in _commands(parser).items():
        found |= {name: inner.description or "", **_words(inner)}
    for action in parser._actions:
        text = (action.help or "") % vars(action)
        found |= {option: text for option in action.option_strings if option.startswith("--")}
        if action.choices and not isinstance(action, argparse._SubParsersAction):
            found |= dict.fromkeys(map(str, action.choices), "")
        if action.dest == "profile" or text.startswith("profile"):
            found |= dict.fromkeys(profile_names(), "profile")
    return found


def _bash(texts: Words, words: Mapping[str, Words]) -> str:
    cases = "".join(f"    {name}) words={quote(' '.join(found))} ;;\n" for name, found in words.items())
    return f"""_rlhf() {{
  local words={quote(" ".join(texts))}
  [ "$COMP_CWORD" -gt 1 ] && case "${{COMP_WORDS[1]}}" in
{cases}  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _rlhf rlhf
"""


def _zsh(texts: Words, words: Mapping[str, Words]) -> str:
    def listed(found: Words) -> str:
        return " ".join(quote(f"{word}:{text}") for word, text in found.items())

    cases = "".join(f"    {name}) found=({listed(inner)}) ;;\n" for name, inner in words.items())
    return f"""#compdef rlhf
_rlhf() {{
  local -a found=({listed(texts)})
  (( CURRENT > 2 )) && case $words[2] in
{cases}  esac
  _describe rlhf found
  (( CURRENT > 2 )) && _files
}}
compdef _rlhf rlhf
"""


def _fish(texts: Words, words: Mapping[str, Words]) -> str:
    def line(condition: str, word: str, text: str) -> str:
        said = text.replace("\\", "\\\\").replace("'", "\\'")
        return f"complete -c rlhf -n '{condition}' -a '{word}' -d '{said}'\n"

    first = [line("__fish_use_subcommand", name, text) for name, text in texts.items()]
    then = [
        line(f"__fish_seen_subcommand_from {name}", word, text)
        for name, found in words.items()
        for word, text in found.items()
    ]
    return "".join([*first, *then])
