"""How models write what is not plain speech: what they think, and the tools that they ask for."""
