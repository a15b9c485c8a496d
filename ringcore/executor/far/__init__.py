"""Workers on other hosts: the connection to a host, its streams of messages, and what the host says of its workers."""
