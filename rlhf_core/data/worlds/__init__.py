"""The former name of `rlhf_contrib.worlds`."""

from rlhf_core.moved import moved

moved(__name__)
