"""The daemon's own protocol: JSON frames over a WebSocket."""
