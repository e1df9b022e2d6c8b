"""Write down that a version of a model becomes champion, as a tag of that version."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from rlhf_core.processes.identity import user_name

TAG = "champion."
"""Beginning of the tags that say when a version became champion."""


def move_tag(how: str, why: str) -> dict[str, str]:
    """Return the tag of a version that becomes champion now, by the user of this process; `how` names the command."""
    time = datetime.now(UTC)
    said = {"at": time.isoformat(timespec="seconds"), "how": how, "by": user_name(), "why": why}
    return {f"{TAG}{time.strftime('%Y%m%dT%H%M%S.%fZ')}": json.dumps(said)}
