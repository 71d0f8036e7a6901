"""The soft card: an NVMe/TCP target in a process of its own, over a sparse file or memory.

For development and small set-ups. `python -m xkv_nvmeof.softcard --help`.
"""
