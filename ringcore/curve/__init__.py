"""CurveZMQ on a listening socket: authentication of those who connect, and counts of those who may not."""
