"""The ringcore command; it does not know how anything is computed."""
