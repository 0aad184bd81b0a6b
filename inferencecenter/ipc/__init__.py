"""What the front (process 1) and the engine (process 2) say to each other, and both ends of the pipe."""
