"""What configuration classes are made of: their base, the mark for operational fields, secrets, functions of users."""
