"""Hide the secrets of a script, such as a W&B key, in everything that is printed about it."""

import re
from collections.abc import Callable, Iterable

from rlhf_core.secrets.redaction import HIDDEN, is_secret_name, without_secrets

_HOLD_SECRETS = {"--use_wandb", "--logger.wandb.key", "wandb login"}
_NO_KEY = re.compile(r".{0,3}|true|false|none", re.IGNORECASE)
"""Values that are hidden only directly after their flag, since `0` and `me` occur in other settings, too."""
_VARIABLE = re.compile(r"\$\{?(\w+)(?::?[-=+?])?")
_GIVEN = re.compile(
    r"""
    (?<![\w.-]) ((--|wandb\ )[\w.-]++ | [A-Za-z_]\w*+)   # --flag VALUE, or NAME=VALUE, NAME:-VALUE, "NAME": "VALUE"
    ((?(2) [=\s,\\] (?:[=\s,\\"'] | \$(?=["']))*+
         | (?:\[[^\]\s]{0,99}\])? (?:\+?=\(? | :[-=] | \\*["']:\s{0,9}) (?:[\\"'] | \$(?=["']))*+))
    (?!-) ([^\s"'\\;&|()<>}]+)
    """,
    re.VERBOSE,
)
"""Name of a flag or variable, the text between, and its value. Repetitions are possessive: the text may be hostile."""


def is_secret(name: str) -> bool:
    """True for a flag or variable whose value is a secret by its name.

    >>> [is_secret(name) for name in ("--use_wandb", "WANDB_API_KEY", "HF_TOKEN", "INPUT_KEY", "--placeholder_token")]
    [True, True, True, False, False]
    """
    return name in _HOLD_SECRETS or is_secret_name(name.lower())


class ScriptSecrets:
    """Variables of a script that hold secrets, and their values, also in parts that are not read as commands."""

    def __init__(self, text: str) -> None:
        self._names: set[str] = set()
        self._values: list[str] = []
        self.read(text)

    def read(self, text: str) -> None:
        """Find the flags and variables with secrets in a text, and the variables that these take their values from."""
        given: dict[str, list[str]] = {}
        for name, _, _, value in _GIVEN.findall(text):
            given.setdefault(name, []).append(value)
        names, values = [*filter(self.holds, given)], {*self._values}
        while names:
            name = names.pop()
            self._names.add(name)
            for value in given.pop(name, ()):
                names += _VARIABLE.findall(value)
                values.update(one for one in _VARIABLE.sub(" ", value).split() if not _NO_KEY.fullmatch(one))
        self._values = sorted(values, key=len, reverse=True)  # the longest first: it may contain others

    def holds(self, name: str) -> bool:
        """Whether a flag, variable or array element holds a secret."""
        name = name.partition("[")[0]
        return name in self._names or is_secret(name)

    def hidden(self, text: str) -> str:
        """`text` without the values of secret flags and variables, and without anything that looks like a secret."""

        def shown(found: re.Match[str]) -> str:
            return f"{found[1]}{found[3]}{HIDDEN}" if self.holds(found[1]) and found[4][0] != "$" else found[0]

        return _GIVEN.sub(shown, without_secrets(text))

    def hide(self, texts: Iterable[str], spend: Callable[[int], None]) -> list[str]:
        """The texts without secrets; `spend` is called with the units of work."""
        return [self.without_values(self.hidden(text), spend) for text in texts]

    def without_values(self, text: str, spend: Callable[[int], None]) -> str:
        """`text` without the secrets of this script, regardless of the flag before them; `spend` gets the work."""
        spend(len(self._values) * (len(text) // 20 + 1))
        for value in self._values:
            text = text.replace(value, HIDDEN)
        return text
