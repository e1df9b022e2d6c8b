"""The former name of `rlhf_contrib.sweep.points`."""

from rlhf_core.moved import moved

moved(__name__)
