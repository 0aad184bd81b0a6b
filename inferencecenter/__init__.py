"""InferenceCenter serves GGUF models to many concurrent clients over persistent WebSocket sessions."""

__version__ = "0.2.0"
