"""What people read of plans: reasons, files, what is wrong with one that was given, and why none fits."""
