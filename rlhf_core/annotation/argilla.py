"""Read the responses in records of Argilla, as records or rows of a data set of version 1 or 2."""

from collections.abc import Mapping
from typing import Any

from rlhf_core.data.comparisons import Row
from rlhf_core.data.exports import Response, rows_of
from rlhf_core.errors import DataError


def responses(row: Row) -> tuple[Mapping[str, Any], list[Response]]:
    """Return the fields of a record and the submitted responses, from any of Argilla's layouts.

    `Record.to_dict` of Argilla 2 and 1 nest fields and responses; their datasets have a column for each.
    """
    if isinstance(row.get("fields"), Mapping):
        given = row.get("responses")
        if isinstance(given, Mapping):
            said = [one for question, rows in given.items() for one in _to_question(question, rows)]
        else:
            if not isinstance(given, (list, tuple, type(None))):
                raise DataError(f"not responses: {type(given).__name__}; a list, or an object by question, is needed")
            said = [one for response in given or () for one in _of_user(response)]
        return row["fields"], said
    said, questions = [], set()
    for name, value in row.items():
        if name.endswith(".responses"):  # Argilla 2
            question = name.removesuffix(".responses")
            columns = {"value": value, "user_id": row.get(f"{name}.users"), "status": row.get(f"{name}.status")}
        elif isinstance(value, Mapping) and {"user_id", "value"} <= set(value):
            question, columns = name, dict(value)  # a sequence of structs is a struct of lists
        elif (
            isinstance(value, (list, tuple)) and value and all(isinstance(v, Mapping) and "user_id" in v for v in value)
        ):
            said += _to_question(name, value)  # Argilla 1
            questions.add(name)
            continue
        else:
            continue
        said += _to_question(question, rows_of(columns, ("value", "user_id", "status")))
        questions.add(question)
    fields = {name: value for name, value in row.items() if name.partition(".")[0] not in questions}
    return {name: value for name, value in fields.items() if isinstance(value, (str, list, tuple))}, said


def _to_question(question: str, rows: Any) -> list[Response]:
    if not isinstance(rows, (list, tuple)) or not all(isinstance(one, Mapping) and "value" in one for one in rows):
        raise DataError(f"not responses: question {question!r} needs a list of objects with a value")
    return [
        Response(str(one.get("user_id") or ""), question, _kind(one["value"]), one["value"])
        for one in rows
        if one.get("status") in (None, "submitted") and one["value"] is not None
    ]


def _of_user(response: Any) -> list[Response]:
    """Return one user's responses to all questions (Argilla 1 and the server's API)."""
    if not isinstance(response, Mapping) or not isinstance(response.get("values"), Mapping):
        raise DataError("not a response: values by question are needed; export records with `to_dict`")
    found = []
    for question, given in response["values"].items():
        value = given.get("value") if isinstance(given, Mapping) else given
        found += _to_question(question, [{**response, "value": value}])
    return found


def _kind(value: Any) -> str:
    if isinstance(value, (list, tuple, Mapping)):
        return "ranking"
    return "rating" if isinstance(value, (int, float)) and not isinstance(value, bool) else "choices"
