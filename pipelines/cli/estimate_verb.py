"""The former name of `rlhf_contrib.planner.verb`."""

from rlhf_core.moved import moved

moved(__name__)
