"""NVMe over TCP, both sides, as sans-IO cores and thin shells."""
