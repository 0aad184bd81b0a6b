"""Training of the bundled demo model; nothing of it is in the wheel."""
