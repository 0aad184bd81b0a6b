"""Messages between the front (process 1) and the engine (process 2), and both ends of the pipe."""
