"""Configure the union of several sets of preference pairs."""

from rlhf_core.schema.base import Config


class MergePreferencesConfig(Config):
    """The union of preference pairs; it has no options."""
