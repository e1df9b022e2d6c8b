"""The former name of `rlhf_contrib.planner.estimate`."""

from rlhf_core.moved import moved

moved(__name__)
