"""The wire protocol between clients and the daemon. Pure: no I/O, no clock."""
