"""The former name of `rlhf_contrib.planner.memory`."""

from rlhf_core.moved import moved

moved(__name__)
