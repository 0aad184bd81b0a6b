"""What the machine is made of and how it feels."""
