"""The card: the engine joined to a block device."""
