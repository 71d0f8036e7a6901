"""Request/reply protocols: the control protocol and its transports."""
