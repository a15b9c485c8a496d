"""The persistent batch: the rows of running requests, on the host and on the device."""
