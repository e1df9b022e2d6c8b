"""Read the responses in tasks that Label Studio exports as JSON."""

from collections.abc import Mapping
from typing import Any

from rlhf_core.data.comparisons import Row
from rlhf_core.data.exports import Response
from rlhf_core.errors import DataError

LONGEST_S = 1e9  # maximum seconds for one response; longer or invalid times count as not measured


def responses(row: Row) -> tuple[Mapping[str, Any], list[Response]]:
    """Return the data of a task and the results of its annotations; cancelled ones and predictions are left out."""
    data, annotations = row.get("data"), row.get("annotations")
    if not isinstance(data, Mapping) or not isinstance(annotations, (list, tuple)):
        raise DataError(
            "not a task of Label Studio: data and annotations are needed; export as JSON, not as JSON-MIN or CSV"
        )
    said: list[Response] = []
    for annotation in annotations:
        if not isinstance(annotation, Mapping) or not isinstance(annotation.get("result"), (list, tuple)):
            raise DataError("not an annotation: it has no list `result`; export as JSON with annotations")
        if annotation.get("was_cancelled"):
            continue
        lead_time = annotation.get("lead_time")
        seconds = float(lead_time) if isinstance(lead_time, (int, float)) and 0 <= lead_time < LONGEST_S else 0.0
        for result in annotation["result"]:
            if isinstance(result, Mapping) and isinstance(result.get("value"), Mapping) and "from_name" in result:
                kind = str(result.get("type"))
                value = result["value"].get({"pairwise": "selected"}.get(kind, kind))
                shown = _names(result.get("to_name"))
                person = _person(annotation.get("completed_by"))
                said.append(Response(person, str(result["from_name"]), kind, value, shown, seconds))
    return data, said


def _person(completed_by: Any) -> str:
    if isinstance(completed_by, Mapping):
        completed_by = completed_by.get("id", completed_by.get("email", ""))
    return "" if completed_by is None else str(completed_by)


def _names(to_name: Any) -> tuple[str, ...]:
    parts = to_name.split(",") if isinstance(to_name, str) else to_name if isinstance(to_name, (list, tuple)) else ()
    return tuple(str(part).strip() for part in parts)
