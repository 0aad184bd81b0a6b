"""What a client and the daemon say to each other. Pure: no I/O, no clock."""
