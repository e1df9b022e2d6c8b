"""The former place of `rlhf_core.schema.custom`."""

from rlhf_core.schema.custom import CustomFunction

__all__ = ["CustomFunction"]
