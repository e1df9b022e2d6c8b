"""Building blocks of configuration classes: base class, marks for operational fields, secrets, user functions."""
