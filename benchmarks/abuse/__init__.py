"""A client with a valid token that repeats operations which are cheap to ask for and dear to answer."""
