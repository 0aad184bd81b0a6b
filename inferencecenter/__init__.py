"""InferenceCenter: one GGUF model, lent to many clients over persistent WebSockets."""

__version__ = "0.2.0"
