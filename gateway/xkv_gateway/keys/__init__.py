"""The keys of the CURVE endpoint: a directory of certificates, and who may touch what."""
