"""The function to paste for rows in a form that `prepare_data` does not read.

A source names it: `function = "rows.py:to_row"`. It gets each row of the file, and returns a row in a known form, a
list of several, or None to leave the row out. Names and meanings that the row does not determine are written in
capitals, so that Python refuses the function until its user has replaced them. Unused columns stay in the row, so that
columns of the prompt, and verdicts, are read or refused as in any other row.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from rlhf_core.errors import DataError, side

Row: TypeAlias = Mapping[str, Any]

PROMPTS = ("prompt", "instruction", "question", "query", "problem", "input", "messages", "conversations")
"""Names of columns with the prompt of a pair; the first one that a row has counts. `instruction` goes with `input`."""
_PROMPTS = (*PROMPTS, "context", "history", "post", "ask", "request", "task", "user", "human")
_NAMES = {
    "completion": ("completion", "response", "output", "answer", "reply", "target", "solution", "assistant"),
    "chosen": ("chosen", "better", "preferred", "accepted"),
    "rejected": ("rejected", "worse", "dispreferred"),
    "messages": ("messages", "conversations", "conversation", "dialogue", "dialog", "chat", "turns"),
    "text": ("text", "document", "body", "content"),
}
"""Column of a form -> the names that data sets give to it."""
_FORMS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"), ("prompt", "completion"), ("messages",), ("text",))
_VERDICTS = (
    *("winner", "preference", "overall_preference", "preferred", "better", "choice", "verdict", "vote", "chosen"),
    *("labels", "label"),
)
_NO_ANSWERS = re.compile(
    r"(\w+_)?(op|option|choice|ending|sentence|text|image|audio|video|model|id|score"
    r"|prompt|question|rationale|reason|explanation|critique|comment)s?_?"
)
_SIDES = (("a", "b"), ("A", "B"), ("first", "second"), ("left", "right"))
_NAMED_SIDE = re.compile(
    r"((the\W*)?(model|assistant|chatbot|system|candidate|answer|response|completion|output)[\W_]*)?", re.IGNORECASE
)
"""Words that may stand before a side: `model_a` says that a is better, `worse_a` does not."""
_LISTS = ("completions", "responses", "generations", "answers", "candidates")
_TEXTS = ("response", "completion", "text", "content", "answer", "generation")
_BEST_FIRST = ("rank", "ranks")
_BEST_LAST = (*("overall_score", "overall_rating", "rating", "score"), *("ratings", "scores", "rewards"))
_CAPITALS = re.compile(
    r"\b(GOOD_LABELS|FIRST_IS_BETTER|TIE|SIGN|THRESHOLD|UP|DOWN|PROMPT|ANSWER|TEXT|LEFT|RIGHT|QUESTION|FIRST|SECOND)\b"
)
RATINGS = (
    ("chosen_score", "rejected_score"),
    ("chosen-rating", "rejected-rating"),
    ("chosen_rating", "rejected_rating"),
)
"""Columns of a pair with the ratings of its answers, whose difference is the margin."""


class UnknownForm(DataError):
    """Raised for a row in an unknown form; `function` is the text to paste, and `lines` the body of the function."""

    def __init__(self, rule: str, function: str) -> None:
        super().__init__(rule)
        self.function, self.lines = function, function.partition("def to_row(row):\n")[2]


def unknown(rule: str, row: Row) -> UnknownForm:
    """The error for a row, with the function that writes rows such as this one in a known form."""
    return UnknownForm(f"{rule}; the row has {sorted(row)}", to_paste(row))


def pasted(*lines: str) -> str:
    """The remedy of an error: paste a function with these lines."""
    code = "".join(f"    {line}\n" for line in lines)
    capitals = ", ".join(dict.fromkeys(_CAPITALS.findall(code)))
    decide = f" (first replace {capitals}, which only you know)" if capitals else ""
    return f'give the source function = "rows.py:to_row" and no `columns`, with rows.py beside the profile{decide}:\n\ndef to_row(row):\n{code}'


def to_paste(row: Row) -> str:
    """The remedy for a row: the function that writes rows such as this one in a known form."""
    return next(pasted(*lines) for recipe in _RECIPES if (lines := recipe(row)))


def verdicts_of_classes(columns: Mapping[str, str], label: str, classes: Sequence[str]) -> str:
    """The remedy for classes whose names do not tell which one is good; `columns` are the source's mapped columns."""
    others = "".join(
        f"{_quoted(ours)}: {_cell(theirs)}, " for ours, theirs in columns.items() if theirs and ours != "label"
    )
    made = f'return row | {{{others}"label": None if said is None else said in GOOD_LABELS}}'
    return pasted(f"said = {_cell(label)}  # one of {json.dumps([*classes], ensure_ascii=False)}", made)


