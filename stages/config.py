"""The former name of the package with the options of the stages, which are in `stages` now."""

from rlhf_core.moved import moved

moved(__name__)
