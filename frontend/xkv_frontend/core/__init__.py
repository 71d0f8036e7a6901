"""Pure: no I/O, no clock, no randomness. What the front end decides, apart from how the bytes arrive."""