def compared_sides(row: Row) -> tuple[str, str, str] | None:
    """The columns with the two answers of a comparison, and the column with the verdict on them."""
    names = [(name, *side(name)) for name, value in row.items() if isinstance(value, (str, list)) and value]
    pairs = [
        (one, other)
        for one, stem, first in names
        for other, same, second in names
        if stem == same and not _NO_ANSWERS.fullmatch(stem)
        if (first, second) in (("1", "2"), ("0", "1")) and type(row[one]) is type(row[other])
    ]
    verdict = _first(row, _VERDICTS)
    if not pairs or not verdict:
        return None
    return *max(pairs, key=lambda pair: (isinstance(row[pair[0]], list), len(str(row[pair[0]])))), verdict


# ---------------------------------------------------------------- recipes: the lines of a function for a row, if it fits


def _comparison(row: Row) -> list[str]:
    if not (found := compared_sides(row)):
        return []
    first, second, verdict = found
    said = row[verdict]
    turns = isinstance(row[first], list)
    prompt, last = ('"prompt": sides[0][:-1], ', "[-1:]") if turns else (_prompt(row, (first, second)), "")
    lines = [f"sides, said = ({_cell(first)}, {_cell(second)}), {_cell(verdict)}"]
    made = f'row | {{{prompt}"chosen": chosen{last}, "rejected": rejected{last}}}'
    if words := _both_words(said, (first, second)):
        one, other = words
        lines += [
            f'chosen, rejected = {{{_quoted(one)}: sides, {_quoted(other)}: sides[::-1], "tie": (None, None)}}[said]'
        ]
        return [*lines, f"return chosen and {made}"]
    lines += ["chosen, rejected = sides if FIRST_IS_BETTER else sides[::-1]  # such as said == 1, or said < 0"]
    return [*lines, f"return None if TIE else {made}"]


def _ratings(row: Row) -> list[str]:
    """The best and the worst answer of a list, by a number in each answer or in a second list."""
    name = _first(row, _LISTS)
    answers = row[name] if name else ()
    if not isinstance(answers, list) or len(answers) < 2:
        return []
    items, text = _cell(name), ""
    if isinstance(answers[0], Mapping):
        text = f'["{_first(answers[0], _TEXTS) or "TEXT"}"]'
    beside = [one for one, numbers in row.items() if one != name and isinstance(numbers, list) and _numbers(numbers)]
    number = _first(dict.fromkeys(beside, 1), (*_BEST_LAST, *_BEST_FIRST)) or next(iter(beside), "")
    if text and (own := _first(answers[0], (*_BEST_FIRST, *_BEST_LAST))):
        number, of = own, f'["{own}"]'
    elif number:
        items, of, text = f"zip({_cell(number)}, {items}, strict=True)", "[0]", f"[1]{text}"
    else:
        return []
    sign = "" if number in _BEST_FIRST else "-" if number in _BEST_LAST else "SIGN * "
    made = f'{_prompt(row)}"chosen": best{text}, "rejected": worst{text}'
    if sign == "-":
        made += f', "margin": float(best{of}) - float(worst{of})'
    return [
        f"best, *_, worst = sorted({items}, key=lambda one: {sign}float(one{of}))",
        f"return row | {{{made}}} if float(best{of}) != float(worst{of}) else None",
    ]


def _judged(row: Row) -> list[str]:
    """One answer with a thumb or a reward."""
    judged = _first(row, ("thumbs", "reward"))
    answer, turns = (_spelled(row, _NAMES[name]) for name in ("completion", "messages"))
    if not judged or not (answer or turns):
        return []
    made = f"{_prompt(row)}{_answer(row, answer)}" if answer else f'"messages": {_cell(turns)}'
    if judged == "reward":
        return [f'return row | {{{made}, "label": float(row.pop("reward")) > THRESHOLD}}']
    said = row["thumbs"]
    up, down = "UP", "DOWN"
    if isinstance(said, str) and re.search("up|down", said, re.IGNORECASE):
        up, down = (
            repr(re.sub("up|down", word if said.islower() else word.title(), said, flags=re.I))
            for word in ("up", "down")
        )
    return [
        f'good = {{{up}: True, {down}: False, "": None, None: None}}[row.pop("thumbs")]',
        f'return row | {{{made}, "label": good}} if good is not None else None',
    ]


