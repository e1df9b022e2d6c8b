"""The former name of `rlhf_contrib.sandbox`."""

from rlhf_core.moved import moved

moved(__name__)
