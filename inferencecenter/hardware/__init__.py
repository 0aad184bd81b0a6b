"""The machine: GPUs, memory, cores, their state, and plans for placing models on them."""
