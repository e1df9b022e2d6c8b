"""The former name of `rlhf_contrib.planner.sizes`."""

from rlhf_core.moved import moved

moved(__name__)
