"""A client with a valid token that repeats operations which are cheap to request and expensive to serve."""
