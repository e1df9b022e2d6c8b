"""Read options of `[ppo]` under their former names, and record results under them, so that these keep their keys.

Until version 0.2 the options of `[ppo.kl]`, `[ppo.ahead]` and `[ppo.value]` were keys of `[ppo]` itself.
"""

import re
from collections.abc import Mapping
from typing import Any

from rlhf_core.schema.base import SPELLINGS

FORMER = {
    "kl_coef": ("kl", "coef"),
    "kl_in": ("kl", "in"),
    "kl_credit": ("kl", "credit"),
    "kl_estimator": ("kl", "estimator"),
    "kl_target": ("kl", "target"),
    "kl_horizon": ("kl", "horizon"),
    "reference_sync": ("kl", "reference_sync"),
    "dynamic_sampling": ("ahead", "type"),
    "staleness": ("ahead", "steps"),
    "partial_tokens": ("ahead", "tokens"),
    "in_flight_groups": ("ahead", "in_flight_groups"),
    "value_clip": ("value", "clip"),
    "value_warmup_steps": ("value", "warmup_steps"),
    "value_optimizer": ("value", "optimizer"),
}
"""Former key -> its table and its option."""
_FORMER = re.compile(rf"^((?:recipe\.)?[^.]+(?:\.ppo)?)\.({'|'.join(FORMER)})(?=[.\[]|$)")
_SPELLED = re.compile(rf"(?<=\.)(?<!\.terms\.)({'|'.join(SPELLINGS)})$")
OF_REWARD = {"credit": "token"}
OF_LOSS = {"estimator": "k2"}
"""Options of one type of `[ppo.kl]` and the values at which the other type had them, too."""
OFF: tuple[object, ...] = (0, None, "none")
"""Values of the former keys of `[ppo.ahead]` that switch a way of sampling off."""


def renamed(table: Mapping[str, Any], below: Mapping[str, Any]) -> Mapping[str, Any]:
    """Move the former keys of a `[ppo]`, which is laid over the current one `below`, to the current tables.

    Raises ValueError for an option under both of its names, and for ways of sampling that exclude each other.

    >>> renamed({"kl_coef": 0.1, "staleness": 1}, below={})
    {'kl': {'coef': 0.1}, 'ahead': {'type': 'staleness', 'steps': 1}}
    """
    given = {name: table[name] for name in FORMER if name in table}
    if not given:
        return table
    dynamic = given.get("dynamic_sampling")
    if dynamic not in OFF and not (isinstance(dynamic, Mapping) and dynamic.get("type", "dynamic") == "dynamic"):
        rule = 'must be a table, the options of `[ppo.ahead] type = "dynamic"`'
        raise ValueError(f"dynamic_sampling = {dynamic!r}: {rule}; write that table")
    current = {name: value for name, value in table.items() if name not in FORMER}
    for name, (section, option) in FORMER.items():
        beside = current.get(section)
        both = section == "ahead" or not isinstance(beside, Mapping) or option in beside
        if name in given and beside is not None and both:
            key = section if section == "ahead" else f"{section}.{option}"
            raise ValueError(f"{name} = {given[name]!r}: is the former name of {key}, which is set, too; remove {name}")
    for name, value in given.items():
        section, option = FORMER[name]
        if section != "ahead":
            current[section] = {**current.get(section, {}), option: value}
    if "kl" in current:
        current["kl"] = _without_other_type(current["kl"], below.get("kl"))
    ways = {name: given[name] for name, (section, _) in FORMER.items() if section == "ahead" and name in given}
    if ways:
        ahead = _ahead(_ways(below.get("ahead")) | ways)
        if ahead or below.get("ahead"):
            current["ahead"] = ahead or "none"
    return current


def present_option(key: str) -> str:
    """The present name of an option of a stage or a profile, for a name that records and old profiles may use.

    >>> present_option("ppo.kl_coef"), present_option("recipe.improve.staleness"), present_option("ppo.ahead.staleness")
    ('ppo.kl.coef', 'recipe.improve.ahead.steps', 'ppo.ahead.staleness')
    >>> present_option("ppo.rewards.normalise"), present_option("ppo.rewards.terms.normalise.weight")  # a term's name is the user's
    ('ppo.rewards.normalize', 'ppo.rewards.terms.normalise.weight')
    """

    def moved(found: re.Match[str]) -> str:
        table, option = FORMER[found[2]]
        return f"{found[1]}.{table}" if option == "type" else f"{found[1]}.{table}.{option}"

    return _SPELLED.sub(lambda found: SPELLINGS[found[1]], _FORMER.sub(moved, key, count=1))


def _without_other_type(kl: Mapping[str, Any], below: object) -> dict[str, Any]:
    before = below if isinstance(below, Mapping) else {}
    others = OF_LOSS if {**before, **kl}.get("in", "reward") == "reward" else OF_REWARD
    return {name: value for name, value in kl.items() if name not in others or value != others[name]}


def _ways(ahead: Any) -> dict[str, Any]:
    """Convert `[ppo.ahead]` to the former names."""
    table = {"type": ahead} if isinstance(ahead, str) else dict(ahead) if isinstance(ahead, Mapping) else {}
    match table.pop("type", None):
        case "dynamic":
            return {"dynamic_sampling": table, "staleness": 0, "partial_tokens": 0, "in_flight_groups": 0}
        case "partial":
            names = {"tokens": "partial_tokens"}
        case _:
            names = {"steps": "staleness"}
    off = {"dynamic_sampling": None, "staleness": 0, "partial_tokens": 0, "in_flight_groups": 0}
    return off | {names.get(name, name): value for name, value in table.items()}


def _ahead(ways: Mapping[str, Any]) -> dict[str, Any]:
    """Convert former keys to `[ppo.ahead]`; {} if they switch everything off."""
    dynamic, behind, tokens, groups = (
        ways[name] for name in ("dynamic_sampling", "staleness", "partial_tokens", "in_flight_groups")
    )
    for name in ("staleness", "partial_tokens"):
        if dynamic not in OFF and ways[name] not in OFF:
            raise ValueError(
                f"{name} = {ways[name]!r}: dynamic_sampling samples again after a step is scored, with the weights of that "
                "step; remove one of them"
            )
    if dynamic not in OFF:
        return {"type": "dynamic", **dynamic}
    partial = {"tokens": tokens, "in_flight_groups": groups, "staleness": behind}
    given = {name: value for name, value in partial.items() if value not in OFF}
    if tokens in OFF and groups in OFF:
        return {} if behind in OFF else {"type": "staleness", "steps": behind}
    return {"type": "partial", **given}


def recorded(table: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `[ppo]` under the names, and in the order, in which results were recorded."""
    kl, value = dict(table["kl"]), table["value"]
    flat: dict[str, Any] = {}
    for name, one in table.items():
        if name == "kl":
            flat |= {"kl_coef": kl["coef"], "kl_in": kl["in_"], "kl_credit": kl.get("credit", "token")}
            flat |= {"kl_estimator": kl["estimator"]} if "estimator" in kl else {}
            flat |= {"reference_sync": kl["reference_sync"]} if "reference_sync" in kl else {}
            flat |= {"kl_target": kl["target"], "kl_horizon": kl["horizon"]}
        elif name == "ahead":
            flat |= _ways(one)
        elif name == "value":
            flat |= {"value_clip": one["clip"], "value_warmup_steps": one["warmup_steps"]}
        else:
            flat[name] = one
        if name == "optimizer":
            flat["value_optimizer"] = value["optimizer"]
    return flat
