"""Training of the bundled demo model; not part of the wheel."""
