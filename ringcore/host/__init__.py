"""The host machine and this process: resources, limits, file names, fork safety."""
