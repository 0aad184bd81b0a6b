"""Which turn runs next, in which slot, and which prompt tokens a step prefills. Pure: no I/O, no clock."""
