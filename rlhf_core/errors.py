"""Define the errors of the library. Every message has the form *dotted key = value: rule; remedy*.

Each class is also the standard exception that it replaces, so callers may catch either.
"""

import difflib
import re
from collections.abc import Collection, Sequence
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
    """Format an error message in the library's standard form.

    >>> explain("ppo.kl.coef", -1, "must be >= 0", "use 0 to switch the penalty off")
    'ppo.kl.coef = -1: must be >= 0; use 0 to switch the penalty off'
    """
    return f"{key} = {value!r}: {rule}; {remedy}"


_SIDE = re.compile(r"(?P<stem>.+?)_?(?P<side>\d|(?<=_)[ab]|[AB]|(?<=_)(?:first|second|left|right))")
_SIDES = {"a": "1", "first": "1", "left": "1", "b": "2", "second": "2", "right": "2"}


def nearest(name: str, names: Sequence[str], *, ending: str = "", otherwise: str = "") -> str:
    """Suggest a remedy for a misspelled name: the likeliest of `names`, else all of them, or `otherwise`.

    `ending` is shown behind each name, and not compared.

    >>> nearest("finl_number", ["final_number", "finished"])
    'did you mean final_number?'
    """
    near = difflib.get_close_matches(name, of_its_side(name, names), n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]}{ending}?"
    if otherwise:
        return otherwise
    known = ", ".join(f"{one}{ending}" for one in sorted(names))
    return f"choose from {known}" if names else "check the spelling"


def side(name: str) -> tuple[str, str]:
    """Split a name into base and side ("1" or "2"; "" for none), for pairs of columns that are compared.

    >>> side("response_a"), side("response2"), side("human_ref_B"), side("data")
    (('response', '1'), ('response', '2'), ('human_ref', '2'), ('data', ''))
    """
    found = _SIDE.fullmatch(name)
    return (found["stem"], _SIDES.get(found["side"].lower(), found["side"])) if found else (name, "")


def of_its_side(name: str, names: Collection[str]) -> list[str]:
    """The names that may be meant by a misspelled one: where there are both sides, `response_b` is not `response1`.

    >>> of_its_side("response_b", ["response", "response1", "response2"]), of_its_side("respons", ["response"])
    (['response2'], ['response'])
    """
    sides = {side(one) for one in names}
    if not any((stem, "1") in sides and (stem, "2") in sides for stem, _ in sides):
        return list(names)
    return [one for one in names if side(one)[1] == side(name)[1]]


def distrust(said: str) -> str:
    """Explain why a server's certificate is not trusted, from a client's error; "" for other errors.

    >>> distrust("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired (_ssl.c:1006)")
    'certificate has expired'
    """
    found = re.search(r"certificate verify failed(?:: ([^(\])'\"]+))?", said)
    return (found[1] or "it cannot be verified").strip() if found else ""


def readable(number: float, digits: int = 4) -> str:
    """Format a number for people: `digits` of it, all of the whole part, and thousands apart.

    >>> [readable(one) for one in (0.43291, 12345.0, 9999.9, 3.0, -0.00001234, float("nan"))]
    ['0.4329', '12,345', '10,000', '3', '-1.234e-05', 'nan']
    """
    if not abs(number) < LARGEST_WRITTEN:
        return f"{number:.{digits}g}"
    is_whole = number == int(number) or abs(number) >= 10**digits - 0.5
    return f"{number:,.0f}" if is_whole else f"{number:.{digits}g}"


LARGEST_WRITTEN = 1e15
"""From here on a number is shown with its exponent."""
