"""Provenance for records that tests make without running a stage."""

from __future__ import annotations

from typing import Any

from rlhf_core.store.records import Provenance


def provenance(**changes: Any) -> Provenance:
    """Return the provenance of a small result, with `changes`."""
    fields: dict[str, Any] = {
        "label": "toy",
        "stage": "toy",
        "payload": {},
        "inputs": (),
        "code": {},
        "metrics": {"loss": 0.5},
        "engines": {},
        "environment": {},
        "started": "2030-01-01T00:00:00.000+00:00",
        "seconds": 1.0,
        "tracking": {},
        "attempts": 1,
        "resumed_from": None,
    }
    return Provenance(**(fields | changes))
