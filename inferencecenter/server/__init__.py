"""The sockets: who connects, how they authenticate, what they ask, and how answers reach them."""