def _rated_pair(row: Row) -> list[str]:
    found = rated_pair(row)
    if not found:
        return []
    return [f'return row | {{"score_chosen": {_cell(found[0])}, "score_rejected": {_cell(found[1])}}}']


def rated_pair(row: Row) -> tuple[str, str] | None:
    """The columns with the ratings of a pair under other names than `score_chosen` and `score_rejected`."""
    return next((pair for pair in RATINGS if all(row.get(name) is not None for name in pair)), None)


def _nested_label(row: Row) -> list[str]:
    inner = row.get("reward_model")
    made = f'{_prompt(row)}"label": row.pop("reward_model")["ground_truth"]'
    return [f"return row | {{{made}}}"] if inner else []


def _label_studio(row: Row) -> list[str]:
    if "annotations" not in row or not isinstance(row.get("data"), Mapping):
        return []
    return [
        'done = [one for one in row["annotations"] if not one.get("was_cancelled")]',
        'sides = {"left": (row["data"]["LEFT"], row["data"]["RIGHT"]), "right": (row["data"]["RIGHT"], row["data"]["LEFT"])}',
        'chosen = [sides[one["value"]["selected"]] for each in done for one in each["result"] if one["type"] == "pairwise"]',
        'return [{"prompt": row["data"]["PROMPT"], "chosen": best, "rejected": worst} for best, worst in chosen]',
    ]


def _argilla(row: Row) -> list[str]:
    if not isinstance(row.get("fields"), Mapping) or "responses" not in row:
        return []
    return [
        'fields, said = row["fields"], [one["value"] for one in row["responses"]["QUESTION"] if one["status"] == "submitted"]',
        'sides = {"FIRST": (fields["FIRST"], fields["SECOND"]), "SECOND": (fields["SECOND"], fields["FIRST"])}',
        'return [{"prompt": fields["PROMPT"], "chosen": sides[one][0], "rejected": sides[one][1]} for one in said]',
    ]


def _renamed(row: Row) -> list[str]:
    """A known form whose columns have other names."""
    for form in _FORMS:
        found = {ours: _spelled(row, _NAMES.get(ours, _PROMPTS)) for ours in form}
        if found.get("prompt") == "instruction" and (answer := found.get("completion")):
            return [f"return row | {{{_answer(row, answer)}}}"]
        if all(found.values()):
            made = ", ".join(f'"{ours}": {_cell(theirs)}' for ours, theirs in found.items())
            return [f"return row | {{{made}}}"]
    return [f"return row | {{{_prompt(row)}{_answer(row, 'ANSWER')}}}"]


_RECIPES: tuple[Callable[[Row], list[str]], ...] = (
    *(_label_studio, _argilla, _comparison, _ratings, _judged, _rated_pair, _nested_label, _renamed),
)


# ---------------------------------------------------------------- private


def _first(row: Row, names: tuple[str, ...]) -> str:
    return next((name for name in names if row.get(name) not in (None, "")), "")


def _spelled(row: Row, names: tuple[str, ...]) -> str:
    """The column with one of `names`, ignoring case and signs; empty if the row has none of them."""
    plain = {re.sub(r"[\W_]", "", name).lower(): name for name, value in row.items() if isinstance(value, (str, list))}
    return next((plain[name] for name in names if name in plain), "")


def _quoted(text: str) -> str:
    """Quote any text as a Python literal."""
    return json.dumps(text, ensure_ascii=False)


def _cell(name: str) -> str:
    return f"row.pop({_quoted(name)})"


def _prompt(row: Row, without: tuple[str, ...] = ()) -> str:
    """The item with the prompt; none for `instruction`, which is read with its `input`."""
    name = _spelled({name: value for name, value in row.items() if name not in without}, _PROMPTS)
    return "" if name == "instruction" else f'"prompt": {_cell(name or "PROMPT")}, '


def _answer(row: Row, name: str) -> str:
    return f'"{"output" if _prompt(row) == "" else "completion"}": {_cell(name)}'


def _numbers(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(one, (int, float)) for one in values)


def _both_words(said: Any, names: tuple[str, str]) -> tuple[str, str] | None:
    """The verdicts for the first and the second answer, if `said` names one of the two."""
    for pair in (names, *_SIDES) if isinstance(said, str) else ():
        for word in pair:
            stem = said.removesuffix(word)
            if re.search(rf"(^|[\W_]){re.escape(word)}$", said) and _NAMED_SIDE.fullmatch(stem):
                return stem + pair[0], stem + pair[1]
    return None
