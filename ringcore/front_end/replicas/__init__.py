"""Several engines of one configuration as one: their devices, their deaths and replacements, and who gets a request."""
