"""Who runs next, in which slot, and how much of which prompt a step reads. Pure: no I/O, no clock."""
