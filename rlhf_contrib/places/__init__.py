"""Files with which another place runs profiles."""
