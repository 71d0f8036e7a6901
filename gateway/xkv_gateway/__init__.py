"""The card gateway: engine, card, service, command line."""
