"""The former name of `rlhf_contrib.openrlhf.agent`."""

from rlhf_core.moved import moved

moved(__name__)
