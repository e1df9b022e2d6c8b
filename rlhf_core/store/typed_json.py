"""Read the small JSON files of a store with strict types."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from rlhf_core.store.layout import read_json
from rlhf_core.store.protocol import StoredTable


class Stored(BaseModel):
    """Base class for the content of a small file of a store: each value must have exactly the type that was written."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


S = TypeVar("S", bound=Stored)


def read_stored(path: Path, kind: type[S]) -> S | None:
    """Load the content of a JSON file as `kind`; None if it does not exist or has other content. See `read_json`."""
    return parse(read_json(path), kind)


def stored_in(table: StoredTable | None, kind: type[S]) -> S | None:
    """The value of a table as `kind`; None if the table is missing or has other content."""
    return parse(None if table is None else table.value, kind)


def parse(value: object, kind: type[S]) -> S | None:
    """The value as `kind`; None if it is something else."""
    try:
        return kind.model_validate(value)
    except ValidationError:
        return None
