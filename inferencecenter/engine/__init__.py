"""Process 2: one model, one llama context, continuous batching. Started as ``python -m inferencecenter.engine``."""
