"""`xkv-gateway doctor`: what of this host stands in the gateway's way, and what to do about it."""
