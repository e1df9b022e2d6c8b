"""Define the errors of the library. Every message has the form *dotted key = value: rule; remedy*.

Each class is also the standard exception that it replaces, so callers may catch either.
"""

import difflib
import re
from collections.abc import Sequence
from typing import Any, overload

from rlhf_core.secrets.redaction import without_secrets


class RlhfError(Exception):
    """Base class of the library's errors, made of a message or of its four parts; the message contains no secrets.

    >>> str(ConfigError("ppo.kl.coef", -1, "must be >= 0", "use 0 to switch the penalty off"))
    'ppo.kl.coef = -1: must be >= 0; use 0 to switch the penalty off'
    """

    @overload
    def __init__(self, message: str = "", /) -> None: ...

    @overload
    def __init__(self, key: str, value: object, rule: str, remedy: str, /) -> None: ...

    def __init__(self, *parts: Any) -> None:
        given = (explain(*parts),) if len(parts) == 4 else parts
        super().__init__(*(without_secrets(part) if isinstance(part, str) else part for part in given))


class ConfigError(RlhfError, ValueError):
    """Raised, before compute is spent, for a profile, an option or a model that cannot be used as given."""


class DataError(RlhfError, ValueError):
    """Raised for rows that cannot be read or used; names file, line and reason."""


class ArtifactError(RlhfError, RuntimeError):
    """Raised if the store could not read, verify or commit an artifact."""


class DiskFullError(ArtifactError):
    """A disk has no space left; the command line ends with another status than for invalid input."""


class SamplingError(RlhfError, RuntimeError):
    """Raised if the sampler failed; names the request."""


class TrainingError(RlhfError, RuntimeError):
    """Raised if the trainer failed; names the role and the step."""


class WorkerLostError(RlhfError, RuntimeError):
    """Raised if a worker process, its node or Ray died or did not answer; the run itself is fine and can be retried."""


class TrainerLostError(WorkerLostError, TrainingError):
    """Raised if the trainer's worker is gone."""


class SamplerLostError(WorkerLostError, SamplingError):
    """Raised if the sampler's worker is gone."""


class AgentError(RlhfError, RuntimeError):
    """Raised if an agent's environments could not run at all; a single failed episode is counted instead."""


class RewardError(RlhfError, RuntimeError):
    """Raised if a reward could not be computed; names reward and sample. A failed sample is never scored 0."""


def explain(key: str, value: object, rule: str, remedy: str) -> str:
    """Return an error message in the library's standard form.

    >>> explain("ppo.kl.coef", -1, "must be >= 0", "use 0 to switch the penalty off")
    'ppo.kl.coef = -1: must be >= 0; use 0 to switch the penalty off'
    """
    return f"{key} = {value!r}: {rule}; {remedy}"


def nearest(name: str, names: Sequence[str], *, ending: str = "") -> str:
    """Return the remedy for a misspelled name: the one of `names` that was probably meant, else all of them.

    `ending` is shown behind each name, and not compared. Of two sides, such as `response1` and `response2`, none is guessed
    for a name with another last letter.

    >>> nearest("finl_number", ["final_number", "finished"])
    'did you mean final_number?'
    """
    near = difflib.get_close_matches(name, names, n=2, cutoff=0.5)
    sides = len(near) == 2 and near[0][:-1] == near[1][:-1] and name[-1:] != near[0][-1:]
    if near and not sides:
        return f"did you mean {near[0]}{ending}?"
    known = ", ".join(f"{one}{ending}" for one in sorted(names))
    return f"choose from {known}" if names else "check the spelling"


def distrust(said: str) -> str:
    """Return why a server's certificate is not trusted, from what a client of it said; "" if that is not its trouble.

    >>> distrust("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired (_ssl.c:1006)")
    'certificate has expired'
    """
    found = re.search(r"certificate verify failed(?:: ([^(\])'\"]+))?", said)
    return (found[1] or "it cannot be verified").strip() if found else ""


def readable(number: float, digits: int = 4) -> str:
    """Return a number as people read it: `digits` of it, all of the whole part, and thousands apart.

    >>> [readable(one) for one in (0.43291, 12345.0, 9999.9, 3.0, -0.00001234, float("nan"))]
    ['0.4329', '12,345', '10,000', '3', '-1.234e-05', 'nan']
    """
    if not abs(number) < LARGEST_WRITTEN:
        return f"{number:.{digits}g}"
    is_whole = number == int(number) or abs(number) >= 10**digits - 0.5
    return f"{number:,.0f}" if is_whole else f"{number:.{digits}g}"


LARGEST_WRITTEN = 1e15
"""From here on a number is shown with its exponent."""
