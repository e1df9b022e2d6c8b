"""The former place of `rlhf_core.schema.base`."""

from rlhf_core.schema.base import FAILURES, OPERATIONAL, Config, FailureSetting, Operational, by_type, keyed

__all__ = ["FAILURES", "OPERATIONAL", "Config", "FailureSetting", "Operational", "by_type", "keyed"]
