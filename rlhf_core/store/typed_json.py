"""Small JSON files of a store, read with the types that were written."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from rlhf_core.store.layout import read_json


class Stored(BaseModel):
    """The base of what a small file of a store holds: each value has the type that was written, and no other."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


S = TypeVar("S", bound=Stored)


def read_stored(path: Path, kind: type[S]) -> S | None:
    """Return what a JSON file holds as `kind`; None if the file is not there or holds anything else, as `read_json`."""
    table = read_json(path)
    try:
        return None if table is None else kind.model_validate(table)
    except ValidationError:
        return None
