"""Remote calls by method name: the table of public methods, their scopes, and the network endpoint."""
