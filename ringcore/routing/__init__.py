"""Which replica gets a request: policies, the loads that they read, and the names of a prompt's prefixes."""
