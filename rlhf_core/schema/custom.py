"""Configure a user's function in place of a built-in formula: `type = "custom", function = "my_loss.py:loss"`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rlhf_core.schema.base import Config


class CustomFunction(Config):
    """A user's function and its keyword arguments."""

    function: str = Field(pattern=r".:\w+$")
    """`file.py:name` or `module:name`. Its code, and every module of yours that it imports, is part of the stage's key."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the function."""
