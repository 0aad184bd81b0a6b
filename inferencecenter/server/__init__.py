"""The port: listener, HTTP and WebSocket protocols, connections and their limits, control socket, web page."""
