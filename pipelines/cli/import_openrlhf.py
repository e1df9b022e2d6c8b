"""The former name of `rlhf_contrib.openrlhf.verb`."""

from rlhf_core.moved import moved

moved(__name__)
