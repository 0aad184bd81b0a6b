"""Images of conversations: decoding, storage and their way to the engine."""
