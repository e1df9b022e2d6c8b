"""The former place of `rlhf_core.schema.secrets`."""

from rlhf_core.schema.secrets import *  # noqa: F403
