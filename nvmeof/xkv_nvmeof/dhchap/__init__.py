"""DH-HMAC-CHAP, the in-band authentication of NVMe over Fabrics (Base 2.0, 8.13.5): pure, on both sides.

Secrets and randomness come in as arguments, messages as bytes. Nothing here puts a secret into a text.
"""
